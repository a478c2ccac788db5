"""From files of strangers to rows fit for training: each chunk alone, then what needs all rows, then the output.

Only the first part is long. Each chunk's work is a folder that is renamed when it is whole, so a run that ended at any
moment resumes behind the last whole chunk, and writes the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rollkeel.data import mixing
from rollkeel.data.duplicates import KEPT, MIX, ShingleStore, Verdicts, exact, near, read_rows
from rollkeel.data.options import CleanOptions
from rollkeel.data.output import write
from rollkeel.data.reading import Chunk, chunks, expand
from rollkeel.data.shards import ANSWERS, PROMPTS, Worker, shard_folder
from rollkeel.data.work import manifest_of, opened
from rollkeel.errors import BadInput, RunStopped
from rollkeel.host import signals_blocked

Progress = Callable[[str, int, int | None], None]
"""Stage, how much of it is done, and of how much if that is known."""


@dataclass
class Judged:
    """All rows that were left after the chunks, in input order."""

    folders: list[Path]
    """Shards."""
    offsets: NDArray[np.int64]
    """First row of each shard, then their number n."""
    verdicts: Verdicts
    copies: NDArray[np.int64]
    """How often each row is written `[n]`."""
    report: dict[str, Any]
    """What is known so far."""


def clean(
    inputs: Sequence[str],
    out: Path,
    options: CleanOptions | None = None,
    *,
    processes: int = 1,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Clean the rows of `inputs` (paths, folders, patterns) into the folder `out`; returns what `report.json` holds.

    Run again after any end, it resumes. Neither `processes` nor interruptions change a byte of the output.
    Raises `BadInput` for input that cannot be used, `RunStopped` where malformed rows or failures of the hook pass their limits
    (the work stays, and serves another attempt with other limits).
    """
    options = options or CleanOptions()
    files = expand(inputs)
    progress("reading", 0, None)
    manifest, rows = manifest_of(files, options)
    names = [str(file) for file in files]
    # Built before the folder is made: options that cannot be used leave nothing behind.
    worker = Worker(options, names, out / "work")
    columns = [*worker.texts.values(), *options.columns.keep]
    for file in files:
        if file.name.endswith(".parquet"):
            next(chunks([file], 1, columns), None)  # its columns
    with opened(out, manifest) as work:
        count = _work(worker, chunks(files, options.chunk_rows, columns), processes, rows, progress)
        folders = [shard_folder(work, i) for i in range(count)]
        judged = _judge(folders, names, options, progress)
        report = write(
            judged.folders, judged.offsets, judged.verdicts, judged.copies, judged.report, out, worker, progress
        )
        shutil.rmtree(work)
    return report


# -- chunk by chunk ----------------------------------------------------------------------------------------------------

_worker: Worker | None = None


def _start(options: CleanOptions, names: list[str], work: Path) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends its workers
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    _worker = Worker(options, names, work)


def _watch(parent: int) -> None:
    """End this process when its parent is gone: the queue between them would let it wait for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run(chunk: Chunk) -> int:
    assert _worker is not None
    return _worker.run(chunk)


def _work(worker: Worker, source: Iterator[Chunk], processes: int, rows: int | None, progress: Progress) -> int:
    """Do the chunks that are not done; returns how many there are."""
    done = count = 0
    pool: ProcessPoolExecutor | None = None
    pending: set[Future[int]] = set()
    try:
        for chunk in source:
            count += 1
            if shard_folder(worker.work, chunk.number).exists():
                done += len(chunk.lines)
            elif processes <= 1:
                worker.run(chunk)
                done += len(chunk.lines)
            else:
                if pool is None:
                    context = multiprocessing.get_context("spawn")
                    start = (worker.options, worker.names, worker.work)
                    pool = ProcessPoolExecutor(processes, context, _start, start)
                with signals_blocked(signal.SIGINT):  # the first ones start the workers
                    pending.add(pool.submit(_run, chunk))
                if len(pending) >= 2 * processes:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    done += sum(future.result() for future in finished)
            progress("rows", done, rows)
        for future in pending:
            done += future.result()
            progress("rows", done, rows)
    except BrokenProcessPool:
        raise RunStopped(
            "data: a worker process died, out of memory perhaps; run the same command again to resume"
        ) from None
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return count


# -- what needs all rows -----------------------------------------------------------------------------------------------


def _judge(folders: list[Path], names: list[str], options: CleanOptions, progress: Progress) -> Judged:
    report, sizes = _summary(folders, names, options)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    n = int(offsets[-1])
    if n >= 2**32:
        raise BadInput(f"data: expected fewer than 2^32 rows, got {n}; clean them in several folders")
    verdicts = Verdicts.of(n)

    def column(name: str, row: int) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *read_rows(folders, f"{name}.npy", row)])

    if options.exact.enabled:
        progress("exact duplicates", 0, None)
        exact(column("keys", PROMPTS), column("keys", ANSWERS), options.exact, verdicts)
    if options.near.enabled:
        total = options.near.bands
        report["near_pairs_compared"] = near(
            lambda band: column("bands", band),
            ShingleStore(folders, offsets),
            options.near,
            verdicts,
            lambda band: progress("near duplicates", band, total),
        )
    copies = (verdicts.state == KEPT).astype(np.int64)
    if options.mix.proportions:
        copies = _mix(folders, column("keys", PROMPTS), verdicts, options, report)
    return Judged(folders, offsets, verdicts, copies, report)


def _summary(folders: list[Path], names: list[str], options: CleanOptions) -> tuple[dict[str, Any], list[int]]:
    """The report's first part, and the number of rows left in each shard. Raises `RunStopped` beyond the stated shares."""
    removed = Counter[tuple[str, str]]()
    characters = Counter[str]()
    notes = Counter[str]()
    read = Counter[str]()
    sizes = []
    changed = 0
    examples = list[dict[str, Any]]()
    shown = Counter[tuple[str, str]]()
    for folder in folders:
        tally = json.loads((folder / "tally.json").read_text(encoding="utf-8"))
        read[names[tally["file"]]] += tally["rows"]
        changed += tally["changed"]
        sizes.append(tally["kept"])
        characters.update(tally["characters"])
        notes.update(tally["notes"])
        removed.update((stage, reason) for _, stage, reason, _ in tally["removed"])
        for example in tally["examples"]:
            shown[key := (example["stage"], example["reason"])] += 1
            if shown[key] <= options.examples:
                examples.append(example)
    rows, malformed = read.total(), sum(n for (stage, _), n in removed.items() if stage == "malformed")
    if not rows:
        raise BadInput(f"data: no rows in {', '.join(names)}")
    if malformed > options.malformed.share * rows:
        reason, most = max(((r, n) for (s, r), n in removed.items() if s == "malformed"), key=lambda pair: pair[1])
        raise RunStopped(
            f"data: {malformed} of {rows} rows are malformed, most ({most}) of them {reason!r}; expected a share of at most"
            f" {options.malformed.share}: correct columns.* or the file, or raise malformed.share"
        )
    if (failed := notes["harmful: the hook failed"]) > options.harmful.failures * rows:
        why = next((e["detail"] for e in examples if e["reason"].startswith("the hook failed")), "")
        raise RunStopped(
            f"data: harmful.hook failed on {failed} of {rows} rows, first with {why}; mend it or raise harmful.failures"
        )
    return {
        "inputs": [{"file": name, "rows": read[name]} for name in names],
        "rows": {"read": rows, "changed": changed},
        "removed": dict(removed),
        "characters": dict(characters.most_common()),
        "notes": dict(sorted(notes.items())),
        "examples": examples,
        "options": options.model_dump(mode="json"),
    }, sizes


def _mix(
    folders: list[Path], keys: NDArray[np.uint64], verdicts: Verdicts, options: CleanOptions, report: dict[str, Any]
) -> NDArray[np.int64]:
    codes: dict[str, int] = {name: code for code, name in enumerate(options.mix.proportions)}
    parts = [np.zeros(0, np.int64)]
    for folder in folders:
        domains = pq.read_table(folder / "rows.parquet", columns=["domain"])["domain"].to_pylist()
        parts.append(np.array([codes.setdefault(domain, len(codes)) for domain in domains], np.int64))
    alive = np.flatnonzero(verdicts.state == KEPT)
    domain = np.concatenate(parts)[alive]
    available = dict(zip(codes, np.bincount(domain, minlength=len(codes)).tolist(), strict=True))
    mixture = mixing.plan(available, options.mix.proportions, options.mix.rows, options.mix.upsample)
    taken = mixing.copies(domain, keys[alive], {codes[name]: n for name, n in mixture.counts.items()}, options.mix.seed)
    copies = np.zeros(len(keys), np.int64)
    copies[alive] = taken
    verdicts.state[alive[taken == 0]] = MIX
    report["mixture"] = {
        "domains": [
            {"domain": name, "available": available[name], "written": mixture.counts.get(name, 0)} for name in codes
        ],
        "limiting": list(mixture.limiting),
    }
    return copies
