"""The papers' settings are data that other people start from: a recipe file that does not load, that silently trains another
objective than the paper's, or that pays nothing for a right answer, is worse than none.

Every file under rollkeel/recipes/papers loads, builds its objective, says where it comes from and what the schema leaves out, carries the
paper's numbers (written down again here, with their place), and rewards a right answer in the form in which its data are published.
Not covered: running them; they are too large for this machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel import objectives
from rollkeel.config import Config
from rollkeel.config_data import EvalSet
from rollkeel.loop.check import validate
from rollkeel.loop.eval_sets import evaluation_params
from rollkeel.recipe import RECIPES, load
from rollkeel.rewards import Graders
from rollkeel.tasks.source import FileProblems
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan

FILES = sorted((RECIPES / "papers").glob("*.yaml"))
RL = [file.stem for file in FILES if file.stem != "ring_1t_sft"]
Says = tuple[str, str, dict[str, Any]]
# recipes, where in the paper, setting → value; `objective.*` beyond the name is what the built objective says of itself
SAYS: list[Says] = [
    ("ring_1t_sft", "Ring-1T §2.2", {"sft.lr": 2e-4, "sft.warmup_steps": 30, "train.weight_decay": 0.1, "train.micro_batch_tokens": 65536}),
    ("ring_1t_sft", "an RL stage follows in its own recipe", {"run.steps": 0, "experiment.label_noise": 0.0}),
    ("ring_1t_*_rl", "Ring-1T §2.3.4", {"train.betas": (0.9, 0.999), "train.weight_decay": 0.01, "train.kl_coefficient": 0.0, "train.freeze_router": "bias"}),
    ("ring_1t_reasoning_rl", "Ring-1T §2.3.4", {"train.lr": 2e-6, "rollout.prompts": 480, "rollout.samples": 8, "sampling.max_new_tokens": 65536}),
    ("ring_1t_reasoning_rl", "Ring-1T §2.3.2, §2.3.4: IcePop, α 0.5, β 5", {"objective.name": "icepop", "objective.low": 0.5, "objective.high": 5.0}),
    ("ring_1t_reasoning_rl", "Ring-1T §2.3.3, §2.3.4: C3PO++, Algorithm 1", {"run.loop": "budgeted", "rollout.budget.count": "finished"}),
    ("ring_1t_reasoning_rl", "Ring-1T §2.1: verifiable outcomes", {"data.grader": "math"}),
    ("ring_1t_general_rl", "Ring-1T §2.3.4", {"train.lr": 3e-6, "rollout.prompts": 80, "rollout.samples": 8, "sampling.max_new_tokens": 32768, "objective.name": "grpo"}),
    ("ring_1t_sft", "as in reasoning RL", {"data.grader": "math"}),
    ("stability_study_*", "stability study §4.1", {"rollout.prompts": 128, "rollout.samples": 16, "train.updates_per_step": 4, "sampling.max_new_tokens": 8192}),
    ("stability_study_*", "stability study §4.1", {"engine.kind": "vllm", "model.path": "Qwen/Qwen3-30B-A3B", "data.path": "dapo-math-17k.parquet", "data.grader": "math"}),
    ("stability_study_grpo", "stability study §4.1", {"objective.name": "grpo", "objective.clip_low": 0.2, "objective.clip_high": 0.2}),
    ("stability_study_tis", "stability study §4.2", {"objective.name": "tis", "objective.clip_low": 0.2, "objective.clip_high": 0.2}),
    ("stability_study_tis", "ours: the cap is not given", {"objective.cap": 2.0}),
    ("stability_study_gspo", "stability study §4.1", {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}),
    ("stability_study_distortion", "stability study §4.4", {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}),
    ("stability_study_noise", "stability study §5.1", {"objective.name": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}),
    ("stability_study_*", "ours: not given", {"train.lr": 1e-6}),
    ("stability_study_*", "stability study §4.1: AIME24 as validation", {"eval.sets": (EvalSet(benchmark="aime24"),)}),
    ("dppo_*", "DPPO §5, App. F", {"objective.name": "dppo_binary_tv", "model.dtype": "bfloat16", "data.grader": "math"}),
    ("dppo_stability", "DPPO App. D", {"rollout.prompts": 64, "rollout.samples": 8, "engine.max_length": 8000, "train.updates_per_step": 4}),
    ("dppo_stability", "DPPO §5.1", {"model.path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "objective.delta": 0.15, "objective.cap": None}),
    ("dppo_stability", "DPPO §5.2, of the order", {"train.lr": 1e-6}),
    ("dppo_moe_*", "DPPO Table 1, default C", {"objective.cap": 5.0}),
    ("dppo_dense_base", "DPPO Table 1", {"rollout.prompts": 128, "rollout.samples": 8, "train.updates_per_step": 4, "train.lr": 1e-6, "sampling.max_new_tokens": 8000, "objective.delta": 0.2}),
    ("dppo_moe_base_lora", "DPPO Table 1", {"rollout.prompts": 128, "rollout.samples": 8, "train.updates_per_step": 8, "train.lr": 1e-5, "sampling.max_new_tokens": 8000, "objective.delta": 0.15}),
    ("dppo_moe_base_lora", "DPPO App. F: lora_rank and lora_alpha", {"train.lora.rank": 32, "train.lora.alpha": 64.0, "engine.kind": "local"}),
    *((name, "DPPO Table 1", {"rollout.prompts": 256, "rollout.samples": 16, "train.updates_per_step": 8, "train.lr": 1e-6, "sampling.max_new_tokens": 16384, "objective.delta": 0.2})
      for name in ("dppo_moe_base", "dppo_moe_base_r3", "dppo_moe_thinking")),
    *((name, "DPPO §7, App. F: R3 in one experiment alone", {"rollout.routing": "replay" if name == "dppo_moe_base_r3" else "record"})
      for name in ("dppo_moe_base", "dppo_moe_base_r3", "dppo_moe_base_lora", "dppo_moe_thinking", "dppo_dense_base")),
    ("ac_mis_po", "AC-MIS-PO §4.1", {"experiment.lag": 256, "train.lr": 2e-6, "rollout.samples": 4, "sampling.max_new_tokens": 1024, "run.steps": 400, "model.path": "Qwen/Qwen3-1.7B"}),
    ("ac_mis_po", "AC-MIS-PO §4.1: verifiable answers", {"data.grader": "math", "data.prompt_column": "problem", "objective.name": "ac_mis_po"}),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in RL if name.startswith("dppo") and name != "dppo_stability"])
def test_dppo_evaluates_as_its_table_1_says(name: str) -> None:
    """Temperature 0.7, top-p 0.95, 32 answers; every 10 steps in the columns "Dense Base" and "MoE Base LoRA", else every 5."""
    config = load(f"papers/{name}", ["engine.kind=local"])
    assert [one.benchmark for one in config.eval.sets] == ["aime24", "aime25"]
    for one in config.eval.sets:
        sampling = evaluation_params(config, one, ())
        assert (sampling.temperature, sampling.top_p) == (0.7, 0.95)
        assert sampling.max_new_tokens == config.sampling.max_new_tokens
        assert (one.samples or config.eval.samples) == 32
        assert (one.every or config.eval.every) == (10 if name in ("dppo_dense_base", "dppo_moe_base_lora") else 5)


def built(config: Config) -> objectives.Objective:
    return objectives.build(config.objective.name, config.objective.options)


def setting(config: Config, name: str) -> Any:
    if name.startswith("objective.") and name != "objective.name":
        return built(config).describe()[name.removeprefix("objective.")]
    value: Any = config
    for part in name.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return value


def test_every_file_is_checked_here() -> None:
    assert [f.stem for f in FILES if not any(fnmatch(f.stem, says[0]) for says in SAYS)] == []
    assert len(FILES) == 15


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_file_says_where_it_comes_from_and_what_is_missing(file: Path) -> None:
    head = file.read_text(encoding="utf-8").split("\nrun:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for phrase in (
        "Says:",
        "Too large to run here",
        "The schema cannot express",
        f"rollkeel train papers/{file.stem}",
        "Rewards:",
    ):
        assert phrase in head
    assert any(paper in head for paper in ("Ring-1T report", "Stability study", "DPPO paper", "AC-MIS-PO paper"))


@pytest.mark.parametrize(("recipes", "where", "settings"), SAYS, ids=lambda v: v if isinstance(v, str) else None)
def test_settings_are_the_paper_s(recipes: str, where: str, settings: dict[str, Any]) -> None:
    for file in FILES:
        if fnmatch(file.stem, recipes):
            config = load(f"papers/{file.stem}")
            assert {name: setting(config, name) for name in settings} == settings


@pytest.mark.parametrize("name", RL)
def test_a_recipe_can_be_run_and_trains_as_the_papers_do(name: str) -> None:
    config = load(f"papers/{name}", ["engine.kind=local"])  # a server need not be installed here
    validate(config)
    assert config.sampling.max_new_tokens < (config.engine.max_length or 10**6)
    assert (config.sampling.temperature, config.train.kl_coefficient, config.sft.steps) == (1.0, 0.0, 0)
    objective = built(config)
    assert (objective.aggregate == "sequence_sum", objective.advantage == "dr_grpo") == (name.startswith("dppo"),) * 2


def test_perturbed_runs_carry_their_perturbation() -> None:
    for name, factor in (("distortion", "distort_low_probability"), ("noise", "weight_noise")):
        assert [f.name for f in built(load(f"papers/stability_study_{name}")).factors] == [factor]


def test_other_rows_of_the_dppo_table_are_one_override_away() -> None:
    for name in ("dppo_binary_kl", "grpo_clip_higher", "pg_tis"):
        config = load("papers/dppo_moe_base", [f"objective.name={name}", "objective.preset=scaling"])
        assert built(config).describe()["cap"] == 5.0


# Rows as the data sets have them, reduced to problem and answer; right and wrong worked answers.
DAPO = "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer"
PUBLISHED: dict[str, tuple[str, str, list[str], list[str]]] = {
    "dapo": (
        f"{DAPO} (without quotes).\n\nFind m + n.", "34",
        ["We have $m = 9$, $n = 25$, so m + n = 34.\n\nAnswer: 34", "<think>\\boxed{33}?</think>Thus $9 + 25 = \\boxed{34}$.", "Answer: $34$", "**Answer: 34**"],
        ["We have $m = 9$, $n = 24$.\n\nAnswer: 33", "Thus \\boxed{33}, or 34.", "34 or 33", "Answer: 34 or 33", "I do not know."],
    ),
    "math": (
        "What is the probability?", r"\frac{3}{4}",
        ["There are 3 of 4.\n\nThe probability is $\\boxed{\\dfrac{3}{4}}$.", "$\\boxed{0.75}$", "<think>a quarter?</think>\n$\\boxed{\\frac34}$"],
        ["The probability is $\\boxed{\\dfrac{4}{3}}$.", "$\\boxed{\\frac{3}{4}$", "3 of 4, I think", "$\\boxed{\\frac{1}{4}}$"],
    ),
    "deepscaler": (
        "Evaluate the sum.", r"-\frac{2}{3}",
        ["So the sum is $\\boxed{-\\frac{2}{3}}$.", "The answer is $-2/3$."],
        ["So the sum is $\\boxed{\\frac{2}{3}}$.", "\\boxed{-\\frac{3}{2}}"],
    ),
}  # fmt: skip
FORM = {"dppo_stability": "math", "ac_mis_po": "deepscaler", "ring_1t_reasoning_rl": "math", "ring_1t_sft": "math"}


def asked(name: str, folder: Path, question: str, answer: str, text: str) -> Rollout:
    """A response to the one row of a file, graded by what the recipe's resolved config says."""
    data = load(f"papers/{name}").data
    file = folder / "rows.jsonl"
    row = {data.answer_column: answer, data.prompt_column: question, data.solution_column or "solution": "So it is."}
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return answered(load(f"papers/{name}", [f"data.path={file}", "data.eval_fraction=0.0"]).data, text)


def answered(data: Any, text: str) -> Rollout:
    """A response to the first row of a file."""
    problem = FileProblems(data, 0, "train").problem(0)
    prompt = Prompt(
        id="0",
        index=0,
        text=problem.text,
        token_ids=np.array([1]),
        answer=problem.answer,
        grader=problem.grader,
        task="t",
    )
    return Rollout(
        id=0, group=0, member=0, prompt=prompt, span=TokenSpan.empty(), sampling=SamplingParams(), engine="e", dtype="bf16",
        status=Status.FINISHED, text=text,
    )  # fmt: skip


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders(load("papers/dppo_moe_base").reward.graders) as made:
        yield made


@pytest.mark.parametrize("name", [file.stem for file in FILES if file.stem != "ring_1t_general_rl"])
def test_a_right_worked_answer_is_rewarded_and_a_wrong_one_is_not(name: str, graders: Graders, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    question, answer, right, wrong = PUBLISHED[FORM.get(name, "dapo")]
    boxed = [
        f"Step by step we get there.\n\n\\boxed{{{answer}}}",
        f"<think>Hm, \\boxed{{1}}.</think>Thus $\\boxed{{{answer}}}$.",
    ]
    found = graders.grade([asked(name, tmp_path, question, answer, text) for text in [*right, *boxed, *wrong]])
    assert [(r.text, r.reward, r.detail) for r in found if r.reward != float(r.text in right + boxed)] == []


GENERAL: dict[str, tuple[dict[str, Any], str, str]] = {
    "questions": ({"prompt": "How do I say no?"}, "Be kind about it.", "Just leave."),
    "instructions": (
        {
            "messages": [{"role": "user", "content": "Describe spring. Use no commas."}],
            "ground_truth": json.dumps({"func_name": "validate_no_commas"}),
        },
        "Green leaves and mild rain.",
        "Green leaves, mild rain.",
    ),
    "translations": (
        {"translation": {"de": "Die Katze saß auf der Matte.", "en": "The cat sat on the mat."}},
        "The cat sat on the mat.",
        "<think>The cat sat on the mat.",
    ),
}
"""A row of each source as it is published, a right response and a wrong one."""


@pytest.mark.parametrize(
    ("source", "grader"),
    [("questions", "reward_model"), ("instructions", "constraints"), ("translations", "translation")],
)
def test_general_rl_rewards_each_source_by_its_own_grader(source: str, grader: str, tmp_path: Path) -> None:
    if grader == "translation":
        pytest.importorskip("sacrebleu")

    class Model:
        def score(self, texts: list[str]) -> list[float]:
            return [float("kind" in text) for text in texts]

    opened: list[str] = []
    parts = {part.called: part for part in load("papers/ring_1t_general_rl").data.parts}
    assert list(parts) == list(GENERAL)
    row, *texts = GENERAL[source]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    here = parts[source].model_copy(update={"path": str(file), "eval_fraction": 0.0})
    with Graders(load_model=lambda path: opened.append(path) or Model()) as made:
        found = made.grade([answered(here, text) for text in texts])
    assert [r.reward for r in found] == [1.0, 0.0], [r.detail for r in found]
    assert found[0].prompt.grader.name == grader
    assert opened == ([parts[source].grader_options["path"]] if source == "questions" else [])
