"""The connection by which a rank tells an engine of its host where a bucket lies.

Matters because an answer that is given to another bucket would free memory that is still read, and a wait for a process that is gone would
never end. Engines that are killed and stopped behind it are in test_boxes_to_actors.py. Not covered: processes in containers of their own,
but for an address that nobody has.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollkeel.cluster import line as of_lines
from rollkeel.cluster import stream
from rollkeel.cluster.arriving import Bucket, Channel
from rollkeel.cluster.engine_actor import EngineActor
from rollkeel.cluster.line import MOST, Line, Lines, silent
from rollkeel.cluster.stream import Calls, Sink
from rollkeel.engines.intake import Room
from rollkeel.engines.shared_memory import AVAILABLE, WINDOW, Ring, Slot
from rollkeel.errors import EngineFailure
from rollkeel.types import WeightSlice, WeightUpdate

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="Linux only")
HEAD = WeightUpdate(kind="full", base_version=None, version=7, slices=(), checksum=0, mode="fp32")


class Told:
    """What an engine was told, and what it still owes an answer to."""

    def __init__(self) -> None:
        self.came = queue.Queue[tuple[Any, ...]]()
        self.open = deque[Future[str]]()
        self.broken = False

    def __call__(self, *message: Any) -> Future[str]:
        if self.broken:
            raise OSError
        self.open.append(Future())
        self.came.put(message)
        return self.open[-1]


def test_answers_come_in_order_and_those_who_tell_do_not_wait_for_each_other() -> None:
    told = Told()
    lines = Lines(told)
    first, second = Line(lines.address), Line(lines.address)
    for number in range(4):
        first.tell(pickle.dumps((number, "a")))
        assert told.came.get(timeout=5) == (number, "a")
    assert silent([first, second], 0.05) == [first, second]
    second.tell(pickle.dumps((9, "b")))
    assert told.came.get(timeout=5) == (9, "b")
    told.open.pop().set_result("of the second")
    assert silent([first, second], 5) == [first]
    assert second.answer() == "of the second"
    for done, text in zip(told.open, ("", "no: größer", "", ""), strict=True):
        done.set_result(text)
    assert [first.answer() for _ in range(4)] == ["", "no: größer", "", ""]


def test_four_of_the_largest_messages_are_told_though_nobody_reads() -> None:
    """Else telling a process that was stopped would never end."""
    code = "import time; from rollkeel.cluster.line import Lines; print(repr(Lines(print).address), flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = Line(eval(process.stdout.readline()))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    for _ in range(stream.DIRECT):
        line.tell(bytes(MOST))
    assert silent([line], 0.1) == [line]
    process.kill()
    process.wait()
    assert silent([line], 5) == []
    with pytest.raises((EOFError, OSError)):
        line.answer()
    with pytest.raises(OSError, match=r"Connection refused"):
        Line("\0rollkeel-of-nobody")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_turned_away() -> None:
    told = Told()
    address = Lines(told).address
    code = f"""
import os
from multiprocessing.connection import Client
os.setuid(65534)
connection = Client({address!r}, "AF_UNIX")
try:
    connection.send_bytes(b"anything")
    connection.recv_bytes()
except (EOFError, OSError):
    print("turned away")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "turned away\n"
    assert told.came.empty()


def test_a_rank_that_nobody_lets_in_is_told_so_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> int:
        raise OSError("too many open files")

    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    monkeypatch.setattr(of_lines, "_owner", broken)
    address = Lines(Told()).address
    with pytest.raises(OSError, match="was not let in"):
        Line(address)
    assert ended.wait(5)
    with pytest.raises(OSError, match="refused"):
        Line(address)


def test_a_bucket_in_memory_that_is_not_mapped_is_refused() -> None:
    actor: Any = SimpleNamespace(_rings={}, _channel=None)
    done = EngineActor._take(actor, 3, [], Slot("/proc/1/fd/9#9", 0))
    assert done.result(0) == "weights: nothing is mapped from /proc/1/fd/9#9"


class Actor:
    """Takes buckets both ways."""

    def __init__(self) -> None:
        self.told, self.calls = Told(), list[tuple[Any, ...]]()
        self.bucket = SimpleNamespace(remote=self._called)

    def _called(self, *message: Any) -> str:
        self.calls.append(message)
        return "a reference"


class Beats:
    """The pulse of an engine."""

    asked, lives = 0, False
    patience = SimpleNamespace(limit_s=3.0)

    def beats(self) -> bool:
        return True

    def answers(self, within_s: float) -> bool:
        self.asked += 1
        return self.lives


def carrier(actor: Actor, **about: Any) -> tuple[Calls, Beats]:
    line, ring, pulse = Line(Lines(actor.told).address), Ring(1 << 20, WINDOW), Beats()
    sink: Any = Sink("actor 0", actor, 3, rooms={"a": Room(torch.float32, (3,), (0,), (3,))})
    return Calls(HEAD, [sink], 30, {0: ring}, [pulse], lines={0: line}, **about), pulse  # pyright: ignore[reportArgumentType]


def piece(name: str) -> WeightSlice:
    return WeightSlice(name=name, tensor=torch.ones(3), checksum=5)


def test_a_bucket_is_told_by_the_line_and_a_long_list_of_slices_by_ray() -> None:
    actor = Actor()
    calls, _ = carrier(actor)
    calls.put([piece("short")], [0])
    attempt, layout, slot = actor.told.came.get(timeout=5)
    assert (attempt, [entry.name for entry in layout], slot.start) == (3, ["short"], 0)
    assert not actor.calls
    calls.put([piece("long" * MOST)], [0])
    assert len(actor.calls) == 1
    assert actor.told.came.empty()


@pytest.mark.parametrize("opened", [False, True])
def test_memory_of_a_bucket_is_written_again_once_it_was_taken(opened: bool) -> None:
    """That of an engine's own weights needs no other, and more of them may be under way."""
    actor, held = Actor(), torch.zeros(3)
    calls, _ = carrier(actor, views={0: {"a": held} if opened else {}})
    late = threading.Timer(0.3, lambda: actor.told.open[0].set_result(""))
    for number in range(stream.DIRECT):
        if number == WINDOW and not opened:
            late.start()
        calls.put([replace(piece("a"), tensor=torch.full((3,), float(number)))], [0])
        slot = actor.told.came.get(timeout=5)[2]
        assert (slot is None) == opened
        assert [done.done() for done in actor.told.open] == [number >= WINDOW and not opened, *[False] * number]
        if number == WINDOW and not opened:
            return
    assert held.tolist() == [3.0] * 3
    late.start()
    calls.put([piece("a")], [0])
    assert actor.told.open[0].done()


def test_what_the_line_answers_is_what_a_call_would_have_answered() -> None:
    actor = Actor()
    calls, _ = carrier(actor)
    calls.put([piece("a")], [0])
    actor.told.came.get(timeout=5)
    actor.told.open[0].set_result("")
    calls.put([piece("b")], [0])
    actor.told.came.get(timeout=5)
    actor.told.open[1].set_result("weight update 7: b is wrong")
    with pytest.raises(EngineFailure, match=r"^weight update 7: b is wrong \(engine actor 0\)$"):
        calls.flush()
    actor.told.broken = True
    for lives, said in ((False, "died while it took"), (True, "could not take")):
        calls, pulse = carrier(actor)
        pulse.lives = lives
        calls.put([piece("c")], [0])
        with pytest.raises(EngineFailure, match=rf"^weight update 7: engine actor 0 {said} weights \(EOFError\)$"):
            calls.flush()
        assert pulse.asked == 1  # until Ray knows of its death too


def test_buckets_that_an_engine_leaves_when_it_ends_are_answered() -> None:
    channel = Channel(1.0)
    waiting = [channel.put(Bucket(1, [], None)) for _ in range(2)]
    channel.send(("gone", "was closed", 0))
    late = channel.put(Bucket(1, [], None))
    assert [done.result(0) for done in (*waiting, late)] == ["weights: the engine has ended"] * 3
