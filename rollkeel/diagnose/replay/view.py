"""`rollkeel replay RUN --step N` for people: one line when it is the same, a table of what differs when it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from rollkeel.diagnose.replayed import MetricChange

ROWS = 24
_PARTS = {"both": "sampling and update", "rollout": "sampling", "update": "update on the recorded rollouts"}


def show(verdict: Mapping[str, Any], changes: Sequence[MetricChange], console: Console | None = None) -> None:
    """Print what `Verdict.to_json` holds; it fits 80 columns."""
    console = Console(highlight=False) if console is None else console
    for part in parts(verdict, changes):
        console.print(part)


def parts(verdict: Mapping[str, Any], changes: Sequence[MetricChange]) -> Iterator[RenderableType]:
    """Headline, differences, effects, notes."""
    between, parting = verdict["between"], verdict["parting"]
    head = f"step {verdict['step']}, {'unchanged, ' if verdict['overrides'] else ''}{_PARTS[verdict['part']]}"
    if parting:
        yield Text(f"{head}: not the record", style="bold red")
        yield Text(f"  first at step {parting['step']}: {parting['place']}")
    else:
        yield Text(f"{head}: the same bit for bit", style="green")
        saved = f", weights of {verdict['saved']}" if verdict["saved"] else ""
        yield Text(
            f"  {verdict['metrics']} metrics, {verdict['rollouts']} rollouts, {verdict['tokens']:,} tokens,"
            f" version {verdict['version']}{saved}"
        )
    done = f", {between} step{'s' if between > 1 else ''} between done again" if between else ""
    yield Text(f"  from {verdict['start']}{done}", style="dim")
    if verdict["overrides"]:
        yield Text(f"\nwith {' '.join(verdict['overrides'])}", style="bold")
    if changes:
        yield _metrics(changes)
    elif verdict["overrides"]:
        yield Text("  no metric differs")
    yield from _effects(verdict)
    for note in verdict["notes"]:
        yield Text(f"note: {note}", style="dim")


def _metrics(changes: Sequence[MetricChange]) -> RenderableType:
    """Metrics that both sides have first, largest relative difference first; bins of probabilities stay in the JSON."""
    shown = [c for c in changes if "/by_probability/" not in c.name and "/equal_version/" not in c.name]
    shown.sort(key=lambda c: c.difference is None)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("metric", overflow="fold")
    for name in ("recorded", "replayed", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in shown[:ROWS]:
        table.add_row(Text(c.name), _value(c.recorded), _value(c.replayed), _value(c.difference))
    hidden = len(changes) - len(shown[:ROWS])
    if hidden:
        table.add_row(Text(f"and {hidden} more (--json)", style="dim"))
    return table


def _effects(verdict: Mapping[str, Any]) -> Iterator[RenderableType]:
    found, apart = verdict["effects"], verdict["distance"]
    if apart and apart["apart"] == 0:
        yield Text("weights after the update: the same bit for bit")
    elif apart:
        share = f" ({apart['relative']:.3g} of the unchanged update)" if "relative" in apart else ""
        turned = f", cosine of the updates {apart['cosine']:.6f}" if "cosine" in apart else ""
        yield Text(f"weights after the update: {apart['apart']:.4g} apart{share}{turned}")
    if not found:
        return
    if found["rollouts"] and found["rollouts_equal"] < found["rollouts"]:
        after = found["first_change_mean"]
        yield Text(
            f"rollouts: {found['rollouts_equal']} of {found['rollouts']} have the same tokens; others part after {after:.1f} tokens on average"
        )
    for side in ("recorded", "replayed"):
        gap = found[side]
        if gap.get("tokens") and "logprob_gap" in gap:
            dropped = f", {gap['dropped']:.0f} dropped" if "dropped" in gap else ""
            yield Text(
                f"{side}: mean |log o − log q| {gap['logprob_gap']:.4g}, k3 {gap['kl_k3']:.4g} over {gap['tokens']:.0f} tokens{dropped}"
            )
    if found["keep_differs"]:
        yield Text(f"{found['keep_differs']} tokens of equal rollouts are dropped on one side alone:")
        for e in found["examples"][:6]:
            piece = "" if e["piece"] is None else f" {e['piece']!r}"
            yield Text(
                f"  rollout {e['id']} token {e['token']}{piece}: q {_both(e['q'])}, o {_both(e['o'])},"
                f" A {e['advantage']:+.2f}: {e['recorded']} → {e['replayed']}"
            )


def _both(sides: Sequence[float | None]) -> str:
    """A probability as recorded and, where three places tell it, as replayed."""
    recorded, replayed = ("-" if side is None else f"{side:.3f}" for side in sides)
    return recorded if recorded == replayed else f"{recorded} → {replayed}"


def _value(value: Any) -> Text:
    return Text("-" if value is None else f"{value:.6g}" if isinstance(value, int | float) else str(value)[:20])
