"""The board reads people's runs to a browser. A page elsewhere must not get at them, and a rollout is text from a model.

Every request goes to a real server on this machine. Not covered: what a browser does with the answers (test_board_page.py).
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from board_kit import HOSTILE, run_folder, step_file
from tiny_run import cli, files

from rollkeel.board.doctor import Doctor
from rollkeel.board.runs import Run
from rollkeel.board.server import FILES, HEADERS, Asked, Board, allowed, listen
from rollkeel_doctor import diagnose, read_trace
from rollkeel_doctor.traces.own import save_batch

ASKED: list[tuple[Any, ...]] = []
WATCHED = [False]


def _audit(event: str, values: tuple[Any, ...]) -> None:
    if WATCHED[0] and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        ASKED.append((event, *values))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("board") / "runs"
    for name in ("a", "b"):
        path = run_folder(root / name, [{"step": i, "reward/mean": i / 4, HOSTILE: 1} for i in range(1, 5)])
        step_file(path, 1, (3, 2, 2), piece=HOSTILE)
    return root


@pytest.fixture(scope="module")
def port(root: Path) -> Iterator[int]:
    board = Board([root])
    sys.addaudithook(_audit)  # cannot be taken back, and is asked about every import and file
    with listen(board, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
    board.doctor.close()


def get(port: int, path: str, *, host: str = "localhost", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def ask(port: int, path: str) -> Any:
    status, _, body = get(port, path)
    assert status == 200, body
    return json.loads(body)


# -- who may ask ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8785", "localhost", "LOCALHOST:1", "[::1]:8785", "192.168.0.7", "mybox:9"])
def test_this_machine_may_ask(host: str) -> None:
    assert allowed(host, "mybox")


@pytest.mark.parametrize(
    "host", ["", None, "evil.example", "evil.example:8785", "127.0.0.1.evil.example", "localhost.evil", "a@evil"]
)
def test_another_name_that_leads_here_may_not(host: str | None) -> None:
    assert not allowed(host, "mybox")


def test_a_foreign_host_gets_nothing(port: int) -> None:
    for path in ("/", "/board.js", "/api/runs"):
        status, _, body = get(port, path, host="evil.example")
        assert (status, json.loads(body)) == (
            403,
            {"error": "this name is not the board's: open it by its address, or as localhost"},
        )
    assert get(port, "/", host="")[0] == 403


def test_every_answer_forbids_other_sites_and_hosts(port: int) -> None:
    for path in ("/", "/style.css", "/chart.js", "/api/runs", "/none"):
        _, headers, _ = get(port, path)
        assert HEADERS.items() <= headers.items()
    assert "default-src 'self'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_the_page_names_no_other_host() -> None:
    assert {"/index.html", "/board.js", "/chart.js", "/tokens.js", "/dom.js", "/board.css"} == set(FILES)
    for _, file in FILES.values():
        text = file.read_text()
        assert "//" not in text.replace("// ", "").replace("//\n", "")
        assert not {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("} & set(text.split())
        assert "innerHTML" not in text


# -- what is answered ----------------------------------------------------------------------------------------------------


def test_text_of_a_run_is_json_and_no_markup(port: int) -> None:
    status, headers, body = get(port, "/api/tokens?run=0&step=1")
    assert (status, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    part = json.loads(body)["parts"][0]
    assert HOSTILE in part["prompt_text"]
    assert part["texts"][0] == f" {HOSTILE}1000"
    assert [one["key"] for one in ask(port, "/api/metrics?run=0")] == ["reward/mean", HOSTILE]


def test_answers(port: int) -> None:
    assert [run["name"] for run in ask(port, "/api/runs")["runs"]] == ["a", "b"]
    curve = ask(port, "/api/curves?run=0&run=1&key=reward/mean&from=2&to=3")["reward/mean"]
    assert curve["0"] == curve["1"]
    assert (curve["0"]["x"], curve["0"]["y"]) == ([1, 2, 3, 4], [0.25, 0.5, 0.75, 1])
    assert [row["key"] for row in ask(port, "/api/settings?run=0&run=1")] == ["run.name"]
    assert ask(port, "/api/steps?run=0") == [1]
    assert [one["id"] for one in ask(port, "/api/rollouts?run=0&step=1&sort=length&first=1")["rollouts"]] == [101, 102]
    assert ask(port, "/api/tokens?run=0&step=1&id=102")["parts"][0]["row"] == 2
    assert ask(port, "/api/tokens?run=0&step=1&row=2&before=1&count=3")["start"] == {"step": 1, "row": 0, "token": 2}
    words = ask(port, "/api/verdict?run=0")["words"]
    assert [word["about"] for word in words] == ["Learned", "Alarms"]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/curves?run=7&key=a", 400, "run 7: no such run"),
        ("/api/curves?run=../a&key=a", 400, "run -1: no such run"),
        ("/api/curves?run=0&key=a&points=x", 400, "points: expected a number, got 'x'"),
        ("/api/curves?run=0&key=a&from=nan", 400, "from: expected a number, got 'nan'"),
        ("/api/tokens?run=0", 400, "step: expected a value, got none"),
        ("/api/tokens?run=0&step=1&count=99999999", 400, "count: expected a number from 0 to 5000, got 1e+08"),
        ("/api/tokens?run=0&step=1&count=-1", 400, "count: expected a number from 0 to 5000, got -1"),
        ("/api/tokens?run=0&step=1&row=1e99", 400, "row: expected a number from 0 to "),
        ("/api/tokens?run=0&step=../../etc", 400, "step: expected a number, got '../../etc'"),
        ("/api/tokens?run=0&step=9", 400, "step 9: no rollouts were recorded"),
        ("/api/rollouts?run=0&step=1&sort=__class__", 400, "sort: expected order, gap, dropped, reward, length, got"),
        ("/../../../../etc/passwd", 404, "no such page"),
        ("/%2e%2e/%2e%2e/etc/passwd", 404, "no such page"),
        ("/page/board.js", 404, "no such page"),
        ("/api/../board.py", 404, "no such page"),
        ("//evil.example/", 404, "no such page"),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_line(port: int, path: str, status: int, said: str) -> None:
    got, _, body = get(port, path)
    assert got == status
    assert json.loads(body)["error"].startswith(said)
    assert b"\n" not in body


def test_a_page_beyond_the_end_is_empty(port: int) -> None:
    assert ask(port, "/api/tokens?run=0&step=1&row=99&token=5")["parts"] == []
    part = ask(port, "/api/tokens?run=0&step=1&row=0&token=77&count=2")["parts"][0]
    assert (part["token_ids"], part["length"]) == ([], 3)


def test_a_damaged_file_costs_itself(port: int, root: Path) -> None:
    bad = root / "a" / "rollouts" / "step_000002.parquet"
    bad.write_bytes(b"PAR1")
    status, _, body = get(port, "/api/tokens?run=0&step=2")
    bad.unlink()
    assert status == 422
    assert json.loads(body)["error"].startswith("step_000002.parquet cannot be read: ")
    assert ask(port, "/api/tokens?run=0&step=1")["rows"] == 3


def test_nothing_can_be_changed(port: int, root: Path) -> None:
    before = files(root)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert get(port, "/api/runs", method=method)[0] == 501
    for path in ("/api/runs", "/api/verdict?run=0", "/api/tokens?run=1&step=1", "/api/settings?run=0&run=1"):
        get(port, path)
    assert files(root) == before


def test_no_other_machine_is_asked(root: Path) -> None:
    """The server's own name, an update, a font: none of it is looked up by anyone in this process."""
    ASKED.clear()
    WATCHED[0] = True
    try:
        board = Board([root])
        with listen(board, "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            for path in ("/", "/api/runs", "/api/curves?run=0&key=reward/mean", "/api/tokens?run=0&step=1"):
                assert get(server.server_address[1], path)[0] == 200
            server.shutdown()
        board.doctor.close()
    finally:
        WATCHED[0] = False
    told = {str(value) for _, *values in ASKED for value in values if isinstance(value, str)}
    told |= {value[0] for _, *values in ASKED for value in values if isinstance(value, tuple)}
    assert {event for event, *_ in ASKED} == {"socket.connect", "socket.getaddrinfo"}  # no name of an address
    assert told <= {"127.0.0.1"}


# -- the command ---------------------------------------------------------------------------------------------------------


def test_bad_input_of_the_command_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli(capsys, "board", tmp_path / "none")
    assert (code, err) == (
        2,
        f"rollkeel: board {tmp_path / 'none'}: no such folder; name run folders or folders of runs\n",
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        code, _, err = cli(capsys, "board", tmp_path, "--port", str(number))
    assert code == 2
    assert (
        err
        == f"rollkeel: board: cannot listen at 127.0.0.1 port {number}: Address already in use; choose another with --port\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_a_word(root: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "rollkeel", "board", str(root), "--port", "0"]
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where the tests run in the background it is ignored
    try:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"board http://127\.0\.0\.1:(\d+)/ of 2 runs; Ctrl-C ends it\n", line)
    assert found, line
    assert len(ask(int(found[1]), "/api/runs?run=0")["runs"]) == 2  # and the doctor is at work
    process.send_signal(number)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


# -- the doctor ----------------------------------------------------------------------------------------------------------


def trace(path: Path, temperature: float) -> Path:
    """Tokens of a bigram whose sampler's log-probs are at `temperature` and the trainer's at 1."""
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (5, 4, 32, 40))
    for step, each in enumerate(logits, 1):
        log_o = each - np.log(np.exp(each).sum(-1, keepdims=True))
        scaled = each / temperature
        log_q = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        ids = (log_q + draw.gumbel(size=log_q.shape)).argmax(-1)
        taken = [np.take_along_axis(x, ids[..., None], -1)[..., 0] for x in (log_q, log_o)]
        entropy = -(np.exp(log_o) * log_o).sum(-1)
        save_batch(
            path,
            step,
            token_ids=ids,
            mask=np.ones(ids.shape),
            rollout_logprobs=taken[0],
            train_logprobs=taken[1],
            entropy=entropy,
            sampling={"temperature": 1.0},
        )
    return path


def settled(doctor: Doctor, run: Run) -> dict[str, Any]:
    end = time.monotonic() + 120
    while (said := doctor.ask(run))["state"] == "waiting":
        assert time.monotonic() < end
        time.sleep(0.05)
    return said


def test_the_doctor_names_a_planted_fault_and_notices_new_steps(tmp_path: Path) -> None:
    run = Run(0, "sick", trace(tmp_path / "sick", 1.4))
    bare = Run(1, "bare", run_folder(tmp_path / "bare"))
    doctor = Doctor()
    try:
        assert doctor.ask(bare) == {"state": "none"}
        assert doctor.ask(run) == {"state": "waiting"}
        end = time.monotonic() + 120
        while doctor._at_work is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert doctor.ask(run) == {"state": "waiting"}
        assert not doctor._asked  # not a second time while it is examined
        said = settled(doctor, run)
        assert (said["state"], said["newest"], said["healthy"]) == ("said", 5, False)
        assert [cause["id"] for cause in said["causes"]] == [
            cause.id for cause in diagnose(read_trace(run.path)).causes
        ]
        assert doctor.known(run) == said
        newest = run.path / "rollouts" / "step_000005.parquet"
        newest.rename(newest.with_name("step_000006.parquet"))
        assert doctor.ask(run) == said  # not again at once
        assert not doctor._asked
        doctor._due[0] = 0.0
        doctor.ask(run)
        while doctor.known(run)["newest"] == 5:
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        doctor.close()


def test_no_verdict_on_files_that_lie_elsewhere(tmp_path: Path) -> None:
    outside = step_file(
        run_folder(tmp_path / "outside", [{"step": i, "reward/mean": 1.0} for i in range(1, 9)]), 1, (2,)
    )
    (run_folder(tmp_path / "runs" / "a") / "rollouts").mkdir()
    for link, target in (
        ("rollouts/step_000001.parquet", outside),
        ("metrics.jsonl", tmp_path / "outside" / "metrics.jsonl"),
    ):
        (tmp_path / "runs" / "a" / link).unlink(missing_ok=True)
        (tmp_path / "runs" / "a" / link).symlink_to(target)
        board = Board([tmp_path / "runs"])
        found = board.answers["/api/verdict"](Asked("run=0"))
        board.doctor.close()
        told = f"{Path(link).name} is a link out of the run folder: not read"
        assert found == {"words": [], "problems": [told], "doctor": {"state": "failed", "reason": told}}


def test_a_run_that_the_doctor_cannot_read_is_one_line(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a")
    step_file(path, 1, (2,)).write_bytes(b"PAR1")
    doctor = Doctor()
    try:
        said = settled(doctor, Run(0, "a", path))
    finally:
        doctor.close()
    assert said["state"] == "failed"
    assert "step_000001.parquet" in said["reason"]
    assert "\n" not in said["reason"]
