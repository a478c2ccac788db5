"""A judge that is away, slow or talks nonsense must cost no response its reward and earn none: `judge_model` with a server of our own that
misbehaves in every way we know.

What it asks, how replies are read, both orders, the cache, the budget, translation scores, and mixes of them. Not covered: whether a
judge is any good.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_graders import rollout
from tiny_run import cli

from rollkeel.config import GradersConfig
from rollkeel.errors import BadInput
from rollkeel.record.rollout_store import write_step
from rollkeel.rewards import Graders, get, judge_model
from rollkeel.rewards.trial import rollout_of
from rollkeel.tasks.source import Problem
from rollkeel.types import GraderSpec, Rollout, Status

Reply = Callable[[BaseHTTPRequestHandler, str], None]


def completion(handler: BaseHTTPRequestHandler, text: Any, status: int = 200) -> None:
    body = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()
    raw(handler, body, status)


def raw(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


class Server:
    """Answers by `reply`; `asked` are the bodies, `keys` the Authorization headers."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.reply: Reply = lambda handler, text: completion(handler, "Good.\nScore: 7")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append({"path": self.path, **body})
                outer.keys.append(self.headers["Authorization"])
                outer.reply(self, body["messages"][0]["content"])

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


@pytest.fixture
def judged(server: Server, tmp_path: Path) -> Iterator[Callable[..., Rollout]]:
    judge_model._calls.clear()
    with Graders(GradersConfig(), regrade=0.0) as graders:

        def grade(text: str = "Ho.", answer: str = "", **options: Any) -> Rollout:
            given = {
                "url": server.url,
                "model": "m",
                "cache": str(tmp_path / "cache"),
                "tries": 2,
                "timeout_s": 0.5,
                **options,
            }
            return graders.grade([rollout(text, answer, GraderSpec(name="judge_model", options=given))])[0]

        yield grade


def test_what_it_asks_and_what_a_score_is_worth(server: Server, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(judge_model.KEY, "secret")
    done = judged("<think>Hm.</think>Ho.", rubric="Is it jolly?")
    assert (done.reward, done.detail) == (pytest.approx(6 / 9), "score 7")
    [asked] = server.asked
    assert (asked["path"], asked["model"], asked["temperature"]) == ("/v1/chat/completions", "m", 0.0)
    content = asked["messages"][0]["content"]
    assert all(
        text in content for text in ("Is it jolly?", "question\nq\n", "response\nHo.\n", "1 (worst) to 10 (best)")
    )
    assert "Hm." not in content
    assert server.keys == ["Bearer secret"]
    assert "right answer" not in content
    judged("Ho.", "Ha.", kind="reference")
    assert "right answer\nHa.\n" in server.asked[1]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("Score: 1", 0.0), ("Score: 10", 1.0), ("**Score:** 5.5/10", 0.5), ("score: 10\nNo.\n- Score: 1.", 0.0), ("<think>Score: 10</think>Score: 1", 0.0),
        ("Score: 11", None), ("Score: 0", None), ("Score: -3", None), ("Score: nan", None), ("Score: high", None), ("I give Score: 7 of 10 points", None),
        ("", None), ("<think>Score: 5", None), (None, None), (7, None),
    ],
)  # fmt: skip
def test_how_a_reply_is_read(server: Server, judged: Any, reply: Any, reward: float | None) -> None:
    server.reply = lambda handler, text: completion(handler, reply)
    done = judged()
    assert done.reward == reward
    assert done.status is (Status.GRADER_FAILURE if reward is None else Status.FINISHED)
    assert len(server.asked) == (2 if reward is None else 1)


def slow(handler: BaseHTTPRequestHandler, text: str) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(40):
        time.sleep(0.05)
        handler.wfile.write(b" ")


MISBEHAVIOURS: dict[str, tuple[Reply, str, int]] = {
    "500": (lambda h, _: raw(h, b"oops", 500), "answers 500: oops", 2),
    "429": (lambda h, _: raw(h, b"", 429), "answers 429", 2),
    "401": (lambda h, _: raw(h, b"no key", 401), "answers 401: no key", 1),
    "404": (lambda h, _: raw(h, b"", 404), "answers 404", 1),
    "silence": (lambda h, _: time.sleep(1), "timed out", 2),
    "a drop at a time": (slow, r"no whole reply in 0\.5 s", 2),
    "garbage": (lambda h, _: raw(h, b"\xff\xfe<html>"), "expected a chat completion", 2),
    "half JSON": (lambda h, _: raw(h, b'{"choices": [{"message"'), "expected a chat completion", 2),
    "cut short": (lambda h, _: raw(h, b'{"choices":', length=900), "no verdict", 2),
    "other JSON": (lambda h, _: raw(h, b'{"choices": []}'), "expected a chat completion", 2),
    "a list": (lambda h, _: raw(h, b"[" * 100_000), "expected a chat completion", 2),
    "too much": (lambda h, _: raw(h, b" " * (judge_model.MAX_REPLY + 1)), "no whole reply", 2),
    "hang up": (lambda h, _: h.connection.close(), "no verdict", 2),
    "no HTTP": (lambda h, _: h.wfile.write(b"hello\n"), "no verdict", 2),
}


@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_a_judge_that_fails_gives_no_reward(server: Server, judged: Any, name: str, tmp_path: Path) -> None:
    server.reply, why, calls = MISBEHAVIOURS[name]
    done = judged()
    assert (done.reward, done.status) == (None, Status.GRADER_FAILURE)
    assert re.search(why, done.detail), done.detail
    assert "\n" not in done.detail
    assert len(server.asked) == calls
    assert not list(tmp_path.rglob("*.json"))


def test_nobody_at_the_address_and_a_judge_that_recovers(server: Server, judged: Any) -> None:
    done = judged(url="http://127.0.0.1:9/v1")
    assert (done.reward, done.status) == (None, Status.GRADER_FAILURE)
    replies = iter([MISBEHAVIOURS["500"][0], server.reply])
    server.reply = lambda handler, text: next(replies)(handler, text)
    assert judged().detail == "score 7"


def test_both_orders_are_asked_so_that_a_judge_with_a_favourite_place_decides_nothing(
    server: Server, judged: Any
) -> None:
    server.reply = lambda handler, text: completion(handler, "Winner: A")
    assert (judged("good", "bad", kind="pairwise").reward, len(server.asked)) == (0.5, 2)

    def fair(handler: BaseHTTPRequestHandler, text: str) -> None:
        a = text.split("response A\n")[1].split("\n---")[0]
        b = text.split("response B\n")[1].split("\n---")[0]
        completion(handler, f"Winner: {'tie' if a == b else 'A' if a == 'good' else 'B' if b == 'good' else 'tie'}")

    server.reply = fair
    rewards = [
        judged(text, answer, kind="pairwise").reward
        for text, answer in (("good", "so so"), ("so so", "good"), ("same", "same"))
    ]
    assert rewards == [1.0, 0.0, 0.5]
    server.reply = lambda handler, text: completion(handler, "Winner: both")
    assert judged("new", "old", kind="pairwise").reward is None
    assert judged("new", " ", kind="pairwise").status is Status.GRADER_FAILURE


def test_replies_are_cached_by_what_was_asked_and_a_damaged_one_is_asked_again(
    server: Server, judged: Any, tmp_path: Path
) -> None:
    assert [judged("a").reward, judged("a").reward] == [pytest.approx(6 / 9)] * 2
    assert len(server.asked) == 1
    judged("b"), judged("a", rubric="Another."), judged("a", model="other")
    assert len(server.asked) == 4
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 4
    for damage in ("", "[]", '{"reply": 7}', '{"reply": "none"}', "\x00"):
        for file in files:
            file.write_text(damage)
        before = len(server.asked)
        assert judged("a").detail == "score 7"
        assert len(server.asked) == before + 1


def test_the_budget_counts_calls_and_spends_none_on_the_cache(server: Server, judged: Any) -> None:
    assert [judged(text, calls=2).reward is None for text in ("a", "b", "c", "a")] == [False, False, True, False]
    assert "the budget of 2 calls is spent" in judged("d", calls=2).detail
    assert len(server.asked) == 2


def test_silence_earns_nothing_and_no_call(server: Server, judged: Any) -> None:
    assert [judged(text).reward for text in ("", "  ", "<think>so", "<think>so</think> ")] == [0.0] * 4
    assert server.asked == []


@pytest.mark.parametrize(
    "options", [{"url": "ftp://x"}, {"low": 5, "high": 5}, {"rubrik": "x"}, {"kind": "best"}, {"model": ""}]
)
def test_options_that_are_none(judged: Any, options: dict[str, Any]) -> None:
    assert judged(**options).status is Status.GRADER_FAILURE


def test_a_mix_of_judge_and_rule_needs_both(server: Server, judged: Any, tmp_path: Path) -> None:
    judge = {"url": server.url, "model": "m", "cache": str(tmp_path / "c"), "tries": 1}
    parts = [
        {"grader": "judge_model", "options": judge, "weight": 0.5},
        {"grader": "exact", "weight": 0.5, "required": True},
    ]
    with Graders(GradersConfig(), regrade=0.0) as graders:
        mixed = [
            rollout(text, "Ho.", GraderSpec(name="mix", options={"parts": parts}), id=i)
            for i, text in enumerate(["Ho.", "Ha."])
        ]
        assert [r.reward for r in graders.grade(mixed)] == [pytest.approx(0.5 * 6 / 9 + 0.5), 0.0]
        server.reply = lambda handler, text: raw(handler, b"", 500)
        [done] = graders.grade([rollout("Hi.", "Hi.", mixed[0].prompt.grader)])
    assert (done.reward, done.status) == (None, Status.GRADER_FAILURE)


def translated(text: str, answer: str = "The cat sat on the mat.", **options: Any) -> Rollout:
    with Graders(GradersConfig(), regrade=0.0) as graders:
        return graders.grade([rollout(text, answer, GraderSpec(name="translation", options=options))])[0]


@pytest.mark.parametrize("metric", ["chrf", "chrf++", "bleu"])
def test_translations_by_distance_to_the_reference(metric: str) -> None:
    pytest.importorskip("sacrebleu")
    texts = (
        "The cat sat on the mat.",
        "The cat sat on a mat.",
        "A dog stood in the hall.",
        "",
        "<think>The cat sat on the mat.",
    )
    rewards = [translated(text, metric=metric).reward for text in texts]
    assert rewards[0] == 1.0
    assert 1.0 > rewards[1] > rewards[2] >= rewards[3] == rewards[4] == 0.0
    assert translated("A feline.", metric=metric, references=["A feline."]).reward == 1.0


def test_translation_options_that_are_none() -> None:
    pytest.importorskip("sacrebleu")
    for options in ({"metric": "rouge"}, {"metrics": "bleu"}, {"references": [""]}):
        assert translated("x", **options).status is Status.GRADER_FAILURE
    assert translated("x", " ").status is Status.GRADER_FAILURE


def test_without_sacrebleu_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"^grader 'translation': needs sacrebleu; install rollkeel\[translation\]$"):
        get("translation")


def test_two_models_answers_are_judged_in_both_orders_and_paid_for_once(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prefers_long(handler: BaseHTTPRequestHandler, text: str) -> None:
        a, b = (text.split(f" response {name}\n")[1].split("\n---")[0] for name in "AB")
        completion(handler, f"Winner: {'A' if len(a) > len(b) else 'B'}")

    server.reply = prefers_long
    for name, said in (("one", "x"), ("two", "xy")):
        problems = [Problem(text=f"{i}?", answer="gold", grader=GraderSpec(name="exact")) for i in range(8)]
        write_step(tmp_path / name, [rollout_of("a", problem, said) for problem in problems], step=0)
    words = ["win-rate", tmp_path / "one", tmp_path / "two", "--json", "data.grader=judge_model"]

    def judged(cache: str) -> tuple[int, float]:
        options = {"url": server.url, "model": "m", "kind": "pairwise", "cache": str(tmp_path / cache)}
        code, out, err = cli(capsys, *words, f"data.grader_options={json.dumps(options)}")
        assert out, err
        return code, json.loads(out)["all"]["value"]

    assert judged("cache") == (0, 1.0)
    calls = len(server.asked)
    assert calls >= 16
    assert judged("cache") == (0, 1.0)
    assert len(server.asked) == calls
    server.reply = lambda handler, text: completion(handler, "Winner: A")
    assert judged("other") == (1, 0.5)
