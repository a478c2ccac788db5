"""`examples/tiny_loop.py` is what a newcomer reads first. If its loss were not that of the real loop, it would teach another method.

Compared on rollouts that the real loop sampled, with noise on what the engine logged and after an update, so that KPop's mask
drops tokens and PPO's clip cuts some. Not covered: that the example learns as well as the real loop; its warm start and its sampling are its own.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from rollkeel import advantages
from rollkeel.batch.build import build_batch
from rollkeel.loop.assemble import assemble
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.types import Rollout

FILE = Path(__file__).resolve().parent.parent / "examples" / "tiny_loop.py"


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_it_is_small_and_stands_alone() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    assert "import rollkeel" not in text
    assert "from rollkeel" not in text


def disagreeing(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    """With a reward drawn by lot, and log-probs that a coarse engine could have written."""
    logged = np.minimum(rollout.span.logprobs + rng.normal(0, 3, len(rollout.span)), 0).astype(np.float32)
    return replace(rollout, reward=float(rng.integers(2)), span=replace(rollout.span, logprobs=logged))


def test_loss_and_gradient_are_those_of_the_real_loop(tiny: ModuleType, tmp_path: Path) -> None:
    words = ["train.lr=5e-3", "train.warmup_steps=0", "alarms.on_impossible=warn", f"run.dir={tmp_path / 'run'}"]
    config, view, rng = load("default", words), LiveView(), np.random.default_rng(0)
    with StopFlag(view) as stop:
        folder = RunFolder.create(tmp_path / "run", config)
        policy = load_policy(config.model, "cpu")
        run = assemble(config, folder, policy, view, stop)
        try:
            run.publish()
            rollouts = [disagreeing(r, rng) for r in run.feed.draw(run.clock(1), run.trainer.version).batch]
            rewards = [r.reward for r in rollouts]
            credit = advantages.compute("grpo", rewards, [r.group for r in rollouts])
            batch = build_batch(rollouts, credit, run.objective.aggregate)
            mine = [
                tiny.Rollout(r.prompt.token_ids.tolist(), r.span.token_ids.tolist(), r.span.logprobs.tolist())
                for r in rollouts
            ]
            old, tiny_old = run.trainer.logprobs(batch)[0], tiny.logprobs_of(policy.model, mine).detach()
            run.trainer.update(batch, run.objective, old_logprobs=old)
            new, tiny_new = run.trainer.logprobs(batch)[0], tiny.logprobs_of(policy.model, mine).detach()
            tokens = batch.tokens(new.requires_grad_(), old_logprobs=old)
            loss = run.objective.loss(tokens)
            loss.backward()
            kept = run.objective(tokens).keep
        finally:
            run.close()
            folder.close()

    given = tiny.advantages_of(torch.tensor(rewards).view(config.rollout.prompts, config.rollout.samples)).flatten()
    np.testing.assert_allclose(given.numpy(), credit, atol=1e-5)
    lengths = torch.tensor([len(r.response) for r in mine])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]
    torch.testing.assert_close(tiny_old[inside], old, atol=2e-5, rtol=0)
    tiny_new.requires_grad_()
    its_loss, its_kept = tiny.kpop_loss(
        tiny_new, tiny_old, tiny.padded([r.rollout_logprobs for r in mine]), given, lengths
    )
    its_loss.backward()

    assert 0.02 < 1 - kept.float().mean() < 0.9
    assert new.grad is not None
    moved = (batch.advantages != 0) & kept
    assert (new.grad[moved] == 0).any(), "the clip cut nothing"
    assert (its_kept[inside] == kept).float().mean() > 0.999, "masks differ by more than rounding at their edge"
    torch.testing.assert_close(its_loss.detach(), loss.detach(), atol=1e-5, rtol=1e-4)
    same = its_kept[inside] == kept
    torch.testing.assert_close(tiny_new.grad[inside][same], new.grad[same], atol=1e-7, rtol=1e-3)
