"""Four kinds of general reward in one run, after reasoning RL: examples/general.sh, as it is shipped, two minutes on a core.

That the reward model tells held-out preferences apart, that the last model beats the first by a judge who does not know whose answer
he reads, and that no stage lost what an earlier one learnt; and that a stage that did lose it ends the script. Not covered: people.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_run import cli

from rollkeel.rewards.trial import rollout_of
from rollkeel.tasks.source import Problem
from rollkeel.types import GraderSpec

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "general.sh"
NOBODY = GraderSpec(name="task")
DOMAINS = {"runsum", "orders", "translation", "requests", "chat"}


def chain(out: Path, words: str = "") -> subprocess.CompletedProcess[str]:
    more = {"ROLLKEEL": f"{sys.executable} -m rollkeel", "WORDS": words}
    return subprocess.run(
        ["bash", SCRIPT, out], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )


def test_rules_raters_and_judge_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.with_suffix("")))
    import domains  # pyright: ignore[reportMissingImports]

    adjective, noun, verb = (next(iter(part)) for part in (domains.ADJECTIVES, domains.NOUNS, domains.VERBS))
    gold = " ".join((domains.NOUNS[noun], domains.ADJECTIVES[adjective], domains.VERBS[verb]))
    prompts = {
        "481=": {"423": 1, "424": 0},
        "5b-k>": {"bacek": 1, "bacck": 0.75, "back": 0.75, "": 0, "xyz": 0.25},
        f"{adjective} {noun} {verb}>": {gold: 1, gold + " oh": 0.75, f"x {gold}": 0, gold[: gold.rfind(" ")]: 2 / 3},
        "get kuba>": {"kuba ok": 1, "no": 0},
        "get kxba>": {"no": 1, "kxba ok": 0},
        "say tofe>": {"tofe ty": 1, "ty": 0.5, "tofe": 0.7, "oh well tofe hm oh": 0.5, "": 0},
    }
    for prompt, answers in prompts.items():
        for text, expected in answers.items():
            assert domains.score(prompt, text) == pytest.approx(expected), (prompt, text)
        best, *others = answers
        for other in others:
            beside = [
                rollout_of("a", Problem(text=prompt, answer=b, grader=NOBODY), a)
                for a, b in ((best, other), (other, best))
            ]
            assert [domains.judge(r) for r in beside] == [1, 0]
    rated = [rollout_of("a", Problem(text="say tofe>", answer="", grader=NOBODY), f"tofe {i}") for i in range(400)]
    errors = [domains.rater(r) - domains.score("say tofe>", r.text) for r in rated]
    assert errors == [domains.rater(r) - domains.score("say tofe>", r.text) for r in rated]
    assert abs(np.mean(errors)) < 0.03
    assert np.std(errors) == pytest.approx(domains.MOOD, rel=0.15)
    for task in (domains.Orders(), domains.Translation(), domains.Requests(), domains.Chat()):
        for index in range(30):
            item = task.item(0, "train", index)
            assert task.verify(item, item.answer)[0] == domains.score(item.text, item.answer) == 1, item


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("general") / "out"
    done = chain(folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.mark.slow
def test_general_rl_wins_and_keeps_what_reasoning_rl_learnt(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = json.loads((out / "reward_model" / "metrics.jsonl").read_text().splitlines()[-1])
    assert model["eval/accuracy"] >= 0.65
    stages = [out / f"{name}.parquet" for name in ("general", "reasoning", "sft")]
    code, said, _ = cli(capsys, "retained", *stages, "--json")
    kept = json.loads(said)
    assert (code, set(kept)) == (0, DOMAINS)
    assert kept["runsum"]["stage"] == str(stages[1])
    assert kept["runsum"]["value"] >= 0.95 * kept["runsum"]["best"]
    monkeypatch.syspath_prepend(str(SCRIPT.with_suffix("")))
    code, said, _ = cli(capsys, "win-rate", stages[2], stages[0], "data.grader=domains:judge", "--json")
    won = json.loads(said)
    assert (code, set(won["domains"])) == (0, DOMAINS)
    assert won["all"]["low"] > 0.5
    before = (out / "general" / "metrics.jsonl").stat().st_mtime_ns
    assert chain(out).returncode == 0
    assert (out / "general" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_stage_that_unlearns_ends_the_script(out: Path, tmp_path: Path) -> None:
    for name in ("general", "general.parquet"):
        (out / name).rename(tmp_path / name)
    done = chain(out, "run.steps=10 train.lr=1e-2 train.kl_coefficient=0")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "lost" in done.stdout
    assert "second wins" not in done.stdout
