"""`model.context` beyond a model's own stretches its rotary embedding by YaRN. An engine that kept the old angles, or a server that is given
the old config, would answer long prompts as if nothing had been asked for.

The config, the paper's numbers (Peng et al., arXiv:2309.00071, eqs. 22-25), the embedded engine against transformers beyond the old context, a saved
folder, which is what servers load, and benchmarks each with its own context. Not covered: models trained at such lengths, and a vLLM
server that was given such a folder.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.config import Config, EngineConfig, ModelConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks import Options, contexts_of, get
from rollkeel.evals.run import run_benchmarks
from rollkeel.models.forward import rotation
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.recipe import load
from rollkeel.rewards import graders
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams

OWN = {"max_position_embeddings": 48, "initializer_range": 0.15}


def model(context: int | None, **changes: Any) -> ModelConfig:
    return ModelConfig(path="preset:tiny-qwen3", overrides=OWN, context=context, **changes)


def test_nothing_changes_within_the_model_s_own_context() -> None:
    plain = load_policy(model(None)).model.config
    for context in (8, 48):
        assert load_policy(model(context)).model.config.to_dict() == plain.to_dict()


def test_angles_are_the_paper_s() -> None:
    """Fast angles (32 turns and more in the old context) stay, slow ones (1 turn and fewer) are divided by the factor."""
    policy = load_policy(model(192))
    assert policy.context == 192
    config, plain = policy.model.config, load_policy(model(None)).model.config
    new, scale = rotation(config, config.head_dim)
    old, _ = rotation(plain, config.head_dim)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    turns = 48 * old / (2 * math.pi)
    assert torch.allclose(new[turns <= 1], old[turns <= 1] / 4)
    assert bool((new <= old + 1e-7).all() and (new >= old / 4 - 1e-7).all())


@pytest.mark.parametrize("forward", ["fast", "transformers"])
def test_engine_and_trainer_agree_beyond_the_old_context(forward: str) -> None:
    policy = load_policy(model(192))
    engine = LocalEngine(policy.model.config, EngineConfig.model_validate({"forward": forward}))
    engine.update_weights(full_update(checkpoint_views(policy.model).items(), 0))
    prompt = np.random.default_rng(0).integers(3, 280, 100)
    engine.submit([Request(id=0, prompt_ids=prompt, sampling=SamplingParams(max_new_tokens=60))])
    segments = engine.poll(60.0)
    engine.close()
    [span] = [s.span for s in segments]
    ids = torch.from_numpy(np.concatenate([prompt, span.token_ids]))
    with torch.no_grad():
        logps = policy.model(ids[None]).logits[0].log_softmax(-1)
    wanted = logps[99:-1].gather(1, ids[100:, None])[:, 0].numpy()
    assert len(span) == 60
    assert np.abs(wanted - span.logprobs).max() < 1e-4
    with torch.no_grad():
        plain = load_policy(
            ModelConfig(path="preset:tiny-qwen3", overrides={**OWN, "max_position_embeddings": 192})
        ).model
        plain.load_state_dict(policy.model.state_dict())
        assert (
            np.abs(
                plain(ids[None]).logits[0].log_softmax(-1)[99:-1].gather(1, ids[100:, None])[:, 0].numpy() - wanted
            ).max()
            > 1e-3
        )


def test_a_saved_folder_carries_it_and_a_folder_is_stretched_too(tmp_path: Path) -> None:
    save_policy(load_policy(model(None)), tmp_path / "plain")
    stretched = load_policy(ModelConfig(path=str(tmp_path / "plain"), context=96))
    save_policy(stretched, tmp_path / "yarn")
    rope = json.loads((tmp_path / "yarn" / "config.json").read_text())["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.0, 48)
    assert load_policy(ModelConfig(path=str(tmp_path / "yarn"))).context == 96
    with pytest.raises(BadInput, match=r"YaRN extends plain rotary embeddings, qwen3 has yarn; set model.overrides"):
        load_policy(ModelConfig(path=str(tmp_path / "yarn"), context=97))


# -- benchmarks --------------------------------------------------------------------------------------------------------


def test_contexts_are_those_of_the_report_or_a_number() -> None:
    chosen = [get(name) for name in ("aime25", "bbeh", "gpqa_diamond")]
    assert contexts_of(chosen, None) == {}
    assert contexts_of(chosen, "reported") == {"aime25": 131072, "bbeh": 65536, "gpqa_diamond": 32768}
    assert set(contexts_of(chosen, "4096").values()) == {4096}
    with pytest.raises(BadInput, match="--context: expected reported or 2 to"):
        contexts_of(chosen, "many")


def config(*words: str) -> Config:
    return load(
        None, ["model.path=preset:tiny-qwen3", "model.overrides.max_position_embeddings=260", "engine.slots=8", *words]
    )


def test_every_benchmark_is_asked_in_its_own_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = graders.Entry(lane=graders.Lane.INLINE, run=lambda r: float(len(r.prompt.token_ids) + len(r.span)))
    monkeypatch.setitem(graders._GRADERS, "math", entry)
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"problem": "1 + 1 =", "answer": "2"}) + "\n")
    both = [get(name).load(file, Options()) for name in ("aime24", "aime25")]
    contexts = {"aime24": 200, "aime25": 300}
    results = run_benchmarks(config(), both, tmp_path / "out", samples=24, contexts=contexts)
    assert list(results["benchmarks"]) == ["aime24", "aime25"]
    lengths = {}
    for name in contexts:
        [record] = [json.loads(line) for line in (tmp_path / "out" / name / "items.jsonl").read_text().splitlines()]
        lengths[name] = max(s["reward"] for s in record["samples"])
        assert all(s["reward"] == contexts[name] for s in record["samples"] if s["status"] == "length")
    assert lengths == contexts
    with pytest.raises(BadInput, match="was begun with contexts"):
        run_benchmarks(config(), both, tmp_path / "out", samples=24, contexts={**contexts, "aime25": 299})
