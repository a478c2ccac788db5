"""The papers' settings are data that other people start from: a recipe file that does not load, or that silently trains another
objective than the paper's, is worse than none.

Every file under rollkeel/recipes/papers loads, builds its objective, says where it comes from and what the schema leaves out, and
carries the paper's numbers (written down again here). Not covered: running them; they are too large for this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollkeel import objectives
from rollkeel.recipe import RECIPES, load

FILES = sorted((RECIPES / "papers").glob("*.yaml"))
# file → prompts, samples, response tokens, updates per step, learning rate, objective (None: a warm start only)
PAPERS: dict[str, tuple[int, int, int, int, float, str]] = {
    "ring_1t_reasoning_rl": (480, 8, 65536, 1, 2e-6, "icepop"),
    "ring_1t_general_rl": (80, 8, 32768, 1, 3e-6, "grpo"),
    "stability_study_grpo": (128, 16, 8192, 4, 1e-6, "grpo"),
    "stability_study_tis": (128, 16, 8192, 4, 1e-6, "tis"),
    "stability_study_gspo": (128, 16, 8192, 4, 1e-6, "gspo"),
    "stability_study_distortion": (128, 16, 8192, 4, 1e-6, "gspo"),
    "stability_study_noise": (128, 16, 8192, 4, 1e-6, "gspo"),
    "dppo_stability": (64, 8, 8000, 4, 1e-6, "dppo_binary_tv"),
    "dppo_moe_base": (256, 16, 16384, 8, 1e-6, "dppo_binary_tv"),
    "dppo_moe_base_r3": (256, 16, 16384, 8, 1e-6, "dppo_binary_tv"),
    "dppo_moe_thinking": (256, 16, 16384, 8, 1e-6, "dppo_binary_tv"),
    "dppo_dense_base": (128, 8, 8000, 4, 1e-6, "dppo_binary_tv"),
    "dppo_moe_base_lora": (128, 8, 8000, 8, 1e-5, "dppo_binary_tv"),
    "ac_mis_po": (64, 4, 1024, 1, 2e-6, "ac_mis_po"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "ring_1t_reasoning_rl": {"low": 0.5, "high": 5.0},
    "stability_study_grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "stability_study_tis": {"cap": 2.0},
    "stability_study_gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "stability_study_distortion": {"clip_low": 3e-4, "clip_high": 4e-4},
    "dppo_stability": {"delta": 0.15, "cap": None},
    "dppo_moe_base": {"delta": 0.2, "cap": 5.0},
    "dppo_moe_base_lora": {"delta": 0.15, "cap": 5.0},
}


def built(name: str) -> objectives.Objective:
    config = load(f"papers/{name}").objective
    return objectives.build(config.name, config.options)


def test_every_file_is_checked_here() -> None:
    assert {f.stem for f in FILES} == {*PAPERS, "ring_1t_sft"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_file_says_where_it_comes_from_and_what_is_missing(file: Path) -> None:
    head = file.read_text(encoding="utf-8").split("\nrun:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for phrase in ("Says:", "Too large to run here", "The schema cannot express", f"rollkeel train papers/{file.stem}"):
        assert phrase in head
    assert any(paper in head for paper in ("Ring-1T report", "Stability study", "DPPO paper", "AC-MIS-PO paper"))


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_numbers_are_the_paper_s(name: str) -> None:
    config = load(f"papers/{name}")
    size = (config.rollout.prompts, config.rollout.samples, config.sampling.max_new_tokens)
    assert (*size, config.train.updates_per_step, config.train.lr, config.objective.name) == PAPERS[name]
    assert (config.sampling.temperature, config.train.kl_coefficient) == (1.0, 0.0)
    assert not config.sft.enabled


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_objective_builds_with_the_paper_s_thresholds(name: str) -> None:
    objective = built(name)
    found = objective.describe()
    assert objective.name == PAPERS[name][-1]
    assert {k: found[k] for k in OPTIONS.get(name, {})} == OPTIONS.get(name, {})
    assert (objective.aggregate == "sequence_sum", objective.advantage == "dr_grpo") == (name.startswith("dppo"),) * 2


def test_warm_start_is_the_report_s() -> None:
    config = load("papers/ring_1t_sft")
    assert (config.sft.lr, config.sft.warmup_steps, config.sft.weight_decay) == (2e-4, 30, 0.1)
    assert (config.sft.micro_batch_tokens, config.sft.label_noise, config.run.steps) == (65536, 0.0, 0)


def test_router_is_held_in_both_stages_of_the_report() -> None:
    for name in ("ring_1t_reasoning_rl", "ring_1t_general_rl"):
        train = load(f"papers/{name}").train
        assert (train.freeze_router, train.weight_decay, train.betas) == (True, 0.01, (0.9, 0.999))


def test_perturbed_runs_carry_their_perturbation() -> None:
    assert [f.name for f in built("stability_study_distortion").factors] == ["distort_low_probability"]
    assert [f.name for f in built("stability_study_noise").factors] == ["weight_noise"]


def test_other_rows_of_the_dppo_table_are_one_override_away() -> None:
    for name in ("dppo_binary_kl", "grpo_clip_higher", "pg_tis"):
        config = load("papers/dppo_moe_base", [f"objective.name={name}", "objective.preset=scaling"]).objective
        assert objectives.build(config.name, config.options).describe()["cap"] == 5.0
