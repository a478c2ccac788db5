"""The work on one chunk of rows: everything that looks at a row alone, written to a folder that appears when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.data.contamination import Benchmarks
from rollkeel.data.difficulty import pass_rates, prompt_key
from rollkeel.data.features import band_hashes, canonical, digest, mixed, shingle_sets, squeezed, tokens
from rollkeel.data.harmful import filters
from rollkeel.data.normalise import clean
from rollkeel.data.options import RATE_COLUMNS, CleanOptions
from rollkeel.data.reading import Chunk, Malformed, parse, text_of

PROMPTS, ANSWERS = 0, 1
"""Rows of `keys.npy`."""
_BATCH_ROWS, _BATCH_CHARACTERS = 512, 2**19
"""Rows whose tokens are in memory together."""


@dataclass
class Tally:
    """What a chunk's rows went through, as JSON values."""

    rows: int = 0
    kept: int = 0
    changed: int = 0
    """Rows in which normalisation took characters out."""
    characters: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """What was seen and did not remove a row."""
    removed: list[tuple[int, str, str, str]] = field(default_factory=list)
    """Row number, stage, reason, detail."""
    examples: list[dict[str, Any]] = field(default_factory=list)


@final
class Worker:
    """Made once per process: options and everything that chunks are compared with."""

    def __init__(self, options: CleanOptions, names: list[str], work: Path) -> None:
        """`names`: of the input files, as the output calls them. Raises `BadInput` for what cannot be read."""
        self.options = options
        self.names = names
        self.work = work
        columns = options.columns
        self.texts: dict[str, str] = {"prompt": columns.prompt}
        self.texts |= {n: c for n in ("answer", "solution", "domain") if (c := getattr(columns, n)) is not None}
        self.benchmarks = Benchmarks(options.decontaminate) if options.decontaminate.benchmarks else None
        self.filters = filters(options.harmful)
        self.rates = pass_rates(options.pass_rate) if options.pass_rate.rollouts else None

    def run(self, chunk: Chunk) -> int:
        """Work on a chunk and leave `work/<number>`; returns the number of its rows."""
        tally = Tally()
        rows = list[dict[str, Any]]()
        keys = list[tuple[int, int]]()
        bands = []
        shingles = []
        starts = [np.zeros(1, np.int64)]
        for part in _batches(self._parsed(chunk, tally)):
            found = tokens([canonical(row["prompt"]) for row in part])
            gone = self._contaminated(part, found, tally)
            stay = [i for i in range(len(part)) if i not in gone and self._rated(part[i], tally)]
            answers = [squeezed(part[i].get("answer", "")) for i in stay]
            keys += [(prompt_key(part[i]["prompt"]), digest(text)) for i, text in zip(stay, answers, strict=True)]
            rows += [part[i] for i in stay]
            if self.options.near.enabled and stay:
                sets, begins = shingle_sets(found, self.options.near.shingle)
                kept = np.array(stay)
                data = np.concatenate([sets[begins[i] : begins[i + 1]] for i in stay])
                ends = np.cumsum(np.diff(begins)[kept])
                guard = self._guard(
                    [part[i]["prompt"] for i in stay], found.formulas()[kept], found.mark_sums()[kept], answers
                )
                own = np.concatenate([[0], ends])
                bands.append(band_hashes(data, own, self.options.near.bands, self.options.near.rows, guard))
                shingles.append(data)
                starts.append(ends + starts[-1][-1])
        tally.kept = len(rows)
        self._write(chunk, tally, rows, {
            "keys": np.array(keys, np.uint64).reshape(-1, 2).T,
            "bands": np.concatenate(bands, 1) if bands else np.zeros((self.options.near.bands, 0), np.uint64),
            "shingles": np.concatenate(shingles) if shingles else np.zeros(0, np.uint32),
            "starts": np.concatenate(starts),
        })  # fmt: skip
        return tally.rows

    def _parsed(self, chunk: Chunk, tally: Tally) -> Iterator[dict[str, Any]]:
        """Rows that are well-formed and not harmful, cleaned."""
        limits, failing = self.options.malformed, Counter[str]()
        for number, line in enumerate(chunk.lines, chunk.first):
            if isinstance(line, bytes) and not line.strip():
                continue
            tally.rows += 1
            row: dict[str, Any] = {}
            try:
                record = parse(line)
                changes = Counter[str]()
                for name, column in self.texts.items():
                    row[name] = text = clean(text_of(record, column), changes)
                    if not text.strip():
                        raise Malformed(f"{name}: empty")
                    if len(text) > limits.max_characters:
                        raise Malformed(f"{name}: over {limits.max_characters} characters")
                if len(row["prompt"]) < limits.min_characters:
                    raise Malformed(f"prompt: under {limits.min_characters} characters")
            except Malformed as fault:
                shown = line.decode("utf-8", "backslashreplace") if isinstance(line, bytes) else str(line)
                self._remove(tally, chunk.file, number, "malformed", str(fault), "", shown)
                continue
            if changes := +changes:
                tally.changed += 1
                tally.characters += changes
            for column in self.options.columns.keep:
                value = record.get(column)
                value = value if value is None or isinstance(value, str) else json.dumps(value, default=str)
                row[column] = value if value is None else value.encode("utf-8", "replace").decode()
            row |= {"source": self.names[chunk.file], "row": number, "_file": chunk.file}
            if not self._harmful(row, tally, failing):
                yield row
        tally.notes += failing

    def _harmful(self, row: Mapping[str, Any], tally: Tally, failing: Counter[str]) -> bool:
        texts = {name: row[name] for name in self.texts}
        for function in self.filters:
            try:
                reason = function(texts)
            except Exception as error:  # a user's hook can fail in any way, and a failure says nothing about the row
                failing["harmful: the hook failed"] += 1
                why = " ".join(repr(error).split())[:200]
                self._show(tally, row["_file"], row["row"], "harmful", "the hook failed (kept)", why, texts["prompt"])
                continue
            if reason:
                name = " ".join(reason.split())[:100] if isinstance(reason, str) else "harmful"
                self._remove(tally, row["_file"], row["row"], "harmful", name, "", texts["prompt"])
                return True
        return False

    def _contaminated(self, rows: list[dict[str, Any]], found: Any, tally: Tally) -> set[int]:
        gone: set[int] = set()
        for hit in self.benchmarks.hits([row["prompt"] for row in rows], found) if self.benchmarks else ():
            assert self.benchmarks is not None  # for the type checker
            row, item = rows[hit.text], self.benchmarks.items[hit.item]
            detail = f"{hit.how} of {item.file} row {item.row}"
            if hit.numbers:
                gone.add(hit.text)
                reason = f"{Path(item.file).name}, {'hash' if hit.how == 'hash' else 'n-gram'}"
                self._remove(tally, row["_file"], row["row"], "contaminated", reason, detail, row["prompt"], item.text)
            else:
                tally.notes["contaminated: same words, other numbers (kept)"] += 1
        return gone

    def _rated(self, row: dict[str, Any], tally: Tally) -> bool:
        """Annotate a row with its pass rate; False if that puts it out of the band."""
        if self.rates is None:
            return True
        options, rate = self.options.pass_rate, self.rates.get(prompt_key(row["prompt"]))
        known = rate is not None and rate.attempts >= options.attempts
        row["attempts"] = rate.attempts if rate else 0
        if rate is None or not known:
            tally.notes["pass rate: unknown"] += 1
            if options.unknown == "drop":
                self._remove(tally, row["_file"], row["row"], "pass rate", "unknown", "", row["prompt"])
            return options.unknown == "keep"
        row["pass_rate"], row["difficulty"] = rate.share, rate.bucket
        tally.notes[f"difficulty: {rate.bucket}"] += 1
        if options.low <= rate.share <= options.high:
            return True
        side = "below" if rate.share < options.low else "above"
        detail = f"{rate.passed} of {rate.attempts}"
        self._remove(tally, row["_file"], row["row"], "pass rate", f"{side} the band", detail, row["prompt"])
        return False

    def _guard(self, prompts: list[str], formulas: np.ndarray, marks: np.ndarray, answers: list[str]) -> np.ndarray:
        """What near duplicates must agree in beside the words, `[n]`."""
        near = self.options.near
        guard = marks if near.numbers else np.zeros(len(answers), np.uint64)
        prose = [len(t) > near.answer_characters and sum(map(str.isalpha, t)) > len(t) / 2 for t in answers]
        short = [digest(t) if near.answers and not long else 0 for t, long in zip(answers, prose, strict=True)]
        whole = [
            digest(squeezed(t)) if near.numbers and formula else 0 for t, formula in zip(prompts, formulas, strict=True)
        ]
        return mixed(mixed(guard) ^ np.array(whole, np.uint64)) ^ np.array(short, np.uint64)

    def _remove(
        self, tally: Tally, file: int, row: int, stage: str, reason: str, detail: str, text: str, other: str = ""
    ) -> None:
        tally.removed.append((row, stage, reason, detail))
        self._show(tally, file, row, stage, reason, detail, text, other)

    def _show(
        self, tally: Tally, file: int, row: int, stage: str, reason: str, detail: str, text: str, other: str = ""
    ) -> None:
        seen = sum(1 for e in tally.examples if (e["stage"], e["reason"]) == (stage, reason))
        if seen < self.options.examples:
            where = {"file": self.names[file], "row": row, "text": text[:300], "other": other[:300]}
            tally.examples.append({"stage": stage, "reason": reason, "detail": detail, **where})

    def _write(self, chunk: Chunk, tally: Tally, rows: list[dict[str, Any]], arrays: Mapping[str, np.ndarray]) -> None:
        folder = shard_folder(self.work, chunk.number)
        unfinished = folder.with_suffix(f".{os.getpid()}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        schema = self.schema()
        table = pa.Table.from_pylist(rows, schema=schema) if rows else schema.empty_table()
        pq.write_table(table, unfinished / "rows.parquet", compression="lz4")
        for name, array in arrays.items():
            np.save(unfinished / f"{name}.npy", array)
        told = {**tally.__dict__, "file": chunk.file}
        (unfinished / "tally.json").write_text(json.dumps(told), encoding="utf-8")
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.exists():  # else a worker whose parent was killed finished it meanwhile, to the same bytes
                raise
            shutil.rmtree(unfinished)

    def schema(self) -> pa.Schema:
        """Columns of the output, all text but the row number and the pass rate's."""
        text = [(name, pa.string()) for name in (*self.texts, *self.options.columns.keep, "source")]
        kinds = dict(zip(RATE_COLUMNS, (pa.float64(), pa.int64(), pa.string()), strict=True))
        return pa.schema([*text, ("row", pa.int64()), *(kinds.items() if self.rates is not None else ())])


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch, characters = list[dict[str, Any]](), 0
    for row in rows:
        batch.append(row)
        characters += len(row["prompt"])
        if len(batch) == _BATCH_ROWS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def shard_folder(work: Path, number: int) -> Path:
    return work / f"{number:06d}"
