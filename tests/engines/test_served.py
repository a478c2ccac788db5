"""An engine in another program crashes, hangs, lies and is slow. A token lost, doubled or stamped with the wrong version would
train a policy on data that never was, and nothing downstream could notice.

A real server process with known behaviour (`fake_server.py`), real sockets, real kills. Not covered: a real model
(test_vllm.py) and what a particular server's HTTP looks like.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_kit import drain, resumed
from fake_backend import FakeBackend, assert_true, ends_well, fake_engine, request, requests, weights
from fake_server import STOP, experts_of, score_of

from rollkeel.engines import keeper
from rollkeel.engines.flights import seed_of
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.protocols import Engine, ProbedEngine, SteppedEngine
from rollkeel.types import Request, Segment, TokenSpan

WAIT_S = 30.0


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Any]:
    opened: list[Any] = []

    def make(**config: Any) -> tuple[Any, FakeBackend]:
        made = fake_engine(tmp_path, **config)
        opened.append(made[0])
        return made

    yield make
    for engine in opened:
        engine.close()


def check(asked: list[Request], got: dict[int, Segment], policies: dict[int, float]) -> None:
    """Exactly one complete segment per request, every token true."""
    assert sorted(got) == [r.id for r in asked]
    for r in asked:
        assert ends_well(r, got[r.id]), got[r.id]
        assert_true(r, got[r.id].span, policies)


def test_an_evaluation_may_be_truncated_and_then_nothing_is_said_of_the_kept_mass(open_engine: Any) -> None:
    engine, _ = open_engine()
    asked = [replace(r, sampling=replace(r.sampling, top_p=0.9, evaluation=True)) for r in requests(3)]
    engine.submit(asked)
    got = drain(engine)
    assert all(len(got[r.id].span) and np.isnan(got[r.id].span.kept_mass).all() for r in asked)
    with pytest.raises(BadInput, match="mass"):
        engine.submit([replace(asked[0], id=9, sampling=replace(asked[0].sampling, evaluation=False))])


def test_it_is_an_engine_that_is_probed_and_stepped(open_engine: Any) -> None:
    engine, _ = open_engine(publish=False)
    assert isinstance(engine, Engine)
    assert isinstance(engine, ProbedEngine)
    assert isinstance(engine, SteppedEngine)


def test_every_request_comes_back_once_with_its_own_tokens(open_engine: Any) -> None:
    engine, _ = open_engine(slots=5)
    asked = requests(40)
    engine.submit(asked[:25])
    engine.submit(asked[25:])
    got = drain(engine)
    check(asked, got, {1: 1.0})
    span = got[3].span
    assert np.allclose(span.logprobs, -(span.token_ids + 1) / 16)
    assert set(span.kv_versions) == {1}
    assert (span.kept_mass == 1).all()
    assert engine.poll(0.0) == []


def test_no_more_streams_than_slots(open_engine: Any) -> None:
    engine, backend = open_engine(slots=3)
    engine.submit(requests(12, length=20))
    drain(engine)
    assert backend.state()["most"] == 3


def test_greedy_has_logprob_zero_and_the_probability_as_kept_mass(open_engine: Any) -> None:
    engine, _ = open_engine()
    engine.submit([request(1, 5, temperature=0.0)])
    span = drain(engine)[1].span
    assert (span.logprobs == 0).all()
    assert np.allclose(span.kept_mass, np.exp(-(span.token_ids + 1) / 16))


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}])
def test_truncated_sampling_is_refused(open_engine: Any, option: dict[str, float]) -> None:
    engine, _ = open_engine(publish=False)
    with pytest.raises(BadInput, match="mass"):
        engine.submit([request(1, 5, **option)])
    assert engine.poll(0.0) == []


def test_a_prefix_is_gone_on_from(open_engine: Any) -> None:
    engine, _ = open_engine()
    whole = drain_one(engine, request(1, 30))
    half = TokenSpan(
        **{k: getattr(whole, k)[:2] for k in ("token_ids", "logprobs", "kept_mass", "versions", "kv_versions")}
    )
    again = request(1, 30, prefix=half)
    engine.submit([again])
    got = drain(engine)[1].span
    assert got.token_ids.tolist() == whole.token_ids.tolist()[2:]


def drain_one(engine: Any, asked: Request) -> TokenSpan:
    engine.submit([asked])
    return drain(engine)[asked.id].span


def test_a_request_without_room_is_length_at_once(open_engine: Any) -> None:
    engine, _ = open_engine()
    full = drain_one(engine, request(1, 30, stop_token_ids=()))
    engine.submit([request(1, 30, prefix=full, stop_token_ids=())])
    segment = engine.poll(WAIT_S)[0]
    assert (segment.status, len(segment.span)) == ("length", 0)


def test_interrupted_tokens_are_a_prefix_and_the_rest_follows(open_engine: Any) -> None:
    engine, backend = open_engine(slots=4)
    asked = [request(i, 300, stop_token_ids=()) for i in range(8)]
    engine.submit(asked)
    backend.until_sent(40)
    engine.interrupt([0, 1, 6])
    parts = {s.request_id: s for s in engine.poll(0.0)}
    assert sorted(parts) == [0, 1, 6]
    assert {s.status for s in parts.values()} == {"interrupted"}
    assert len(parts[0].span) > 0
    assert len(parts[6].span) == 0
    engine.submit(
        [Request(id=i, prompt_ids=asked[i].prompt_ids, sampling=asked[i].sampling, prefix=parts[i].span) for i in parts]
    )
    got = drain(engine)
    for i, segment in got.items():
        whole = parts[i].span.append(segment.span) if i in parts else segment.span
        assert len(whole) == 300
        assert_true(asked[i], whole, {1: 1.0})


def test_interrupt_of_everything_leaves_nothing_in_flight(open_engine: Any) -> None:
    engine, backend = open_engine(slots=4)
    engine.submit([request(i, 300, stop_token_ids=()) for i in range(8)])
    backend.until_sent(20)
    engine.interrupt()
    assert len(engine.poll(0.0)) == 8
    assert engine.poll(5.0) == []
    assert backend.state()["running"] == []


def test_streams_that_ignore_an_abort_are_cut(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkeel.engines.served.LAND_S", 0.1)
    engine, backend = open_engine()
    backend.set("ignore_abort")
    backend.set("hold_at", 30)  # its stream neither goes on nor ends
    asked = request(1, 380, stop_token_ids=())
    engine.submit([asked])
    backend.until_sent(5)
    engine.interrupt()
    segment = engine.poll(0.0)[0]
    assert segment.status == "interrupted"
    assert_true(asked, segment.span, {1: 1.0})


@pytest.mark.usually("None", "cut_after")
@pytest.mark.parametrize("fault", [None, "crash_after", "cut_after"])
def test_every_token_has_its_experts_and_those_of_the_prompt_or_is_sampled_again(
    open_engine: Any, fault: str | None
) -> None:
    engine, backend = open_engine(slots=4)
    asked = [request(i, 90, stop_token_ids=(), return_experts=True, return_prompt_experts=True) for i in range(6)]
    engine.submit(asked)
    backend.until_sent(60)
    engine.interrupt([0])
    early = {s.request_id: s for s in engine.poll(0.0)}
    part = early.pop(0)
    engine.submit([resumed(asked[0], part.span)])
    if fault:
        backend.set(fault, 150)
    got = early | drain(engine)
    check(asked[1:], {i: got[i] for i in range(1, 6)}, {1: 1.0})
    got[0] = replace(got[0], span=part.span.append(got[0].span))
    for r in asked:
        span, ids = got[r.id].span, [*r.prompt_ids.tolist()]
        assert len(span) == 90
        assert span.experts is not None
        assert span.prompt_experts is not None
        assert span.prompt_experts.tolist() == [experts_of(ids[: i + 1]) for i in range(len(ids) - 1)]
        for token, experts in zip(span.token_ids.tolist(), span.experts.tolist(), strict=True):
            assert experts == experts_of(ids)
            ids.append(token)


def test_experts_that_never_come_are_a_failure(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("no_experts")
    engine.submit([request(1, return_experts=True)])
    (segment,) = drain(engine).values()
    assert segment.status == "engine_failure"
    assert "which experts" in segment.detail


@pytest.mark.usually("0-crash_after", "0-finish_after", "37-cut_after", "37-nan_after")
@pytest.mark.parametrize("fault", ["crash_after", "cut_after", "error_after", "nan_after", "finish_after"])
@pytest.mark.parametrize("tokens", [0, 37])
def test_a_loss_costs_and_doubles_no_token(open_engine: Any, fault: str, tokens: int) -> None:
    engine, backend = open_engine(slots=6)
    asked = requests(15, length=25)
    backend.set(fault, tokens)
    engine.submit(asked)
    got = drain(engine)
    if fault == "finish_after":  # it says stop where nothing stopped: never taken for finished
        lying = [s for s in got.values() if s.status == "engine_failure"]
        assert len(lying) == 1
        assert "'stop'" in lying[0].detail
        asked = [r for r in asked if r.id != lying[0].request_id]
        got = {r.id: got[r.id] for r in asked}
    check(asked, got, {1: 1.0})
    assert backend.starts() == (2 if fault == "crash_after" else 1)


def test_streams_that_bring_nothing_for_a_while_cost_no_rollout(open_engine: Any) -> None:
    engine, backend = open_engine(deadline_s=120)
    backend.set("mute", 5)
    asked = requests(1)
    engine.submit(asked)
    check(asked, drain(engine), {1: 1.0})
    assert backend.starts() == 1


def test_a_request_that_never_gets_a_token_is_given_up(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("mute", 1000)
    engine.submit(requests(1))
    (segment,) = drain(engine).values()
    assert segment.status == "engine_failure"
    assert "streams in a row brought no token" in segment.detail


def test_a_server_killed_in_the_middle_costs_no_rollout(open_engine: Any) -> None:
    engine, backend = open_engine(slots=8)
    asked = [request(i, 350, stop_token_ids=()) for i in range(12)]
    engine.submit(asked)
    ended: list[Segment] = []
    for life in (1, 2, 3):
        backend.until_sent(150)
        os.kill(backend.state()["pid"], signal.SIGKILL)
        while backend.starts() == life:
            ended += engine.poll(0.01)
    ended += drain(engine).values()
    got = {s.request_id: s for s in ended}
    assert len(got) == len(ended)
    check(asked, got, {1: 1.0})


def test_restarts_are_limited_and_the_error_says_what_the_server_said(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "RESTARTS", 0)
    engine, backend = open_engine()
    backend.set("crash_after", 3)
    engine.submit(requests(2))
    with pytest.raises(EngineFailure, match=r"0 restarts in a row .* exit code -9"):
        drain(engine)
    with pytest.raises(EngineFailure, match="0 restarts"):
        engine.submit(requests(1, first=9))


def test_a_hanging_server_is_killed_and_its_work_goes_on(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("hang_after", 20)
    asked = requests(6)
    engine.submit(asked)
    check(asked, drain(engine), {1: 1.0})
    assert backend.starts() == 2


def test_a_stopped_process_counts_as_hanging(open_engine: Any) -> None:
    engine, backend = open_engine()
    asked = [request(i, 200, stop_token_ids=()) for i in range(3)]
    engine.submit(asked)
    backend.until_sent(30)
    os.kill(backend.state()["pid"], signal.SIGSTOP)
    check(asked, drain(engine), {1: 1.0})
    assert backend.starts() == 2


@pytest.mark.usually("die_at_start")
@pytest.mark.parametrize("fault", ["die_at_start", "slow_start"])
def test_a_server_that_does_not_come_up_is_started_again(open_engine: Any, fault: str) -> None:
    engine, backend = open_engine(publish=False, deadline_s=12.0)
    backend.set(fault)
    assert engine.update_weights(weights(1.0, 1)).version == 1
    check([request(1)], {1: _only(engine, request(1))}, {1: 1.0})


def _only(engine: Any, asked: Request) -> Segment:
    engine.submit([asked])
    return drain(engine)[asked.id]


def test_a_server_that_never_comes_up_ends_with_its_words(open_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "RESTARTS", 0)
    engine, backend = open_engine(publish=False)
    backend.set("die_at_start")
    with pytest.raises(EngineFailure, match="the fake will not start"):
        engine.update_weights(weights(1.0, 1))
    assert engine.version == -1


def test_a_refused_request_fails_alone(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("refuse", 13)
    asked = [request(i, 5) for i in range(11, 16)]
    engine.submit(asked)
    got = drain(engine)
    assert (got[13].status, got[13].detail) == ("engine_failure", "engine fake: token 13 is not welcome")
    del got[13]
    check([r for r in asked if r.id != 13], got, {1: 1.0})
    assert backend.starts() == 1


def test_without_weights_nothing_is_sampled(open_engine: Any) -> None:
    engine, _ = open_engine(publish=False)
    engine.submit([request(1)])
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(0.1)
    engine.update_weights(weights(1.0, 1))
    assert drain(engine)[1].status in ("finished", "length")


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_tokens_carry_the_version_that_sampled_them(open_engine: Any, kv: str) -> None:
    engine, backend = open_engine(slots=4, kv=kv)
    asked = [request(i, 230, stop_token_ids=()) for i in range(6)]
    backend.set("hold_at", 120)  # or a slow machine publishes behind the end of the first one
    engine.submit(asked)
    got: dict[int, Segment] = {}
    for version in (2, 3):
        backend.set("hold_at", 120 * (version - 1))
        backend.until_sent(120 * (version - 1))
        engine.update_weights(weights(float(version), version))
        assert engine.version == version
        got |= {s.request_id: s for s in engine.poll(0.0)}
    backend.set("hold_at", 10_000)
    got |= drain(engine)
    check(asked, got, {1: 1.0, 2: 2.0, 3: 3.0})
    through = [s.span for s in got.values() if set(s.span.versions) == {1, 2, 3}]
    assert through
    for span in through:
        assert (span.kv_versions == (span.versions if kv == "recompute" else 1)).all()
    assert backend.starts() == 1


def test_a_crash_with_kept_kv_leaves_no_doubtful_stamp(open_engine: Any) -> None:
    engine, backend = open_engine(slots=4, kv="keep")
    asked = [request(i, 150, stop_token_ids=()) for i in range(4)]
    engine.submit(asked)
    backend.until_sent(100)
    engine.update_weights(weights(2.0, 2))
    backend.set("crash_after", 250)
    check(asked, drain(engine), {1: 1.0, 2: 2.0})
    assert backend.starts() == 2


def test_nothing_is_sampled_between_publication_and_probe(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.submit([request(i, 150, stop_token_ids=()) for i in range(4)])
    backend.until_sent(50)
    engine.update_weights(weights(2.0, 2))
    sent = backend.state()["sent"]
    engine.score([np.array([1, 2, 3])])
    assert backend.state()["sent"] == sent
    assert len(drain(engine)) == 4


def test_a_wrong_checksum_is_told_and_nothing_sampled(open_engine: Any) -> None:
    engine, backend = open_engine()
    backend.set("wrong_checksum")
    update = weights(2.0, 2)
    assert engine.update_weights(update).checksum != update.checksum
    assert engine.version == -1
    engine.submit([request(1)])
    with pytest.raises(EngineFailure, match="no proven weights"):
        engine.poll(0.1)
    engine.update_weights(update)
    check([request(1)], drain(engine), {2: 2.0})


def test_a_crash_while_weights_are_loaded_ends_with_the_new_ones(open_engine: Any) -> None:
    engine, backend = open_engine()
    asked = [request(i, 150, stop_token_ids=()) for i in range(4)]
    engine.submit(asked)
    backend.until_sent(50)
    backend.set("crash_in_load")
    assert engine.update_weights(weights(2.0, 2)).version == 2
    got = drain(engine)
    check(asked, got, {1: 1.0, 2: 2.0})
    assert backend.starts() == 2


def test_a_restarted_server_serves_the_weights_of_its_version(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(2.0, 2))
    ids = np.array([4, 9, 2, 30])
    assert np.allclose(engine.score([ids])[0], score_of(ids.tolist(), 2.0))
    os.kill(backend.state()["pid"], signal.SIGKILL)
    asked = requests(4)
    engine.submit(asked)
    check(asked, drain(engine), {2: 2.0})


def test_a_restart_with_wrong_weights_is_noticed(open_engine: Any) -> None:
    engine, backend = open_engine()
    engine.update_weights(weights(9.0, 2))
    engine.score([np.array([4, 9, 2, 30])])
    folder = engine._keeper.weights.folder
    (folder / "model.safetensors").unlink()
    os.kill(backend.state()["pid"], signal.SIGKILL)
    engine.submit(requests(4))
    with pytest.raises(EngineFailure, match="checksum"):
        drain(engine)


def test_scores_survive_a_crash(open_engine: Any) -> None:
    engine, backend = open_engine()
    os.kill(backend.state()["pid"], signal.SIGKILL)
    assert np.allclose(engine.score([np.array([1, 2, 3])])[0], score_of([1, 2, 3], 1.0))


def test_a_running_server_is_used_and_left_alone(tmp_path: Path, open_engine: Any) -> None:
    owner, backend = open_engine()
    url = f"http://127.0.0.1:{backend.port}"
    engine, _ = fake_engine(tmp_path, 5.0, server={"url": url})
    assert engine.server_pid is None
    asked = requests(5)
    engine.submit(asked)
    check(asked, drain(engine), {1: 5.0})
    engine.close()
    assert backend.state()["label"] == 1
    assert backend.starts() == 1
    del owner


def test_a_running_server_that_was_swapped_is_given_its_weights_again(tmp_path: Path, open_engine: Any) -> None:
    owner, backend = open_engine()
    engine, _ = fake_engine(tmp_path, 5.0, server={"url": f"http://127.0.0.1:{backend.port}"})
    # Behind the back of `engine` somebody gives the server other weights under another label.
    owner.update_weights(weights(3.0, 77))
    asked = requests(5)
    engine.submit(asked)
    check(asked, drain(engine), {1: 5.0})
    engine.close()


def test_close_ends_the_whole_group_and_removes_the_folder(open_engine: Any) -> None:
    engine, backend = open_engine()
    pid, scratch = backend.state()["pid"], engine._scratch
    engine.submit([request(1, 300, stop_token_ids=())])
    backend.until_sent(3)
    engine.close()
    engine.close()
    assert not alive(pid)
    assert not scratch.exists()
    with pytest.raises(EngineFailure, match="closed"):
        engine.poll(0.0)


def test_a_killed_guard_leaves_nothing_behind(open_engine: Any) -> None:
    engine, backend = open_engine()
    pid, guard = backend.state()["pid"], engine.server_pid
    asked = [request(i, 100, stop_token_ids=()) for i in range(4)]
    engine.submit(asked)
    backend.until_sent(10)
    os.kill(guard, signal.SIGKILL)
    check(asked, drain(engine), {1: 1.0})
    engine.close()
    end = time.monotonic() + WAIT_S
    while alive(pid):
        assert time.monotonic() < end, "the server outlived its guard"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_dies_with_its_owner(tmp_path: Path) -> None:
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]);from pathlib import Path; from fake_backend import fake_engine\n"
        "engine, backend = fake_engine(Path(sys.argv[2])); print(backend.state()['pid'], engine._scratch, flush=True); time.sleep(600)"
    )
    here = Path(__file__).parent
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(here), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=here.parent.parent,
    )
    assert owner.stdout is not None
    pid, scratch = owner.stdout.readline().split()
    assert alive(int(pid))
    owner.kill()
    owner.wait()
    end = time.monotonic() + WAIT_S
    while alive(int(pid)) or Path(scratch).exists():
        assert time.monotonic() < end, "the server outlived its owner"


def test_seeds_differ_between_stays_and_requests() -> None:
    seeds = {seed_of(request(i), drawn) for i in range(20) for drawn in range(20)}
    assert len(seeds) == 400
    assert max(seeds) < 2**62
    assert seed_of(request(3), 5) == seed_of(request(3), 5)
    assert STOP == 7
