"""What cannot run over a cluster is refused in one line, before anything is trained; an endless wait would be the alternative.

Not covered: clusters of other Ray versions, and storage that nodes do not share.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from rollkeel.cluster.check import check_cluster, ranked, refuse_others
from rollkeel.errors import BadInput
from rollkeel.loop.job import train
from rollkeel.loop.stages import merge_stage, reward_model_stage
from rollkeel.recipe import load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "cluster.trainers=3 train.mesh.shard=2",
            "cluster.trainers: expected 2, the ranks of train.mesh shard=2, got 3",
        ),
        ("train.mesh.shard=2 train.mesh.replicate=2 cluster.trainers=2", "replicate=2 × shard=2, got 2"),
        ("cluster.trainers=2 train.processes=2", "train.processes=2: does not run on 2 ranks yet"),
        ("train.mesh.tensor=2 train.lora.rank=4", "train.lora.rank=4: "),
        ("train.mesh.tensor=2 model.dtype=float16", "model.dtype=float16: "),
        ("train.mesh.expert=2 train.reduce=tree", "train.reduce=tree: "),
        ("cluster.engines=2 engine.processes=2", "engine.processes=2: does not run on a cluster yet"),
        (
            "cluster.engines=2 engine.kind=vllm cluster.placement=colocated",
            "engine.kind=vllm: keeps its memory while ranks train",
        ),
        (
            "cluster.engines=2 engine.kind=vllm engine.server.url=http://127.0.0.1:9",
            "engine.server.url=http://127.0.0.1:9: does not run on a cluster yet",
        ),
        ("cluster.engines=1 cluster.placement=colocated run.loop=async", "cluster.placement=colocated: "),
        (
            "cluster.graders=1 engine.kind=own.py:Own cluster.placement=colocated",
            "engine.kind=own.py:Own: keeps its memory",
        ),
        (
            "cluster.engines=1 engine.kind=vllm run.loop=async experiment.schedule=s.jsonl",
            "experiment.schedule=s.jsonl: ",
        ),
        ("cluster.address=nowhere", "cluster.address: expected HOST:PORT of a Ray cluster's head, got 'nowhere'"),
        ("cluster.address=auto", "cluster.address=auto: expected RAY_ADDRESS"),
    ],
)
def test_a_config_that_asks_for_what_is_not_there(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(BadInput) as refused:
        train(load(None, [*words.split(), f"run.dir={tmp_path / 'run'}"]))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_an_address_that_does_not_answer() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"nothing listens at {address}"):
            check_cluster(load(None, [f"cluster.address={address}"]))


def test_more_actors_than_the_cluster_has(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        train(load(None, ["cluster.trainers=8", "cluster.engines=1", f"run.dir={tmp_path / 'run'}"]))
    said = "cluster: 8 ranks and 1 engines take 9 places of 1 CPUs, the cluster has 8 CPUs; lower cluster.trainers"
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_ranks_without_a_mesh_shard_the_model_and_a_mesh_says_how_many_ranks() -> None:
    assert ranked(load(None, ["cluster.trainers=4"])).train.mesh.shard == 4
    both = ranked(load(None, ["train.mesh.replicate=2", "train.mesh.shard=2"]))
    assert (both.cluster.trainers, both.cluster.engines) == (4, 1)


def test_nodes_with_other_versions_are_named() -> None:
    own = {"torch": "2.13.0", "transformers": "5.23"}
    refuse_others("trainer rank 1", own, own)
    with pytest.raises(BadInput, match=r"trainer rank 1 has torch 2\.12\.0, this process has 2\.13\.0; install"):
        refuse_others("trainer rank 1", own | {"torch": "2.12.0"}, own)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"Ray, which is not installed; pip install rollkeel\[cluster\], or leave"):
        check_cluster(load(None, ["cluster.trainers=2"]))


def test_a_plain_run_asks_for_no_cluster() -> None:
    assert not load(None, []).clustered


def test_what_one_process_does_alone(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^cluster, train\.mesh: rollkeel merge .* one process; leave them out$"):
        merge_stage(load(None, ["cluster.trainers=2"]), tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.mesh.tensor=2"], "train.mesh.tensor: a reward model is trained by"),
        (["train.mesh.expert=2", "train.mesh.context=2"], "leave train.mesh.expert, train.mesh.context out"),
        (["cluster.trainers=2", "train.reduce=tree"], "train.reduce: a reward model is trained by"),
        (["cluster.trainers=2", "train.lora.rank=4"], "train.lora.rank: a reward model is trained whole"),
        (["cluster.trainers=3", "train.mesh.shard=2"], "cluster.trainers: expected 2, the ranks of train.mesh"),
        (["cluster.trainers=2", "model.path=./nowhere"], "expected a Hugging Face folder"),
    ],
)
def test_what_ranks_cannot_do_of_a_reward_model(words: list[str], said: str, tmp_path: Path) -> None:
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{i}", "chosen": "7", "rejected": "1"} for i in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BadInput) as refused:
        reward_model_stage(load(None, words), pairs, out)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not out.exists()
