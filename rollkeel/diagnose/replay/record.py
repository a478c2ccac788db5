"""A run folder as a replay reads it, without writing to it or locking it."""

from __future__ import annotations

from pathlib import Path
from typing import final

import pyarrow as pa

from rollkeel.errors import BadInput
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts
from rollkeel.record.runfolder import SCHEDULE, RunFolder
from rollkeel.train import checkpoint
from rollkeel.types import StepRollouts


@final
class Record:
    """A run folder, read only."""

    def __init__(self, path: Path) -> None:
        """Raises `BadInput` if there is no run, `Corrupt` if its config or metrics are damaged."""
        self.folder = RunFolder.open(path, lock=False)
        self.config = self.folder.config
        self.rows = {int(row["step"]): row for row in self.folder.metrics()}
        self._files = dict(self.folder.rollout_files())

    def table(self, step: int) -> pa.Table:
        """The step's rollouts file. Raises `BadInput` where there is none."""
        if step not in self.rows or step < 1:
            known = [s for s in self.rows if s > 0]
            have = f"{min(known)} to {max(known)}" if known else "none yet"
            raise BadInput(f"{self.folder.path}: step {step} is not recorded; its steps are {have}")
        if step not in self._files:
            raise BadInput(
                f"{self.folder.path}: step {step} has no recorded rollouts; run with report.rollouts=true to replay steps"
            )
        return read_step(self._files[step])

    def drawn(self, step: int, table: pa.Table) -> StepRollouts:
        """What `learn` was given, of its rollouts with a reward: those without were in no batch."""
        rollouts, trained = to_rollouts(table), per_token(table, "advantages")
        batch = [r for r in rollouts if r.id in trained]
        return StepRollouts(rollouts=rollouts, batch=batch, consumed=self.consumed(step))

    def consumed(self, step: int) -> int:
        """Prompts that a synchronous step took from the data source."""
        discarded = self.rows[step].get("rollout/dynamic_discarded")
        if discarded is None:
            return self.config.rollout.prompts
        table = self.table(step)
        trained = per_token(table, "advantages")
        groups = {g for i, g in zip(table["id"].to_pylist(), table["group"].to_pylist(), strict=True) if i in trained}
        return int(discarded) + len(groups)

    def checkpoints(self, limit: int) -> list[tuple[int, Path]]:
        """Up to step `limit`, newest first; unchecked."""
        return [entry for entry in reversed(checkpoint.listing(self.folder.checkpoints)) if entry[0] <= limit]

    def schedule(self) -> str | None:
        """File of an asynchronous run's schedule; None for the other loops. Raises `BadInput` where it was not recorded."""
        if self.config.run.loop != "async":
            return None
        own = self.folder.path / SCHEDULE
        file = str(own) if own.is_file() else self.config.experiment.schedule
        if file is None:
            raise BadInput(
                f"{own}: no such file, so the sampling of this asynchronous run cannot be repeated; use --only update"
            )
        return file
