"""A diagnosis as a person reads it: the verdict first, then each cause with its numbers, what to do and where to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from rollkeel_doctor.diagnosis import Cause, Diagnosis

_STYLE = {"bug": "bold red", "numerics": "bold yellow", "dynamics": "bold magenta"}
_SHOWN = 5
_PIPED = 10_000


def show(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print to `console`, standard output if None. Colour and wrapping only where it is a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED  # for grep: one line a statement
    console.print(rendered(diagnosis))


def rendered(diagnosis: Diagnosis) -> RenderableType:
    d = diagnosis
    parts: list[RenderableType] = [
        Text(f"{d.source} {d.path}: {d.tokens:,} tokens, {_count(d.sequences, 'sequence')}, {_count(d.steps, 'step')}")
    ]
    if not d.causes:
        parts.append(Text(d.verdict, style="bold green" if d.healthy else "bold"))
    for rank, cause in enumerate(d.causes, 1):
        parts += _cause(rank, cause)
    parts += _list("observed", d.observed)
    parts += _list("not examined", _reasons(d.not_examined))
    parts += _list("not read", d.notes)
    return Group(*parts)


def _cause(rank: int, cause: Cause) -> list[RenderableType]:
    head = Text.assemble(f"\n{rank}. ", (cause.id, _STYLE[cause.kind]), f"  {cause.kind}, score {cause.score:.2f}")
    lines: list[RenderableType] = [head, _indented(Text(cause.evidence)), _indented(Text(f"Do: {cause.advice}"))]
    if cause.positions:
        shown = "; ".join(f"step {p['step']} rollout {p['id']} token {p['token']}" for p in cause.positions[:_SHOWN])
        more = len(cause.positions) - _SHOWN
        lines.append(_indented(Text(f"See: {shown}{f'; {more} more with --json' if more > 0 else ''}", style="dim")))
    return lines


def _reasons(missing: Mapping[str, str]) -> list[str]:
    """One line for each reason with the causes it stands for."""
    by_reason: dict[str, list[str]] = {}
    for cause, reason in missing.items():
        by_reason.setdefault(reason, []).append(cause)
    return [f"{', '.join(causes)}: {reason}" for reason, causes in by_reason.items()]


def _list(title: str, lines: Sequence[str]) -> list[RenderableType]:
    if not lines:
        return []
    return [Text(f"\n{title}", style="bold"), *(_indented(Text(line)) for line in lines)]


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 3), expand=False)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
