"""A typo in a config must be an error and never a default that quietly stays: hours of training hang on one key.

Every form of override, numbers as people write them, nearest names, ranges, the round trip through YAML, and all recipes.
Not covered: whether a recipe trains well (tests/test_learning.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.config import Config, parse_yaml
from rollkeel.config_table import leaves
from rollkeel.errors import BadInput
from rollkeel.loop.check import validate
from rollkeel.recipe import RECIPES, find_recipe, from_tree, load, merge

RECIPE_FILES = sorted(p for p in RECIPES.rglob("*.yaml") if p.parent.name != "simulate")


def get(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.lr=1e-4", "train.lr", 1e-4),  # YAML 1.1 reads this as a string
        ("train.lr=1E-4", "train.lr", 1e-4),
        ("train.lr=1.0e-4", "train.lr", 1e-4),
        ("train.lr=.5", "train.lr", 0.5),
        ("train.lr=1", "train.lr", 1.0),  # an integer where a float is wanted loses nothing
        ("run.steps=0", "run.steps", 0),
        (" run.steps = 7 ", "run.steps", 7),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name='12'", "run.name", "12"),
        ("run.name='1e5'", "run.name", "1e5"),
        ("run.dir=/tmp/x y", "run.dir", "/tmp/x y"),
        ("run.dir=", "run.dir", None),
        ("run.dir=null", "run.dir", None),
        ("eval.greedy=false", "eval.greedy", False),
        ("engine.dtype=fp8", "engine.dtype", "fp8"),
        ("train.betas=[0.9,0.95]", "train.betas", (0.9, 0.95)),
        ("report.trackers=[tensorboard, wandb]", "report.trackers", ("tensorboard", "wandb")),
        ("data.options={digits: 4}", "data.options", {"digits": 4}),
        ("data.options.digits=4", "data.options.digits", 4),
        ("model.overrides.num_hidden_layers=4", "model.overrides.num_hidden_layers", 4),
        ("model.path=preset:tiny-qwen3", "model.path", "preset:tiny-qwen3"),
        ("train={lr: 1e-4, warmup_steps: 3}", "train.lr", 1e-4),
        ("train=", "train.lr", Config().train.lr),
    ],
)
def test_override_forms(override: str, path: str, value: Any) -> None:
    found = get(load(None, [override]), path)
    assert found == value
    assert type(found) is type(value)


def test_a_threshold_given_as_a_section_says_how_to_write_it() -> None:
    with pytest.raises(BadInput, match=r"'phi' is a value.*write 'objective.phi=\{drop_rate: 0.01\}'"):
        load("default", ["objective.phi.drop_rate=0.01"])


def test_later_overrides_win_and_the_rest_of_the_recipe_stays() -> None:
    config = load("default", ["train.lr=1e-2", "train.lr=1e-3", "run.seed=5"])
    assert (config.train.lr, config.run.seed) == (1e-3, 5)
    assert config.data.options == load("default").data.options


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("train.lrr=1", "config train.lrr: unknown key; did you mean train.lr?"),
        ("trian.lr=1", "config trian: unknown key; did you mean train?"),
        ("rollout.sample=4", "did you mean rollout.samples?"),
        ("engine.zzzzzz=1", "known: kind, kv, dtype"),
        ("run.steps=many", "config run.steps: expected an integer, got 'many'"),
        ("run.steps=1.5", "config run.steps"),
        ("run.steps=true", "config run.steps"),
        ("run.steps=-1", "config run.steps: expected ≥ 0, got -1"),
        ("run.name=12", "config run.name"),
        ("eval.greedy=1", "config eval.greedy"),
        ("engine.dtype=fp9", "config engine.dtype"),
        ("train.betas=[0.9]", "config train.betas.1: expected a value, got none"),
        ("train.betas=[1, 2, 3]", "config train.betas: expected at most 2 items, got (1, 2, 3)"),
        ("train.betas=2", "config train.betas: expected a list, got 2"),
        ("run.loop=foo", "config run.loop: expected sync, budgeted, async or your own file.py:name, got 'foo'"),
        ("run.device=foo", "config run.device: expected 'auto', 'cpu' or 'cuda', got 'foo'"),
        ("engine.kind=foo", "expected local, vllm or your own file.py:name, got 'foo'"),
        ("train.lr=nan", "config train.lr"),
        ("train.lr=.inf", "config train.lr: expected a finite number, got inf"),
        ("objective.phi=-.inf", "config objective.phi: expected a finite number, got -inf"),
        ("data.options.x=[1, .nan]", "config data.options.x: expected a finite number, got nan"),
        ("train.betas=[1.5, 2]", "config train.betas.0: expected < 1, got 1.5"),
        ('run.dir="a\\0b"', "config run.dir: expected Unicode text without null characters, got 'a\\x00b'"),
        ('run.dir="\\ud800"', "config run.dir: expected Unicode text"),
        ("run.name=../../evil", "config run.name: '../../evil' is a path, expected a name; run.dir takes a path"),
        ("train.lr=0", "config train.lr"),
        ("sampling.top_p=0", "config sampling.top_p"),
        ("train=3", "config train: expected a section of keys, got 3"),
        ("run.steps.x=3", "config run.steps"),
        ("objective=icepop", "expected a section of keys, got 'icepop'; write objective.name=icepop"),
        ("train.lr", "override 'train.lr': expected key=value"),
        ("=3", "expected key=value"),
        ("data.options=[", "not valid YAML"),
        pytest.param(f"data.options={'[' * 9999}", "not valid YAML", id="nested"),
        ("data.path=x.jsonl", "or data.sources alone, got data.task and data.path; set the others to null"),
        ("data.task=null", "expected exactly one of data.task and data.path, or data.sources alone, got none; set one"),
    ],
)
def test_bad_override_is_one_line_that_names_it(override: str, names: str) -> None:
    with pytest.raises(BadInput) as refused:
        load(None, [override])
    assert names in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["{a: 1}", "[a, {}]", "-3", "0.5", "yes", "''"])
def test_every_setting_says_what_it_expected_in_our_words(value: str) -> None:
    refusals = []
    for leaf in leaves():
        try:
            load(None, [f"{leaf.key}={value}"])
        except BadInput as error:
            refusals.append(str(error))
    assert len(refusals) > 20
    pattern = (
        r"^config \S+: (.+: )?expected .*, got [^,]|^config .*: unknown key|, expected a name|expected exactly one of"
    )
    assert [
        said for said in refusals if not re.search(pattern, said) or re.search("should|valid|got.*, got", said)
    ] == []


@pytest.mark.parametrize(
    ("section", "near"), [("nosuch", "train.schedule"), ("engine.kin", "did you mean engine.kind?")]
)
def test_the_settings_nearest_to_a_wrong_one_are_few(section: str, near: str) -> None:
    with pytest.raises(BadInput) as refused:
        leaves(section)
    assert near in str(refused.value)
    assert len(str(refused.value)) < 200


def test_off_is_a_word_where_it_is_one_of_the_values() -> None:
    config = load(None, ["rollout.routing=off", "alarms.on_alarm=off", "eval.greedy=off"])
    assert (config.rollout.routing, config.alarms.on_alarm, config.eval.greedy) == ("off", "off", False)


def test_a_value_is_not_a_section() -> None:
    with pytest.raises(BadInput, match="'steps' is a value, not a section"):
        load(None, ["run.steps=3", "run.steps.x=3"])


def test_options_of_another_objective_are_dropped_with_its_name() -> None:
    assert load("default").objective.options == {"phi": 0.1}
    assert load("default", ["objective.phi=0.2"]).objective.options == {"phi": 0.2}
    assert load("default", ["objective.name=kpop"]).objective.options == {"phi": 0.1}
    other = load("default", ["objective.name=icepop", "objective.high=3"]).objective
    assert (other.name, other.options) == ("icepop", {"high": 3})


def test_options_typed_before_the_objective_name_are_kept() -> None:
    for recipe in (None, "default"):
        typed = load(recipe, ["objective.clip_low=0.3", "objective.name=grpo"]).objective
        assert (typed.name, typed.options) == ("grpo", {"clip_low": 0.3})


def test_a_section_left_empty_takes_overrides(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("train:\nobjective: {phi: 0.3}\n")
    config = load(tmp_path / "r.yaml", ["train.lr=1e-2", "objective.name=kpop"])
    assert (config.train.lr, config.objective.options) == (1e-2, {"phi": 0.3})


def test_an_objective_section_may_be_absent() -> None:
    assert load(None, ["objective.name=grpo"]).objective.name == "grpo"


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_recipe_is_a_mistake(text: str, tmp_path: Path) -> None:
    """It was the default recipe in silence: 150 steps of something that nobody wrote down."""
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(BadInput, match="expected a mapping of sections, got an empty file"):
        load(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("- a\n- b\n", "expected a mapping of sections, got list"),
        ("run: [", "not valid YAML"),
        pytest.param("- " * 9999, "not valid YAML", id="nested"),
        ("run: {steps: 1}\n\tx: 2", "not valid YAML"),
        ("\xff\xfe", "unknown key|not valid YAML|expected a mapping"),
        ("train: {lr: 1e-4, betas: [0.9, oops]}", "config train.betas.1"),
        ("run: {steps: 1}\nrum: {seed: 1}", "did you mean run?"),
    ],
)
def test_bad_recipe_is_one_line(text: str, names: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput) as refused:
        load(tmp_path / "r.yaml")
    assert any(name in str(refused.value) for name in names.split("|"))
    assert "\n" not in str(refused.value)


def test_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(
        BadInput, match="recipe 'defualt': no such file and no recipe of that name; did you mean default"
    ):
        find_recipe("defualt")


@pytest.mark.parametrize("file", RECIPE_FILES, ids=lambda f: str(f.relative_to(RECIPES)))
def test_every_recipe_loads_by_name_and_survives_its_own_yaml(file: Path) -> None:
    config = load(str(file.relative_to(RECIPES).with_suffix("")))
    assert config == load(file)
    assert from_tree(yaml.safe_load(config.to_yaml())) == config


def test_there_are_recipes() -> None:
    assert "default.yaml" in {file.name for file in RECIPE_FILES}


@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    beta=st.floats(min_value=0, max_value=1, exclude_max=True),
    name=st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=20)
    | st.sampled_from(["1e5", "-.5E-3", "null", "12", "yes", ""]),
    digits=st.integers(),
    phi=st.floats(allow_nan=False, allow_infinity=False),
)
def test_yaml_round_trip_keeps_every_bit(lr: float, beta: float, name: str, digits: int, phi: float) -> None:
    tree = {
        "train": {"lr": lr, "betas": [beta, 0.5]},
        "run": {"name": name},
        "data": {"options": {"digits": digits}},
        "objective": {"name": "kpop", "phi": phi},
    }
    config = from_tree(tree)
    assert (config.train.lr, config.train.betas[0], config.objective.options["phi"]) == (lr, beta, phi)
    again = from_tree(parse_yaml(config.to_yaml()))
    assert again == config
    assert again.run.name == name


def test_config_cannot_be_changed_by_accident() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config().run.steps = 3  # type: ignore[misc]


def test_merge_writes_into_a_saved_tree() -> None:
    saved = yaml.safe_load(load("default").to_yaml())
    assert from_tree(merge(saved, ["run.steps=200"])).run.steps == 200


def test_auto_leaves_a_gpu_to_models_of_some_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch costs more than a tiny model's arithmetic. A name whose sizes are not known is not tiny; a bad one is told later."""
    import torch

    from rollkeel.loop.assemble import device_of

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = {
        (): "cpu",
        ("run.device=cuda",): "cuda",
        ("model.path=Qwen/Qwen3-0.6B",): "cuda",
        ("model.path=Qwen/Qwen3-0.6B", "run.device=cpu"): "cpu",
        ("model.path=someone/unknown",): "cuda",
        ("model.overrides={hidden_size: 2048, vocab_size: 20000}",): "cuda",
        ("model.overrides.hidden_size=x",): "cuda",
        ("model.path=Qwen/Qwen3-0.6B", "run.parity=true"): "cpu",
    }
    assert {w: device_of(load(None, w)).type for w in words} == words
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(load(None, ["model.path=Qwen/Qwen3-0.6B"])).type == "cpu"


def test_layers_to_compute_again_without_a_way_are_refused() -> None:
    """It would be silently nothing, and a run that should save memory runs out of it."""
    with pytest.raises(BadInput, match=r"train\.checkpointed_layers: expected train\.checkpointing=layer or selective"):
        validate(load("default", ["train.checkpointed_layers=3"]))
    validate(load("default", ["train.checkpointed_layers=3", "train.checkpointing=layer"]))
