"""A model is pushed once, at the end of hours: a card that the Hub refuses, or an error that loses the model or hides its reason, is found too late.

The Hub is a fake of its HTTP API on this machine, spoken to by the real client. Not covered: the Hub itself, and its storage
for large files, which the fake never asks for.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard
from tiny_run import TINY, cli, rows

import rollkeel
from rollkeel.config import Config
from rollkeel.recipe import load
from rollkeel.report.card import _hub_ids, _lacks, _settings
from rollkeel.report.run_files import read_run

SHORT = [*TINY, "sft.steps=0", "run.steps=2", "eval.every=2", "checkpoint.every=2"]
PEOPLE = {"writes": ("ann", "write"), "reads": ("ann", "read")}


class Hub(BaseHTTPRequestHandler):
    """Users, repositories and commits, as far as an upload asks for them."""

    repos: dict[str, dict[str, bytes]]
    visible: dict[str, str]
    broken: str
    """A part of a path whose requests fail."""

    def do_GET(self) -> None:
        if self.path != "/api/whoami-v2":
            return self.say(404, {"error": "Not found"})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in PEOPLE:
            return self.say(401, {"error": "Invalid credentials"})
        name, role = PEOPLE[token]
        self.say(200, {"name": name, "orgs": [{"name": "guild"}], "auth": {"accessToken": {"role": role}}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.broken and self.broken in self.path:
            return self.say(403, {"error": "Private storage is full"})
        if self.path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about['organization'] or 'ann'}/{about['name']}"
            fresh = name not in self.repos
            self.repos.setdefault(name, {})
            self.visible.setdefault(name, about["visibility"])
            return self.say(200 if fresh else 409, {"url": f"{self.endpoint}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.say(200, {"errors": [], "warnings": []})
        repo, what = self.path.removeprefix("/api/models/").rsplit("/", 2)[:2]
        if what == "preupload":
            files = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return self.say(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self.say(200, {"commitUrl": f"{self.endpoint}/{repo}/commit/1", "commitOid": "1" * 40})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def say(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if "error" in answer:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    class Fresh(Hub):
        repos, visible, broken = {}, {}, ""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_TOKEN", "writes")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield Fresh
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    path = tmp_path_factory.mktemp("hub") / "short"
    rollkeel.train(load("default", [*SHORT, f"run.dir={path}"]))
    return path


def test_the_card_has_what_the_run_measured_and_the_hub_can_read_it(run: Path) -> None:
    card = ModelCard.load(run / "model" / "README.md")
    about, last = card.data.to_dict(), rows(run)[-1]
    assert (about["library_name"], about["pipeline_tag"]) == ("transformers", "text-generation")
    assert "base_model" not in about
    ((result,),) = [about["model-index"][0]["results"]]
    assert result["metrics"] == [
        {"type": "mean_reward", "value": round(last["eval/runsum/avg@k"], 6), "name": "avg@2"},
    ]
    for said in (
        f"{last['reward/mean']:.3f} (step 2)",
        "Objective: kpop: phi 0.1;",
        "train.updates_per_step: 2",
        "| `mismatch/ratio_std` |",
        "task `runsum`",
        "64 answers with",
        "torch 2.",
        "Other seeds: this is one run, of seed 0.",
    ):
        assert said in card.text
    assert str(run.parent) not in card.content
    assert ModelCard(card.content).data.to_dict() == about  # as the client writes it again


def test_what_was_not_measured_is_said(run: Path) -> None:
    said = " ".join(_lacks(read_run(run), load("default", ["report.rollouts=false", "run.seed=7"])))
    assert "rollouts were not kept" in said
    assert "of seed 7" in said
    assert "held-out" not in said
    without = read_run(run)
    for row in without.rows[-1:]:  # the last evaluation is then that of step 0
        row.pop("eval/runsum/avg@k")
    assert "an earlier step" in " ".join(_lacks(without, Config()))


def test_folders_of_this_machine_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(
        None, ["data.task=null", "data.path=/home/ann/secret/rows.jsonl", "data.grader=~/mine.py:judge", "run.dir=/x/y"]
    )
    assert "/home" not in _settings(config)
    assert "data.path: rows.jsonl\n" in _settings(config)
    assert "run.dir" not in _settings(config)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one").mkdir(parents=True)
    names = ("runs/one", "Qwen/Qwen3-0.6B", "preset:tiny-qwen3", "rows.jsonl", "/a/b")
    assert _hub_ids(*names) == ["Qwen/Qwen3-0.6B"]


def test_a_push_uploads_the_model_folder_and_no_more(
    hub: type[Hub], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = cli(capsys, "push", run, "mine")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("/ann/mine")
    want = {file.name: file.read_bytes() for file in (run / "model").iterdir()}
    assert hub.repos == {"ann/mine": want}
    assert hub.visible == {"ann/mine": "private"}
    hub.repos["guild/theirs"] = {"notes.txt": b"kept"}
    assert rollkeel.Run(run).push_to_hub("guild/theirs", public=True).endswith("/guild/theirs")
    assert hub.repos["guild/theirs"] == {**want, "notes.txt": b"kept"}


def test_train_pushes_at_its_end_and_a_card_of_ones_own_is_kept(
    hub: type[Hub], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    code, out, err = cli(capsys, "train", "default", *SHORT, f"run.dir={mine}", "--push-to-hub", "ann/new", "--public")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].endswith("/ann/new")
    assert hub.visible == {"ann/new": "public"}
    assert set(hub.repos["ann/new"]) >= {"README.md", "config.json", "model.safetensors"}
    (mine / "model" / "README.md").write_text("# My words\n")
    code, out, err = cli(capsys, "train", "--resume", mine, "--push-to-hub", "ann/new")
    assert (code, err) == (0, "")
    assert hub.repos["ann/new"]["README.md"] == b"# My words\n"


@pytest.mark.parametrize(
    ("token", "repo", "code", "said"),
    [
        ("", "ann/x", 2, "no token; log in with `hf auth login`, or set HF_TOKEN"),
        ("typo", "ann/x", 2, "the Hub answered 401: Invalid user token. The token from HF_TOKEN"),
        ("reads", "ann/x", 2, "the token of ann may only read"),
        ("writes", "bob/x", 2, "bob is not you (ann), nor an organisation of yours (guild); name a repository of your own: ann/x"),
        ("writes", "a/b/c", 2, "not a name of a repository"),
    ],
)  # fmt: skip
def test_what_cannot_be_pushed_is_refused_before_a_run_begins(
    hub: type[Hub],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    repo: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    found, _, err = cli(capsys, "train", "default", *SHORT, f"run.dir={tmp_path / 'r'}", "--push-to-hub", repo)
    assert (found, err.count("\n")) == (code, 1)
    assert said in err
    assert not (tmp_path / "r").exists()
    assert hub.repos == {}


def test_a_push_that_fails_leaves_the_model_and_says_how_to_push_it_again(
    hub: type[Hub], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in (run / "model").iterdir()}
    hub.broken = "/commit/"
    code, _, err = cli(capsys, "push", run, "ann/x")
    assert (code, err.count("\n")) == (2, 1)
    assert "the Hub answered 403: Private storage is full" in err
    assert err.rstrip().endswith(
        f"the model is whole in {run / 'model'}, push it again with: rollkeel push {run} ann/x"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    code, _, err = cli(capsys, "push", run, "ann/x")
    assert (code, err.count("\n")) == (3, 1)
    assert "http://127.0.0.1:9 cannot be reached" in err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    code, _, err = cli(capsys, "push", run, "ann/x")
    assert (code, "HF_HUB_OFFLINE is set; unset it" in err) == (2, True)
    assert {file.name: file.read_bytes() for file in (run / "model").iterdir()} == before
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run, unfinished)
    shutil.rmtree(unfinished / "model")
    code, _, err = cli(capsys, "push", unfinished, "ann/x")
    assert (code, f"rollkeel train --resume {unfinished}" in err) == (2, True)
