"""A trainer that grades thousands of programs must get each verdict once, whatever dies or hangs under it.

Here the service in this process: threads, ledger, replacement. Its HTTP side is test_service_http.py, the decisions test_broker.py.
Not covered: power cuts, which the ledger does not outlive.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_host import at_work, children

from rollkeel_sandbox import Job, Level, Limits, Refused, Result, Status, metrics, probe
from rollkeel_sandbox.codec import (
    decode_bytes,
    decode_job,
    decode_result,
    digest,
    encode_bytes,
    encode_job,
    encode_result,
)
from rollkeel_sandbox.errors import BadInput, RunStopped
from rollkeel_sandbox.ledger import Ledger
from rollkeel_sandbox.partition import Closing, Full, Partition
from rollkeel_sandbox.records import Conflict, State, Unknown
from rollkeel_sandbox.service import Service

holds = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
NONCE = Job(source=b"import os; print(os.urandom(8).hex())")
FAST = Limits(wall_s=0.7)


def sleeper(seconds: float = 30.0) -> Job:
    return Job(source=f"import time; time.sleep({seconds})".encode(), limits=Limits(wall_s=60.0))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    parts = [Partition(name="train"), Partition(name="eval", workers=1, queue=2), Partition(name="hung", workers=1)]
    with Service(parts, grace_s=1.0) as made:
        yield made


def launchers(service: Service) -> list[int]:
    return list(service._crew.sandbox.server_pids().values())


def until(condition: object, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@holds
def test_an_id_runs_once_however_often_it_is_asked_for(service: Service) -> None:
    first = service.run(NONCE, id="once")
    assert first.status is Status.OK
    assert service.run(NONCE, id="once") == first
    assert service.run(NONCE).stdout != first.stdout
    with pytest.raises(Conflict, match="another job"):
        service.run(Job(source=b"1"), id="once")
    with pytest.raises(Conflict, match="another job"):
        service.run(NONCE, id="once", partition="eval")
    with pytest.raises(Unknown, match="no job with id 'never'"):
        service.view("never")


@holds
def test_a_full_queue_refuses_at_once_and_takes_again_when_there_is_room(service: Service) -> None:
    blocker = service.submit(sleeper(), partition="eval")
    until(lambda: service.view(blocker).state is State.RUNNING)
    waiting = service.submit_all([NONCE, NONCE], partition="eval")
    started = time.monotonic()
    with pytest.raises(Full) as caught:
        service.run(NONCE, partition="eval")
    assert time.monotonic() - started < 1.0
    assert caught.value.retry_after_s > 0
    assert service.metrics()["partitions"]["eval"]["refused"] >= 1
    assert service.cancel(waiting[0]).state is State.CANCELLED
    with pytest.raises(Full):
        service.submit_all([NONCE, NONCE], partition="eval")  # all or none
    assert service.metrics()["partitions"]["eval"]["queued"] == 1
    late = service.submit(NONCE, partition="eval", queue_s=0.05)
    until(lambda: service.view(late).state is State.EXPIRED)
    service.cancel(blocker)
    assert service.watch(waiting[1]).result(timeout=10).require().status is Status.OK
    with pytest.raises(RunStopped, match="was not started by its deadline"):
        service.view(late).require()


@holds
def test_a_cancelled_program_ends_and_its_worker_goes_on(service: Service) -> None:
    job = service.submit(sleeper(), partition="eval")
    until(lambda: service.view(job).state is State.RUNNING)
    future = service.watch(job)
    assert service.cancel(job).state is State.CANCELLED
    assert future.result(timeout=5).state is State.CANCELLED
    assert service.run(NONCE, partition="eval").attempts == 1
    assert service.metrics()["partitions"]["eval"]["replaced"] == 0
    assert service.submit(NONCE, id=job + "x", partition="eval")


@holds
def test_a_job_that_nobody_waits_for_ends_unless_it_is_to_be_kept(service: Service) -> None:
    waited, kept = service.submit(sleeper(), kept=False), service.submit(sleeper(), kept=True)
    for name in (waited, kept):
        one, two = service.watch(name), service.watch(name)
        service.unwatch(name, one)
        assert service.view(name).state is not State.CANCELLED
        service.unwatch(name, two)
    assert service.view(waited).state is State.CANCELLED
    assert service.view(kept).state in (State.QUEUED, State.RUNNING)
    service.cancel(kept)


def test_what_can_never_run_is_refused_with_one_line(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="wall_s=601 is over the 600 of partition train"):
        service.submit(Job(source=b"1", limits=Limits(wall_s=601.0)))
    with pytest.raises(BadInput, match="did you mean train"):
        service.submit(NONCE, partition="trian")
    for wrong in ({"id": "a/b"}, {"id": ""}, {"priority": 5000}, {"queue_s": 0.0}, {"queue_s": float("nan")}):
        with pytest.raises(BadInput, match="expected"):
            service.submit(NONCE, **wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(service._crew.sandbox, "level", Level.RESTRICTED)
    with pytest.raises(Refused, match="needs isolation level namespaces, this machine gives restricted"):
        service.submit(NONCE)


@holds
@pytest.mark.parametrize("victim", ["supervisor", "fork server"])
def test_a_hung_worker_is_replaced_within_its_deadline_and_its_job_run_once_more(service: Service, victim: str) -> None:
    service.run(NONCE, partition="hung")
    before = service.metrics()["partitions"]["hung"]
    (launcher,) = launchers(service)
    (server,) = children(launcher)
    old = set(children(server))
    job = Job(source=b"import time; time.sleep(0.3); print('done')", limits=FAST)
    if victim == "fork server":
        os.kill(server, signal.SIGSTOP)
        for _ in range(len(old) + 2):  # cages that were ready still work; the next one must come from the hung server
            done = service.run(job, partition="hung")
            if done.attempts > 1:
                break
    else:
        until(lambda: not at_work(server))  # those of other tests
        name = service.submit(job, partition="hung")
        until(lambda: at_work(server))
        (busy,) = at_work(server)
        os.kill(busy, signal.SIGSTOP)
        started = time.monotonic()
        done = service.watch(name).result(timeout=20).require()
        assert time.monotonic() - started < job.limits.wall_s + 1.0 + 2.0  # its deadline, then the second run
    after = service.metrics()["partitions"]["hung"]
    assert (done.status, done.stdout, done.attempts) == (Status.OK, b"done\n", 2)
    assert (after["replaced"] - before["replaced"], after["retried"] - before["retried"]) == (1, 1)
    assert all(worker["state"] != "opening" for worker in service.health()["workers"])


@holds
def test_a_job_that_loses_its_worker_twice_is_given_up(service: Service) -> None:
    job = Job(source=b"import time; time.sleep(20)", limits=FAST)
    service.run(NONCE, partition="hung")
    name = service.submit(job, partition="hung")
    done = threading.Event()

    def stop_cages() -> None:
        while not done.is_set():
            for launcher in launchers(service):
                for server in children(launcher):
                    for cage in at_work(server):
                        os.kill(cage, signal.SIGKILL)
            time.sleep(0.02)

    thread = threading.Thread(target=stop_cages)
    thread.start()
    result = service.watch(name).result(timeout=20).require()
    done.set()
    thread.join()
    assert (result.status, result.attempts) == (Status.KILLED, 2)
    assert result.reason == "the cage died, 2 times"


@holds
def test_sixty_jobs_while_fork_servers_are_killed(service: Service) -> None:
    jobs = [Job(source=b"import time; time.sleep(0.05); print(input())", stdin=str(i).encode()) for i in range(60)]
    results: dict[int, list[Result]] = {i: [] for i in range(60)}
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(lambda i=i: results[i].append(service.run(jobs[i], partition="train"))) for i in range(60)
        ]
        for kill in range(1, 4):  # far enough from each other that no job falls to two of them
            until(lambda kill=kill: sum(f.done() for f in futures) >= 12 * kill)
            for launcher in launchers(service):
                for victim in (*children(launcher), launcher):
                    os.kill(victim, signal.SIGKILL)
        for future in futures:
            future.result(timeout=60)
    assert {i: [result.stdout for result in got] for i, got in results.items()} == {i: [b"%d\n" % i] for i in range(60)}
    assert service.metrics()["partitions"]["train"]["retried"] >= 1


@holds
def test_what_was_promised_outlives_the_service(tmp_path: Path) -> None:
    with Service([Partition(name="a", workers=1)], state=tmp_path) as service:
        known = service.run(NONCE, id="known")
        kept = service.submit(Job(source=b"import time; time.sleep(0.4); print('late')"), id="kept")
        queued = service.submit(Job(source=b"print('queued')"), id="queued", priority=-1)
        service.submit(Job(source=b"print('waited')"), id="waited", kept=False, priority=-2)
        gone = service.submit(NONCE, id="gone", priority=-3)
        service.cancel(gone)
        with pytest.raises(BadInput, match="another server uses"):
            Ledger(tmp_path)
        until(lambda: service.view(kept).state is State.RUNNING)
    with Service([Partition(name="a", workers=1)], state=tmp_path) as service:
        assert service.run(NONCE, id="known") == known
        late = service.watch(kept).result(timeout=20).require()
        assert (late.stdout, late.attempts) == (b"late\n", 2)
        assert service.watch(queued).result(timeout=20).require().stdout == b"queued\n"
        assert service.view(gone).state is State.CANCELLED
        with pytest.raises(Unknown):
            service.view("waited")
    with Service([Partition(name="b", workers=1)], state=tmp_path) as service:
        assert service.watch(kept).result(timeout=1).require() == late


def test_closing_tells_those_who_wait_and_takes_nothing_more() -> None:
    with Service([Partition(name="a", workers=1)]) as service:
        running = service.submit(sleeper())
        future = service.watch(running)
        service.drain()
        with pytest.raises(Closing, match="shutting down"):
            service.run(NONCE)
        assert not service.health()["ok"]
    with pytest.raises(Closing):
        future.result(timeout=1)
    with pytest.raises(Closing):
        service.watch(running).result(timeout=1)


def test_a_ledger_without_room_takes_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Service([Partition(name="a", workers=1)], state=tmp_path) as service:
        real = os.write

        def full(descriptor: int, data: bytes) -> int:
            if b'"accept"' in data:
                raise OSError(28, "No space left on device")
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RunStopped, match="No space left on device; free space"):
            service.submit(NONCE)
        assert service.health()["fault"]
        monkeypatch.undo()
        assert service.metrics()["partitions"]["a"]["queued"] == 0
        service.cancel(service.submit(NONCE))
        assert service.health()["ok"]


def test_pieces_of_the_ledger_go_when_nobody_can_ask_for_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollkeel_sandbox.ledger.PIECE_BYTES", 300)
    ledger = Ledger(tmp_path)
    ledger.load()
    for i in range(20):
        ledger.append(f"job{i}", "accept", padding="x" * 60)
    pieces = len(list(tmp_path.glob("ledger-*")))
    assert pieces >= 5
    for i in range(1, 20):
        ledger.forget(f"job{i}")
    assert len(list(tmp_path.glob("ledger-*"))) == pieces, "a job in the oldest piece is still known"
    ledger.forget("job0")
    assert len(list(tmp_path.glob("ledger-*"))) == 1
    ledger.append("torn", "accept")
    ledger.close()
    (last,) = tmp_path.glob("ledger-*")
    last.write_bytes(last.read_bytes() + b'{"id": "half", "eve')
    again = Ledger(tmp_path)
    assert [row["id"] for row in again.load()][-1] == "torn"
    again.close()


@holds
def test_metrics_add_up_and_are_readable_by_prometheus(service: Service) -> None:
    service.run(NONCE)
    until(lambda: all(row["running"] == 0 for row in service.metrics()["partitions"].values()))
    figures = service.metrics()
    for row in figures["partitions"].values():
        assert row["accepted"] == row["queued"] + row["running"] + sum(row["ended"].values())
    total = figures["partitions"]["train"]["latency"]["total"]
    assert 0 < total["p50"] <= total["p90"] <= total["p99"]
    lines = metrics.text(figures).splitlines()
    names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
    declared = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert {name.removesuffix("_sum").removesuffix("_count") for name in names} == declared
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")]
    assert len(values) > 30
    assert f'rollkeel_sandbox_workers{{partition="train"}} {figures["partitions"]["train"]["workers"]}' in lines


blobs = st.binary(max_size=40) | st.text(max_size=20).map(lambda t: t.encode("utf-8", "replace"))
names = st.text("abc", min_size=1, max_size=4)


@given(
    source=blobs,
    stdin=blobs,
    files=st.dictionaries(names, blobs, max_size=3),
    wall=st.floats(0.1, 9),
)
@settings(max_examples=30, deadline=None)
def test_jobs_and_results_survive_the_wire(source: bytes, stdin: bytes, files: dict[str, bytes], wall: float) -> None:
    job = Job(source=source, stdin=stdin, files=files, args=("ä", ""), collect=tuple(files), limits=Limits(wall_s=wall))
    assert decode_job(encode_job(job)) == job
    assert digest(job) == digest(decode_job(encode_job(job)))
    assert digest(job) != digest(Job(source=source + b"x", stdin=stdin))
    assert decode_bytes(encode_bytes(stdin)) == stdin
    result = Result(
        status=Status.OK, stdout=stdin, stderr=source, files=files, level=Level.FULL, isolation={"user": "x"}
    )
    assert decode_result(encode_result(result)) == result


def test_no_field_of_a_job_is_left_behind() -> None:
    assert {f.name for f in fields(Job)} - {"untrusted"} == set(encode_job(NONCE))
    with pytest.raises(BadInput, match="valid base64"):
        decode_bytes({"base64": "not base64!"})
