"""One stage of the pipeline over a cluster, beside a run: supervised training on ranks, and sampling by engines."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console

from rollkeel.cluster.machines import RayMachines
from rollkeel.config import Config
from rollkeel.events import write_atomic
from rollkeel.loop.serving import Served
from rollkeel.record.live import LiveView
from rollkeel.record.run_config import CONFIG
from rollkeel.record.runfolder import RunFolder


@contextmanager
def machines(
    config: Config, path: Path, view: LiveView, *, sampling: bool, loading: bool = True
) -> Iterator[RayMachines]:
    """Ranks that have loaded the model if they are to (`loading`), and engines if there is `sampling`. `path`: a folder for what they
    print and keep, on storage that all nodes share."""
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(path / CONFIG, config.to_yaml())
    with closing(RayMachines(config, RunFolder(path, config, None), view, sampling=sampling, loading=loading)) as made:
        yield made


@contextmanager
def served(config: Config) -> Iterator[Served]:
    """The engines of the cluster, which serve the model and have proven it, and its graders. What actors print is gone behind it."""
    with (
        tempfile.TemporaryDirectory(prefix=".actors-", dir=".") as path,
        machines(config, Path(path), LiveView(console=Console(file=io.StringIO())), sampling=True) as made,
    ):
        made.trainer()
        engine, _ = made.engine(RunFolder(Path(path), config, None))
        made.publisher(engine, None, shared=False)()
        yield Served(engine, made.graders(), made.checksum)
