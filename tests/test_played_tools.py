"""Tools and terminals answer whole runs: each loop must sample the tokens that the synchronous one does, several results a turn too.

Real loops, a tool family whose every turn makes two calls, terminals of the sandbox. Not covered: kills
(tests/test_played.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tasks.test_tools import HERMES
from test_played import ASYNC, episodes, run, turns_cut

from rollkeel.loop import job
from rollkeel.models.presets import build_preset
from rollkeel.recipe import load
from rollkeel_sandbox import Level, probe

caged = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
FAMILY = """
from rollkeel.tasks.environment import EnvironmentOptions
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environments.tools import ToolUse, spoken

class Counts(ToolUse[EnvironmentOptions]):
    "Counts letters, twice a turn; the third turn is the answer."
    name = "counts"

    def draw(self, rng):
        return TaskItem(text=f"Count {rng.randrange(10**9)}.", answer="a\\nb\\n0")

    def functions(self):
        return [self.count]

    def reset(self, item):
        self.told = 0
        return super().reset(item)

    def count(self, text: str) -> int:
        "How long a text is, and how many were counted."
        self.told += 1
        return 100 * len(text) + self.told

    def step(self, action):
        if self._left <= 1:
            return super().step(action)
        return super().step(spoken("count", text=action) + spoken("count", text="more"))
"""
BUDGETED = ["run.loop=budgeted", "rollout.budget={tokens: 150, capacity: 20, retention: 9}", "engine.slots=9"]


@pytest.fixture
def tools(tmp_path: Path) -> list[str]:
    model, tokenizer = build_preset("tiny-qwen3-moe")
    tokenizer.chat_template = HERMES
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "family.py").write_text(FAMILY)
    words = [
        f"model.path={tmp_path / 'model'}",
        f"data.task={tmp_path / 'family.py'}:Counts",
        "data.options={turns: 3}",
    ]
    return [*words, "data.chat_template=true", "sft.steps=0"]


@pytest.fixture
def repo() -> list[str]:
    more = [
        "sampling.max_new_tokens=40",
        "rollout.environment.turn_tokens=30",
        "rollout.prompts=3",
        "sft.batch_size=16",
    ]
    return ["data.task=repo", "data.options={functions: 1, turns: 3}", *more]


@pytest.mark.slow
@caged
@pytest.mark.parametrize("loop", [BUDGETED, pytest.param(ASYNC, marks=pytest.mark.slow)], ids=["budgeted", "async"])
@pytest.mark.parametrize("family", ["tools", pytest.param("repo", marks=pytest.mark.slow)])
def test_every_loop_samples_the_tokens_of_the_synchronous_one(
    family: str, loop: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = [*request.getfixturevalue(family), "train.lr=1e-8", "train.kl_coefficient=0", "run.steps=4"]
    words += ["checkpoint.every=0", "train.micro_batch_tokens=2000"]
    run(tmp_path / "sync", *words)
    run(tmp_path / "other", *words, *loop)
    one, two = episodes(tmp_path / "sync"), episodes(tmp_path / "other")
    if loop is BUDGETED:
        assert turns_cut(tmp_path / "other") > 3
    shared = one.keys() & two.keys()
    assert len(shared) > 12
    for i in shared:
        a, b = one[i], two[i]
        assert a.span.token_ids.tolist() == b.span.token_ids.tolist(), i
        assert a.span.own.tolist() == b.span.own.tolist()
        assert np.abs(a.span.logprobs - b.span.logprobs).max() < 1e-4
        assert (a.status, a.reward, a.text, a.detail) == (b.status, b.reward, b.text, b.detail)
    assert any(a.span.sampled is not None and not a.span.sampled.all() for a in one.values())
    if family == "tools":
        assert any(a.text.count("<tool_response>") == 4 for a in one.values())


@caged
@pytest.mark.slow
def test_the_recipe_learns_to_mend_repositories_it_has_not_seen(tmp_path: Path) -> None:
    """A quarter of an hour on one core."""
    job.train(load("repo", [f"run.dir={tmp_path / 'run'}"]))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval/repo/avg@k"] for row in rows if "eval/repo/avg@k" in row]
    assert held_out[-1] - held_out[0] >= 0.2
