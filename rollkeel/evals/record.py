"""Results of an evaluation on disk: one line per finished item, so that a run killed at any moment resumes there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput, Corrupt
from rollkeel.evals.benchmarks import Item
from rollkeel.events import write_atomic
from rollkeel.types import Rollout, Status

ITEMS, SETTINGS, RESULTS = "items.jsonl", "settings.json", "results.json"
Record = dict[str, Any]


def record_of(item: Item, sampled: Sequence[Rollout], greedy: Rollout | None, read: Any) -> Record:
    """The line of one item; `read`: what a response votes for, or None."""

    def answer(r: Rollout) -> Record:
        vote = read(r.text) if read is not None else None
        return {
            "reward": r.reward,
            "status": r.status.value,
            "tokens": r.span.own_count,
            "vote": vote,
            "detail": r.detail,
            "text": r.text,
        }

    line = {"key": item.key, "hash": item.hash, "unit": item.unit or item.key, "group": item.group, "order": item.order}
    line |= {"prompt": sampled[0].prompt.text, "answer": item.answer} if sampled else {}
    return {**line, "samples": [answer(r) for r in sampled], "greedy": None if greedy is None else answer(greedy)}


def scored(record: Record) -> bool:
    """True if every sample of the item has a reward: an item with a failure in it is asked again on resume."""
    return all(s["reward"] is not None for s in [*record["samples"], *([record["greedy"]] if record["greedy"] else [])])


def failures(record: Record) -> dict[str, int]:
    """Samples of an item without a reward, by what failed."""
    kinds = [
        s["status"]
        for s in [*record["samples"], *([record["greedy"]] if record["greedy"] else [])]
        if s["reward"] is None
    ]
    return {k: kinds.count(s) for k, s in (("grader", Status.GRADER_FAILURE), ("engine", Status.ENGINE_FAILURE))}


def append(file: Path, record: Record) -> None:
    """Add one line, flushed. Raises `BadInput` when it cannot be written."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise BadInput(f"cannot write {file}: {error.strerror or error}; free space and run it again") from None


def load(file: Path) -> dict[str, Record]:
    """Records by item, the last line of an item wins; a last line cut short by a kill is taken off the file.

    Raises `Corrupt` for a damaged line anywhere else.
    """
    if not file.is_file():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with file.open("r+b") as stream:
            stream.truncate(len(whole))
    found: dict[str, Record] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            found[record["key"]] = record
        except (ValueError, KeyError, TypeError):
            raise Corrupt(f"{file} line {number}: damaged; remove the line, and its item is asked again") from None
    return found


def open_folder(out: Path, settings: Mapping[str, Any]) -> None:
    """Make a folder of results, or resume one of the same settings. Raises `BadInput` naming the first setting that differs."""
    file = out / SETTINGS
    try:
        if not file.is_file():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise BadInput(f"{out}: expected a new folder or one of an evaluation; choose another --out")
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps(settings, indent=1) + "\n")
            return
        before = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror or error}; choose another --out") from None
    except ValueError:
        raise Corrupt(f"{file}: not valid JSON; choose another --out") from None
    for key, now in json.loads(json.dumps(settings)).items():
        if before.get(key) != now:
            was = json.dumps(before.get(key))[:120]
            raise BadInput(f"{out}: was begun with {key} {was}, got {json.dumps(now)[:120]}; choose another --out")


def read_results(folder: Path) -> dict[str, Any]:
    """`results.json` of a folder. Raises `BadInput` where there is none."""
    file = folder / RESULTS
    if not file.is_file():
        raise BadInput(f"{folder}: holds no {RESULTS} of a finished evaluation; run `rollkeel eval` to its end")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise Corrupt(f"{file}: not valid JSON; run the evaluation again, its items are kept") from None
