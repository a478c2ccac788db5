"""Talking to a model is the first thing people do with it: the answer must be what the engine samples, whole, and an end must be clean.

Random weights throughout. Not covered: how well anything answers; a terminal's line editing.
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_run import cli

from rollkeel.cli.talk import NEW, _pieces, chat, stream
from rollkeel.loop.assemble import opened
from rollkeel.models.loading import Policy, load_policy, resolve_device, save_policy
from rollkeel.protocols import SteppedEngine
from rollkeel.recipe import load
from rollkeel.rollout.budgeted import stepped
from rollkeel.types import Request, SamplingParams

WORDS = ["engine.kv=keep", "engine.slots=1", "sampling.max_new_tokens=23"]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(load(None, WORDS).model, resolve_device("cpu"))


@pytest.fixture(scope="module")
def model(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m"
    save_policy(policy, path)
    return path


@pytest.fixture
def engine(policy: Policy) -> Iterator[SteppedEngine]:
    with opened(load(None, WORDS), policy) as served:
        yield stepped(served)


@pytest.mark.parametrize(("limit", "stops"), [(23, ()), (4, ()), (23, (3, 4, 5, 6, 7))])
def test_a_streamed_answer_is_the_answer(engine: SteppedEngine, limit: int, stops: tuple[int, ...]) -> None:
    sampling = SamplingParams(max_new_tokens=limit, stop_token_ids=stops, seed=5)
    request = Request(id=3, prompt_ids=np.arange(4, 12), sampling=sampling)
    engine.submit([request])
    (whole,) = engine.advance(100)
    parts = list(stream(engine, request))
    assert [i for part in parts for i in part] == whole.span.token_ids.tolist()
    assert len(parts) > 1 or len(whole.span) <= 4


def test_half_a_character_waits_for_its_other_half() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    tokens = [[i] for i in "aé€b".encode()] + [[0]]
    assert "".join(_pieces(Bytes(), tokens, stops=[0])) == "aé€b"
    assert list(_pieces(Bytes(), [[0xC3], [0xA9]], stops=[])) == ["é", ""]


def test_piped_lines_are_a_prompt_each_and_answers_a_line_each(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("12=\n\n34=\n12="))
    code, out, err = cli(capsys, "chat", model, "--plain", "sampling.temperature=0", *WORDS[2:])
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert first == third
    assert second


def test_a_terminal_holds_one_conversation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen: list[int] = []

    def watched(engine: SteppedEngine, request: Request) -> Iterator[list[int]]:
        seen.append(len(request.prompt_ids))
        yield from stream(engine, request)

    monkeypatch.setattr("rollkeel.cli.talk.stream", watched)
    config = load(None, [f"model.path={model}", *WORDS])
    chat(config, Terminal(f"12=\n12=\n{NEW}\n12=\n"), io.StringIO())
    assert seen[1] > seen[0] == seen[2]


def test_what_cannot_be_asked_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli(capsys, "chat", model, "engine.processes=2")
    assert code == 2
    assert (
        err == "rollkeel: chat: talks to the embedded engine in this process: engine.kind=local, engine.processes=0\n"
    )


@pytest.mark.slow
def test_ctrl_c_ends_in_one_line(model: Path) -> None:
    words = [sys.executable, "-m", "rollkeel", "chat", str(model), "--plain", "sampling.max_new_tokens=4"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background job starts with Ctrl-C ignored, and its children with it.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(words, **pipes, **heard) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("12=\n")
        process.stdin.flush()
        assert process.stdout.readline()  # it has answered and waits for the next line
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "rollkeel: stopped\n")
