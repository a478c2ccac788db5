"""A renamed setting must not cost anybody a run: old words name the new ones, and runs of the older version go on bit for bit.

`old_config.yaml` was written by the version before the names changed; several settings differ from their defaults. Not covered:
run folders of versions before that one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, assert_same, cli, rows

from rollkeel.config import parse_yaml
from rollkeel.config_table import leaves
from rollkeel.errors import BadInput
from rollkeel.recipe import from_tree, load
from rollkeel.record.run_config import digest
from rollkeel.renamed import CONSTANTS, COUNTS, RENAMED, upgraded
from rollkeel.report.run_files import read_run

OLD = Path(__file__).with_name("old_config.yaml")
TODAY = [
    *TINY,
    "engine.dtype=int8",
    "engine.kv_memory_gb=4",
    "experiment.label_noise=0.05",
    "experiment.lag=1",
    "experiment.advantages=negative",
    "experiment.rounding=int8",
    "rollout.zero_variance=drop",
    "rollout.routing=replay",
]


def old() -> dict[str, Any]:
    return parse_yaml(OLD.read_text())


def changed(key: str, value: Any) -> dict[str, Any]:
    """The older run's config with another value."""
    tree = old()
    node = tree
    *sections, name = key.split(".")
    for section in sections:
        node = node[section]
    assert name in node
    node[name] = value
    return tree


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rollout.lag=2", "rollout.lag is experiment.lag now: set experiment.lag=2"),
        ("run.schedule=a/b.jsonl", "run.schedule is experiment.schedule now: set experiment.schedule=a/b.jsonl"),
        ("sft.label_noise=0.0", "sft.label_noise is experiment.label_noise now: set experiment.label_noise=0.0"),
        ("advantages.shuffle=true", "advantages.shuffle is experiment.advantages now: set experiment.advantages=shuffled"),
        ("rollout.drop_zero_variance=true", "rollout.drop_zero_variance is rollout.zero_variance now: set rollout.zero_variance=drop"),
        ("rollout.drop_zero_variance=false", "rollout.drop_zero_variance is rollout.zero_variance now: leave it out"),
        ("rollout.dynamic_rounds=4", "rollout.dynamic_rounds is rollout.zero_variance now: set rollout.zero_variance=refill"),
        ("rollout.dynamic_rounds=3", "rollout.dynamic_rounds is rollout.zero_variance now: set rollout.zero_variance=3"),
        ("sft.enabled=false", "sft.enabled is sft.steps now: set sft.steps=0"),
        ("data.form=tests", "data.form is data.grader now: set data.grader=code"),
        ("engine.block_size=32", "engine.block_size can no longer be set: it is 16; leave it out"),
        ("engine.server.silence_s=60", "engine.server.silence_s can no longer be set: it is a fifth of engine.deadline_s; leave it out"),
        ("sft.cache_dir=x", "sft.cache_dir can no longer be set: it is ROLLKEEL_CACHE in the environment; leave it out"),
        ("rollout.return_experts=false", "rollout.return_experts is rollout.routing now: set rollout.routing=off"),
    ],
)  # fmt: skip
def test_an_old_word_names_the_new_one(word: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        load("default", [word])
    assert str(refused.value) == said


def test_a_recipe_with_an_old_name_is_refused_alike(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("rollout: {prompts: 4, lag: 3}\n")
    with pytest.raises(BadInput, match=r"^rollout\.lag is experiment\.lag now: set experiment\.lag=3$"):
        load(tmp_path / "mine.yaml")


def test_every_setting_of_the_older_version_has_a_place() -> None:
    keys: set[str] = set()

    def walk(tree: dict[str, Any], where: str) -> None:
        for key, value in tree.items():
            inner = isinstance(value, dict) and f"{where}{key}" not in ("model.overrides", "data.options")
            walk(value, f"{where}{key}.") if inner and value else keys.add(f"{where}{key}")

    walk(old(), "")
    today = {leaf.key for leaf in leaves()}
    assert len(keys) > 120
    assert keys - today - {"objective.phi"} == {*RENAMED, *CONSTANTS}


def test_the_config_of_an_older_run_means_the_same() -> None:
    assert from_tree(upgraded(old())) == load("default", TODAY)


def test_settings_of_an_older_run_that_exclude_each_other_now_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^advantages\.shuffle=true: experiment\.advantages=negative excludes it now$"):
        upgraded(changed("advantages.shuffle", True))


@pytest.mark.parametrize("key", sorted(COUNTS))
def test_a_constant_that_numbers_hang_on_must_be_what_it_is_now(key: str) -> None:
    with pytest.raises(BadInput, match=f"^{key}=other: {key} can no longer be set: it is "):
        upgraded(changed(key, "other"))
    assert upgraded(changed(key, "other"), to_go_on=False) == upgraded(old())


@pytest.mark.parametrize("key", sorted(CONSTANTS.keys() - COUNTS))
def test_a_place_or_a_time_limit_of_an_older_run_does_not_matter(key: str) -> None:
    assert from_tree(upgraded(changed(key, "other"))) == load("default", TODAY)


def test_an_older_run_is_read_whatever_it_set(tmp_path: Path) -> None:
    """The doctor reads what cannot be resumed, too."""
    (tmp_path / "config.yaml").write_text(OLD.read_text().replace("cache_dir: null", "cache_dir: elsewhere"))
    assert "elsewhere" in (tmp_path / "config.yaml").read_text()
    read = read_run(tmp_path)
    assert read.config["experiment"]["lag"] == 1
    assert not any("config.yaml" in line for line in read.problems)


def test_a_run_of_the_older_version_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    code, _, err = cli(capsys, "train", "default", *TODAY, f"run.dir={whole}")
    assert (code, err) == (0, "")
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step_000012")
    shutil.rmtree(run / "model")
    older(run, OLD.read_text())
    assert read_run(run).config["experiment"]["lag"] == 1
    code, out, err = cli(capsys, "train", "--resume", run)
    assert (code, err) == (0, ""), err
    assert "from here on" not in out
    assert len(rows(run)) == 13
    assert_same(run, whole)


def older(run: Path, text: str) -> None:
    """Make `text` the config that this run wrote."""
    new = digest((run / "config.yaml").read_bytes())
    (run / "config.yaml").write_text(text)
    events = run / "events.jsonl"
    events.write_text(events.read_text().replace(new, digest(text.encode())))
