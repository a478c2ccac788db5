"""Optional mirrors of `metrics.jsonl`: TensorBoard, trackio, Weights & Biases. The run folder stays the truth.

Each package is imported only when its tracker is opened. What a tracker writes goes into the run folder where the
package allows it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollkeel import plugins
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.types import Rollout

PROJECT = "rollkeel"
COLUMNS = ("prompt", "response", "gold answer", "reward", "status")


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Mirror one row; values that are not finite numbers are left out."""
        ...

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Mirror a few rollouts; a row has one text for each of `COLUMNS`. Your own tracker may lack it."""
        ...

    def close(self) -> None:
        """Flush and finish."""
        ...


def text_rows(rollouts: Sequence[Rollout], count: int) -> list[tuple[str, ...]]:
    """Up to `count` rollouts for `Tracker.texts`: best, worst, then in order; texts cut to 2,000 characters."""
    graded = sorted((r for r in rollouts if r.reward is not None), key=lambda r: r.reward or 0.0)
    chosen = {r.id: r for r in (*graded[-1:], *graded[:1], *rollouts)}
    rows = ((r.prompt.text, r.text, r.prompt.answer, r.reward, r.status.value) for r in list(chosen.values())[:count])
    return [tuple("" if cell is None else str(cell)[:2000] for cell in row) for row in rows]


def open_trackers(
    names: Sequence[str],
    run_dir: str | Path,
    config_dict: Mapping[str, Any],
    *,
    resume_step: int | None = None,
    on_failure: Callable[[str], None] | None = None,
) -> list[Tracker]:
    """Open the trackers called `names`.

    `resume_step` is the checkpoint's step when the run goes on, so that rows of a lost future are replaced.
    With `on_failure` a tracker that breaks later is reported once, by name, and left out from then on, so that a lost
    network does not end a run; without it the exception goes up.
    Raises `BadInput` for an unknown name, or naming the extra to install when a package is missing.
    """
    trackers: list[Tracker] = []
    for name in names:
        if name in _OPENERS:
            tracker = _OPENERS[name](Path(run_dir), dict(config_dict), resume_step)
        else:
            make = _own(name)
            tracker = plugins.tried(
                lambda make=make: make(Path(run_dir), dict(config_dict), resume_step), f"report.trackers {name!r}"
            )
            if lacks := [method for method in ("log", "close") if not hasattr(tracker, method)]:
                got = f"{type(tracker).__name__} without {' and '.join(lacks)}"
                raise BadInput(f"report.trackers {name!r}: expected an object with log and close, got {got}")
        trackers.append(tracker if on_failure is None else _Guarded(name, tracker, on_failure))
    return trackers


def check_installed(names: Sequence[str]) -> None:
    """Before a run: raises the `BadInput` that `open_trackers` would raise after the warm start."""
    for name in names:
        if plugins.is_own(name):
            _own(name)
        elif importlib.util.find_spec(name) is None:
            raise _missing(name, name)


def _own(name: str) -> Callable[[Path, dict[str, Any], int | None], Tracker]:
    if not plugins.is_own(name):
        raise BadInput(
            f"report.trackers: expected some of {', '.join(_OPENERS)} or your own file.py:name, got {name!r}"
        )
    wanted = "a class (with log and close) or function of (run folder, config, resume step)"

    def fits(made: Any) -> bool:
        has_both = hasattr(made, "log") and hasattr(made, "close")
        return plugins.takes(made, 3) and (has_both or hasattr(made, "__getattr__") or not isinstance(made, type))

    return plugins.load(name, "report.trackers", wanted, fits)


class _TensorBoard:
    def __init__(self, run_dir: Path, config: dict[str, Any], resume_step: int | None) -> None:
        _require("tensorboard", "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        purge = None if resume_step is None else resume_step + 1
        self._writer = writer(log_dir=str(run_dir / "tensorboard"), purge_step=purge)
        if resume_step is None:
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=1, default=str)}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, value in numbers(metrics).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
        cells = (" | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in row) for row in table)
        self._writer.add_text("samples", "\n".join(f"| {line} |" for line in cells), step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, run_dir: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._trackio = _require("trackio", "trackio")
        resume = "never" if resume_step is None else "allow"
        name = f"{run_dir.resolve().name}-{_run_id(run_dir)}"
        self._run = self._trackio.init(project=PROJECT, name=name, config=config, resume=resume)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._trackio.log(numbers(metrics), step=step)

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        self._trackio.log(
            {"samples": self._trackio.Table(columns=[*COLUMNS], data=[[*row] for row in rows])}, step=step
        )

    def close(self) -> None:
        self._trackio.finish()


class _Wandb:
    def __init__(self, run_dir: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._wandb = wandb = _require("wandb", "wandb")
        # Without a key W&B would ask on the terminal and hang a batch job; offline runs can be synced later.
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.resolve().name,
            id=_run_id(run_dir),
            dir=str(run_dir),
            config=config,
            mode=mode,
            resume="never" if resume_step is None else "allow",
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(numbers(metrics), step=step)

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        self._run.log({"samples": self._wandb.Table(columns=[*COLUMNS], data=[[*row] for row in rows])}, step=step)

    def close(self) -> None:
        self._run.finish()


class _Guarded:
    """Reports the first failure of a tracker and leaves it alone afterwards."""

    def __init__(self, name: str, tracker: Tracker, on_failure: Callable[[str], None]) -> None:
        self._name = name
        self._tracker = tracker
        self._on_failure = on_failure
        self._alive = True

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._try(lambda: self._tracker.log(step, metrics))

    def texts(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        if hasattr(self._tracker, "texts"):  # one of a user's own may do without
            self._try(lambda: self._tracker.texts(step, rows))

    def close(self) -> None:
        self._try(self._tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        if not self._alive:
            return
        try:
            action()
        except Exception as error:
            self._alive = False
            reason = " ".join(str(error).split())
            self._on_failure(
                f"tracker {self._name}: stopped after {type(error).__name__}: {reason}; metrics.jsonl goes on"
            )


_OPENERS: dict[str, Callable[[Path, dict[str, Any], int | None], Tracker]] = {
    "tensorboard": _TensorBoard,
    "trackio": _Trackio,
    "wandb": _Wandb,
}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row, without `step`."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def _require(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if error.name not in (None, package):
            raise
        raise _missing(package, extra) from None


def _missing(package: str, extra: str) -> BadInput:
    return BadInput(
        f"report.trackers: {extra} needs the package {package}, which is not installed; pip install rollkeel[{extra}]"
    )


def _run_id(run_dir: Path) -> str:
    """Eight letters that name this run for ever: a new run in a folder of the same name must not continue an old one."""
    file = run_dir / ".tracker_id"
    if not file.is_file():
        write_atomic(file, uuid.uuid4().hex[:8])
    return file.read_text(encoding="utf-8").strip()
