"""Shared test set-up: one CPU thread, decided before torch is imported anywhere, one cache of warm starts, and property tests
whose examples depend on nothing but the code; `make test-explore` draws new ones."""

import fnmatch
import multiprocessing.util
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from rollkeel.host import collect_as_usual, collect_later

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _interpret_kernels() -> None:
    """Triton reads this once, when it is imported. It makes no test take kernels: those of tests/models/gpu ask for them."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


_interpret_kernels()


collect_later()


def pytest_collection_finish() -> None:
    """By now most of what there is has been imported."""
    collect_as_usual()


MOST_CPU_S = 20.0
"""Of a test that `make test` runs. Ten seconds are meant: processor time, too, grows by half and more where cores are shared."""
OVER = {"test_every_stage_runs_at_toy_size_without_what_a_bare_machine_lacks": 60.0}
BEGUN, ENDED = pytest.StashKey[float](), pytest.StashKey[float]()


OF_ALL = [0.0]
"""CPU seconds that no single test has used: those of a fork server of many tests."""


def _cpu_s() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) - OF_ALL[0]


def _stop_fork_server() -> None:
    """The next process that is forked has a new one."""
    before = _cpu_s()
    forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
    OF_ALL[0] += _cpu_s() - before


@pytest.fixture
def no_fork_server() -> None:
    _stop_fork_server()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGUN] = _cpu_s()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last test of all would pay for what is kept until then: the cluster and the servers that end with the session."""
    if nextitem is None:
        item.stash[ENDED] = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that grew too long fails, so that all of them stay quick. What it shares with others counts for the first."""
    report = yield
    if report.when == "teardown" and report.passed and not any(map(item.get_closest_marker, ("slow", "cuda", "vllm"))):
        took = item.stash.get(ENDED, _cpu_s()) - item.stash[BEGUN]
        most = OVER.get(item.name, MOST_CPU_S)
        if took > most:
            report.outcome, report.longrepr = (
                "failed",
                f"took {took:.1f} s of CPU, more than {most:g}: shorten it or mark it slow",
            )
    return report


WAITING = re.compile(
    "tests/(cluster/|train/test_(mesh|parallel|reward_ranks)|sync/test_publications_of_meshes|engines/test_(served|workers|boxes)"
    "|rollout/test_budgeted_served|objectives/test_parallel_invariance)"
)
"""Files whose processes wait for each other: one worker runs them all, so that there is one cluster, and two groups of ranks never share
two cores; the others meanwhile run what computes."""


class Scheduling(LoadFileScheduling):
    """A worker gets a file at a time, and one of them all of `WAITING`."""

    def _split_scope(self, nodeid: str) -> str:
        return "waiting" if WAITING.match(nodeid) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of `WAITING` come first, and the cases of a test that its mark `usually` does not name are slow."""
    items.sort(key=lambda item: WAITING.match(item.nodeid) is None)
    unseen = dict[str, set[str]]()
    for item in items:
        if (mark := item.get_closest_marker("usually")) is None or item.get_closest_marker("cuda") is not None:
            continue
        case = item.callspec.id  # pyright: ignore[reportAttributeAccessIssue]
        named = {name for name in mark.args if fnmatch.fnmatchcase(case, name)}
        unseen.setdefault(item.nodeid.partition("[")[0], set(mark.args)).difference_update(named)
        if not named:
            item.add_marker(pytest.mark.slow)
    missing = {name: cases for name, cases in unseen.items() if cases}
    narrowed = config.getoption("lf", False) or any(
        "::" in word for word in config.args
    )  # so that not all cases are here
    if missing and not narrowed:
        raise pytest.UsageError(f"usually: these tests have no such cases: {missing}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where warm starts of all tests are kept, those of other workers too; never the user's own cache."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rollkeel-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLKEEL_CACHE", str(root))
        yield root


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[Callable[..., None]]:
    """Charts stay empty: they took two thirds of a tiny run. tests/report draws them, and so does every run in a process of its
    own. Gives what draws."""
    from rollkeel.report import charts

    real = charts._drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_drawn", lambda *_: '<svg viewBox="0 0 1 1"></svg>')
        yield real


@pytest.fixture(autouse=True)
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Own code that a test loaded is forgotten: its helpers would hide those of the next test."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    made = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(made):
            del sys.modules[name]


@pytest.fixture
def drawn(undrawn: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are drawn after all."""
    monkeypatch.setattr("rollkeel.report.charts._drawn", undrawn)


@pytest.fixture(scope="module")
def interrupted_at_birth() -> Iterator[list[int]]:
    """Every process that is started gets Ctrl-C as soon as it exists, as one from a terminal would; their ids. So does the server that
    forks them, which begins anew."""
    spawn, start, started = multiprocessing.util.spawnv_passfds, BaseProcess.start, list[int]()

    def spawned(*args: Any) -> int:
        pid = spawn(*args)
        os.kill(pid, signal.SIGINT)
        return pid

    def begun(process: BaseProcess) -> None:
        start(process)
        assert process.pid is not None
        started.append(process.pid)
        os.kill(process.pid, signal.SIGINT)

    resource_tracker.ensure_running()
    _stop_fork_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", spawned)
        patch.setattr(BaseProcess, "start", begun)
        yield started
