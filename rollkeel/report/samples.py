"""Rollouts token by token: which ones are worth showing, and what both engines thought of each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as compute

from rollkeel.errors import RollkeelError
from rollkeel.record.rollout_store import read_step
from rollkeel.record.runfolder import rollout_files

pc: Any = compute  # its functions are made at import time

_COLUMNS = [
    "step",
    "id",
    "group",
    "member",
    "prompt_text",
    "answer",
    "status",
    "reward",
    "text",
    "detail",
    "engine",
    "dtype",
    "token_ids",
    "logprobs",
    "versions",
    "train_logprobs",
    "keep",
    "sampled",
    "pieces",
]
_FULL = 0.25
"""|p − q| that gets the full colour."""
_MAX_TEXT = 1500
MAX_STEPS = 16
"""Steps that can be chosen on the page."""
_FEWEST = 200
"""Tokens of an answer that are shown before another step is."""
_READ = 200_000
"""Tokens of a step that are looked through for those worth showing."""
_MAX_PIECE = 40


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token as the page shows it."""

    text: str
    title: str
    style: str
    dropped: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout as the page shows it. All texts are untrusted."""

    why: str
    row: Mapping[str, Any]
    prompt: str
    tokens: list[Token]
    hidden: int
    """Tokens beyond the ones shown."""
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's rollouts as the page shows them."""

    step: int
    rollouts: int
    """How many the file has; a few of them are shown."""
    reward: float | None
    """Mean over the graded ones."""
    samples: list[Sample]


def browse(run: Path, count: int, max_tokens: int, problems: list[str]) -> list[Step]:
    """Up to `count` rollouts of each of several steps, evenly over the run, at most `max_tokens` tokens in all.

    The longer the answers, the fewer the steps; the last one is always there. A damaged file is named in `problems` and
    left out.
    """
    files = rollout_files(run)
    if count <= 0 or max_tokens <= 0:
        return []
    chosen: list[tuple[int, list[tuple[str, Mapping[str, Any]]], list[Mapping[str, Any]]]] = []
    left = max_tokens
    for step, path in _order(files):
        rows = _rows(path, problems)
        if rows and (left > 0 or not chosen):
            chosen.append((step, choose(rows, count), rows))
            left -= sum(min(len(row["token_ids"]), _FEWEST) for _, row in chosen[-1][1])
        if left <= 0 or len(chosen) >= MAX_STEPS:
            break
    each = max_tokens // max(sum(len(picked) for _, picked, _ in chosen), 1)
    unnamed = any(row.get("pieces") is None for _, picked, _ in chosen for _, row in picked)
    piece = token_texts(run, problems) if unnamed else str
    steps = [_step(step, picked, rows, max(each, 1), piece) for step, picked, rows in chosen]
    return sorted(steps, key=lambda step: step.step)


def _order(files: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """The last, then the first, then the middles between those: however soon it ends, what it has is spread evenly."""
    at, parts = [len(files) - 1, 0], [(0, len(files) - 1)]
    for low, high in parts:  # grows while it is read
        if high - low > 1:
            middle = (low + high) // 2
            at.append(middle)
            parts += [(low, middle), (middle, high)]
    return [files[i] for i in dict.fromkeys(at) if files]


def _rows(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """Rows of the file as far as `_READ` tokens go, at least one."""
    try:
        table = read_step(path, _COLUMNS)
    except RollkeelError as error:
        problems.append(str(error))
        return []
    lengths = pc.fill_null(pc.list_value_length(table["token_ids"]), 0).to_numpy()
    fit = int(np.searchsorted(np.cumsum(lengths), _READ, side="right"))
    return [row for row in table.slice(0, max(fit, 1)).to_pylist() if _whole(row)]


def _step(
    step: int,
    picked: Sequence[tuple[str, Mapping[str, Any]]],
    rows: Sequence[Mapping[str, Any]],
    limit: int,
    piece: Callable[[int], str],
) -> Step:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return Step(
        step=step,
        rollouts=len(rows),
        reward=float(np.mean(rewards)) if rewards else None,
        samples=[_sample(why, row, limit, piece) for why, row in picked],
    )


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether there are tokens, with a value each in every column that has any."""
    ids, each = row["token_ids"], ("logprobs", "versions", "train_logprobs", "keep", "sampled", "pieces")
    return bool(ids and row["logprobs"]) and all(len(row[c]) == len(ids) for c in each if row.get(c))


def choose(rows: Sequence[Mapping[str, Any]], count: int) -> list[tuple[str, Mapping[str, Any]]]:
    """`(reasons, row)`: largest gap, most dropped tokens, best, worst; then in order. No row twice."""
    trained = [row for row in rows if row.get("train_logprobs")]
    graded = [row for row in rows if row["reward"] is not None]
    dropped = [row for row in trained if row.get("keep") and not all(row["keep"])]
    wanted: list[tuple[str, Mapping[str, Any]]] = []
    if trained:
        wanted.append(("largest gap between the engines", max(trained, key=lambda row: float(gap(row).max()))))
    if dropped:
        wanted.append(("most tokens dropped", max(dropped, key=lambda row: row["keep"].count(False))))
    if graded:
        wanted.append(("highest reward", max(graded, key=lambda row: row["reward"])))
        wanted.append(("lowest reward", min(graded, key=lambda row: row["reward"])))
    chosen: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for why, row in wanted:
        before = chosen.get(row["id"])
        chosen[row["id"]] = (f"{before[0]}, {why}" if before else why, row)
    for row in rows:
        chosen.setdefault(row["id"], ("next in order", row))
    return [(why[:1].upper() + why[1:], row) for why, row in chosen.values()][:count]


def gap(row: Mapping[str, Any]) -> np.ndarray:
    """`[n]` |p − q| of the response tokens, in probability; 0 for what an environment wrote."""
    found = np.abs(np.exp(np.array(row["train_logprobs"])) - np.exp(np.array(row["logprobs"])))
    return found if row.get("sampled") is None else np.where(row["sampled"], found, 0.0)


def _sample(why: str, row: Mapping[str, Any], limit: int, piece: Callable[[int], str]) -> Sample:
    ids = row["token_ids"]
    pieces = row.get("pieces") or [piece(i) for i in ids[:limit]]
    return Sample(
        why=why,
        row={**row, "detail": row["detail"][:_MAX_TEXT], "answer": row["answer"][:_MAX_TEXT]},
        prompt=_cut(row["prompt_text"]),
        tokens=[_token(row, i, pieces[i]) for i in range(min(limit, len(ids)))],
        hidden=max(len(ids) - limit, 0),
        trained=bool(row.get("train_logprobs")),
    )


def _token(row: Mapping[str, Any], i: int, piece: str) -> Token:
    log_q = row["logprobs"][i]
    shown = visible(piece)
    version = f", version {row['versions'][i]}" if row.get("versions") else ""
    facts = f"id {row['token_ids'][i]}, position {i}{version}"
    lines = [shown.replace("\n", "") + f"  ({facts})"]
    if row.get("sampled") and not row["sampled"][i]:
        return Token(text=shown, title=f"{lines[0]}\nwritten by the environment", style="opacity:.55", dropped=False)
    lines.append(f"sampler q = {np.exp(log_q):.6g}  (log {log_q:.6g})")
    style, dropped = "", False
    if row.get("train_logprobs"):
        log_p = row["train_logprobs"][i]
        difference = float(np.exp(log_p) - np.exp(log_q))
        lines.append(f"trainer p = {np.exp(log_p):.6g}  (log {log_p:.6g})")
        lines.append(f"|p − q| = {abs(difference):.3g}   p/q = {np.exp(np.clip(log_p - log_q, -20, 20)):.6g}")
        style = shade(difference)
    if row.get("keep"):
        dropped = not row["keep"][i]
        if dropped:
            lines.append("dropped by a mask")
    return Token(text=shown, title="\n".join(lines), style=style, dropped=dropped)


def shade(difference: float) -> str:
    """Background for p − q: one hue where the trainer finds the token likelier, another where less; √ of the size."""
    strength = min(abs(difference) / _FULL, 1.0) ** 0.5
    if strength < 0.02:
        return ""
    hue = "--more" if difference > 0 else "--less"
    return f"background:rgb(var({hue})/{strength * 0.75:.2f})"


def visible(piece: str) -> str:
    """A token's text with line breaks and control characters made visible, cut to 40 characters."""
    names = {"\n": "↵\n", "\t": "⇥\t", " ": " "}
    text = "".join(names.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in piece[:_MAX_PIECE])
    return (text + "…" if len(piece) > _MAX_PIECE else text) or "∅"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} … ({len(text) - _MAX_TEXT} more characters)"


def token_texts(run: Path, problems: list[str]) -> Callable[[int], str]:
    """Decodes single tokens with the tokenizer saved in the run; falls back to the ids."""
    candidates = [run / "model" / "tokenizer.json", *sorted(run.glob("checkpoints/step_*/model/tokenizer.json"))[::-1]]
    for file in candidates:
        if not file.is_file():
            continue
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises bare Exception for a damaged file.
            problems.append(f"tokenizer {file} cannot be read: {' '.join(str(error).split())[:200]}")
            continue
        return lambda i: tokenizer.decode([i], skip_special_tokens=False)
    return lambda i: f"⟨{i}⟩"
