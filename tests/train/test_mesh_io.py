"""A model on several ranks is loaded, published, saved and resumed without any rank ever holding all of it.

Matters because a model that needs many ranks fits none of them, and a part that is read or written at the wrong place trains on
silently. Does not cover GPUs, several machines, shared storage that shows files late, and ranks that are killed while they write.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollkeel.config import ModelConfig
from rollkeel.errors import BadInput, Corrupt
from rollkeel.memory.plan import OF_ENGINE, Setting, plan
from rollkeel.memory.shapes import shape_of
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.recipe import load
from rollkeel.train import checkpoint
from rollkeel.train.adamw import master
from rollkeel.train.mesh import SIZES, Mesh
from rollkeel.train.parts import Box
from rollkeel.train.saved_parts import Parts
from tests.train.mesh_io_ranks import BUFFER, Job, once, overflows, update
from tests.train.mesh_ranks import Case, trainer, weights_of
from tests.train.test_mesh import Found, distance, run

KEPT: dict[str, Any] = {"options": {"kl_coefficient": 0.1}}
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
ORDER = [Job(shard=2, model="tiny-qwen3-tied", what="any_order"), Job(shard=2, expert=2, what="any_order")]
DRAWN = [
    Job(shard=2, expert=2, what="loaded", parts=True),
    Job(shard=4, model="tiny-qwen3-tied", what="loaded", parts=True),
]
DRAWN += [Job(replicate=2, what="loaded", parts=True)]
WRITTEN = Job(shard=4, what="saved", source="four", parts=True, **KEPT)
AGAIN = [
    replace(WRITTEN, **sizes, what="resumed") for sizes in ({}, {"shard": 2, "expert": 2}, {"shard": 1, "replicate": 2})
]
ONE = Job(shard=2, what="resumed", source="one", parts=True)
MESHES: list[dict[str, Any]] = [{"shard": 2}, {"shard": 2, "expert": 2}]
WATCHED = [
    Job(**sizes, what="watched", source=f"watched-{i}", parts=True, overrides=WIDE) for i, sizes in enumerate(MESHES)
]
FOUR = replace(WATCHED[0], shard=4)
OTHERS: list[dict[str, Any]] = [{"tensor": 2}, {"context": 2}, {"expert": 2, "tensor": 2}, {"shard": 3}]
PLANNED = [Job(replicate=2, what="watched", parts=True, overrides=WIDE)]
TAUGHT = [Job(shard=2, expert=2, what="supervised", parts=True), Job(replicate=2, shard=2, what="supervised", **KEPT)]
MORE_TAUGHT = [Job(shard=2, what="supervised", model="tiny-qwen3-tied", options={"reduce": "tree"})]
MORE_TAUGHT += [Job(expert=2, what="supervised", options={"freeze_router": "router"})]
LORA: dict[str, Any] = {"lora": {"rank": 4, "experts": True}}
TAUGHT += [Job(shard=2, what="supervised", parts=True, options=LORA)]
ADAPTED = Job(shard=2, what="saved", source="adapted", parts=True, options=LORA | KEPT["options"])
ADAPTED_AGAIN = replace(ADAPTED, what="resumed", shard=1, replicate=2)
HALF = [Job(shard=2, what="saved", source="half", parts=True, dtype="bfloat16")]
HALF += [replace(HALF[0], source="half-adapted", options=LORA)]
MORE_HALF = [Job(replicate=2, what="saved", source="half-replicas", model="tiny-qwen3-tied", dtype="bfloat16")]
MORE_HALF += [replace(HALF[0], source="half-tree", options={"reduce": "tree"})]
SCALED = [replace(HALF[0], source="scaled", dtype="float16")]
MORE_SCALED = [replace(MORE_HALF[0], source="scaled-replicas", dtype="float16")]
HALF_AGAIN = replace(HALF[0], what="resumed", shard=1, replicate=2)
SCALED_AGAIN = replace(SCALED[0], what="resumed", shard=1, replicate=2)
OVERFLOWS = replace(SCALED[0], what="overflows")
TAUGHT += [Job(shard=2, what="supervised", dtype="bfloat16", options={"freeze_router": "router"})]
TAUGHT_AGAIN = [replace(TAUGHT[0], source="taught")]


def read_from(folder: Path) -> list[Job]:
    """Jobs that load Hugging Face folders: of bfloat16 experts in several files, and of tied weights in one."""
    moe = Job(shard=2, expert=2, what="loaded", parts=True, model=str(folder / "moe"))
    return [moe, replace(moe, shard=4, expert=1, model=str(folder / "tied"))]


def rounded(folder: Path) -> list[Job]:
    """Jobs in bfloat16 whose ranks add up, in a pass, what one process has in one piece."""
    about: dict[str, Any] = {"what": "once", "parts": True, "options": {"clip_norm": 1e9}, "dtype": "bfloat16"}
    sizes: list[dict[str, int]] = [{"tensor": 2}, {"context": 2}, {"expert": 2}, {"expert": 2, "tensor": 2}]
    return [Job(**s, **about, model=str(folder / "moe"), source=f"rounded-{i}") for i, s in enumerate(sizes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    moe = load_policy(ModelConfig(path="preset:tiny-qwen3-moe", dtype="bfloat16"), seed=5)
    moe.model.save_pretrained(str(folder / "moe"), max_shard_size="100KB")
    moe.tokenizer.save_pretrained(str(folder / "moe"))
    save_policy(load_policy(ModelConfig(path="preset:tiny-qwen3-tied"), seed=6), folder / "tied")
    one = trainer(Case(), Mesh())
    for number in range(2):
        update(one, number)
    checkpoint.save_state(folder / "one", {"step": 2, "trainer": one.state_dict()})
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What a rank of a job came to."""
    return sound(
        [
            *ORDER,
            *DRAWN,
            WRITTEN,
            *AGAIN,
            ONE,
            *WATCHED,
            *PLANNED,
            *TAUGHT,
            *TAUGHT_AGAIN,
            ADAPTED,
            ADAPTED_AGAIN,
            *HALF,
            *SCALED,
            SCALED_AGAIN,
            OVERFLOWS,
            HALF_AGAIN,
            *read_from(folder),
            *rounded(folder),
        ],
        folder,
    )


def sound(jobs: list[Job], folder: Path) -> Found:
    """What a rank of one of these came to; its error, if it had one, fails."""
    of = run(jobs, folder)

    def found(case: Case, rank: int = 0) -> dict[str, Any]:
        result = of(case, rank)
        assert "error" not in result, result["error"]
        return result

    return found


def alone(job: Job, folder: Path, **changes: Any) -> dict[str, Any]:
    result = replace(job, **dict.fromkeys(SIZES, 1), **changes).run(Mesh(), folder)
    assert "error" not in result, result["error"]
    return result


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def assert_near(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    for one, two in zip(a, b, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            if name == "optimizer/changed_share":  # told by a sample, which is another one on another mesh
                continue
            assert value == pytest.approx(two[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("job", ORDER, ids=str)
def test_weights_may_be_looked_at_and_loaded_behind_any_pass(job: Job, found: Found) -> None:
    one = trainer(replace(job, **dict.fromkeys(SIZES, 1)), Mesh())
    assert_same(found(job)["first"], weights_of(one))
    for rank in range(job.size):
        ours = found(job, rank)
        assert_same(ours["loaded"], ours["updated"])
        assert ours["again"] == ours["metrics"] == found(job)["metrics"]


@pytest.mark.parametrize("job", DRAWN, ids=str)
def test_ranks_draw_the_numbers_that_one_process_draws(job: Job, found: Found, folder: Path) -> None:
    one = alone(job, folder, parts=False)
    for rank in range(job.size):
        assert_same(found(job, rank)["weights"], one["weights"])
        assert_same(found(job, rank)["buffers"], one["buffers"])


@pytest.mark.parametrize("number", [0, 1])
def test_ranks_read_what_one_process_reads(number: int, found: Found, folder: Path) -> None:
    job = read_from(folder)[number]
    one = alone(job, folder, parts=False)
    for rank in range(job.size):
        assert_same(found(job, rank)["weights"], one["weights"])
        assert_same(found(job, rank)["buffers"], one["buffers"])


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of ranks."""
    saved, out = Parts(folder, Mesh()), {}
    for name, shape in saved.shapes.items():
        out[name] = torch.full(shape, 77, dtype=saved.dtypes[name])
        saved.fill(name, [Box((0,) * len(shape), (0,) * len(shape), shape)], out[name])
    return out


@pytest.mark.parametrize("job", AGAIN, ids=str)
def test_a_checkpoint_of_four_shards_resumes_on_another_mesh(job: Job, found: Found, folder: Path) -> None:
    first, ours = found(WRITTEN), found(job)
    assert_same(ours["weights"], first["weights"])
    assert_same(whole(folder / ours["again"]), whole(folder / "four"))
    if job.sizes == WRITTEN.sizes:
        assert_same(ours["last"], first["last"])
        assert ours["metrics"] == first["metrics"]
    assert_near(ours["metrics"], first["metrics"])


def test_a_checkpoint_of_four_shards_resumes_in_one_process(found: Found, folder: Path) -> None:
    first, ours = found(WRITTEN), alone(AGAIN[0], folder, parts=False)
    assert_same(ours["weights"], first["weights"])
    assert_same(whole(folder / ours["again"]), whole(folder / "four"))
    assert_near(ours["metrics"], first["metrics"])


def test_the_state_of_one_process_resumes_on_ranks(found: Found, folder: Path) -> None:
    one = trainer(Case(), Mesh())
    state = checkpoint.load_state(folder / "one")["trainer"]
    one.load_state_dict(state)
    assert_same(found(ONE)["weights"], weights_of(one))
    moments, there = state["optimizer"]["moments"], whole(folder / found(ONE)["again"])
    for name, of in moments.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(there[f"{key}/{name}"], of[key]), name
    assert_near(found(ONE)["metrics"], [update(one, number) for number in (2, 3)])


def test_the_model_of_ranks_is_the_folder_of_one_process(found: Found, folder: Path, tmp_path: Path) -> None:
    ours = folder / "four-model"
    load_policy(ModelConfig(path=str(ours)))  # nothing is missing
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3-moe"))
    save_policy(policy, tmp_path)
    names = {path.name for path in ours.iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    there = {k: v for file in ours.glob("*.safetensors") for k, v in load_file(file).items()}
    assert there.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert_same(there, found(WRITTEN)["weights"])
    for path in tmp_path.iterdir():
        if path.suffix == ".json":
            assert path.read_text() == (ours / path.name).read_text(), path.name
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == there.keys()
    assert index["metadata"]["total_size"] == sum(w.numel() * 4 for w in there.values())


@pytest.mark.parametrize("job", WATCHED, ids=str)
def test_no_rank_ever_holds_the_whole_model(job: Job, found: Found) -> None:
    for rank in range(job.size):
        assert_in_parts(job, found(job, rank))


def planned(job: Job) -> dict[str, int]:
    """What `rollkeel plan` says of a rank."""
    mesh = str(job.sizes).replace("'", "")
    words = [f"train.mesh={mesh}", "train.micro_batch_tokens=48", "sampling.max_new_tokens=30", "sync.buffer_mb=0.001"]
    parts = plan(load(None, words), shape_of(f"preset:{job.model}", job.overrides), Setting(cpu=True, prompt=5)).parts
    return {name: size for name, size in parts.items() if name not in OF_ENGINE}


@pytest.mark.parametrize("job", [*WATCHED, *PLANNED], ids=str)
def test_a_plan_says_what_ranks_hold(job: Job, found: Found) -> None:
    assert_as_planned(job, found)


@pytest.mark.slow
def test_a_plan_says_what_ranks_of_other_meshes_hold(tmp_path: Path) -> None:
    jobs = [FOUR, *(replace(PLANNED[0], replicate=1, **sizes) for sizes in OTHERS)]
    of = sound(jobs, tmp_path)
    for job in jobs:
        assert_as_planned(job, of)
    for rank in range(FOUR.size):
        assert_in_parts(FOUR, of(FOUR, rank))


def assert_as_planned(job: Job, found: Found) -> None:
    parts = planned(job)
    for kind in ("weights", "gradients", "moments"):
        held = [found(job, rank)[kind] for rank in range(job.size)]
        assert parts[kind] == max(held), kind  # of the fullest


@pytest.mark.slow
def test_a_plan_says_what_updates_need(tmp_path: Path) -> None:
    dense = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 1024}
    moe = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 512}
    about: dict[str, Any] = {"what": "watched", "parts": True}
    sizes: list[dict[str, Any]] = [{"shard": 2}, {"shard": 4}, {"replicate": 2}, {"tensor": 2}, {"context": 2}]
    jobs = [Job(**mesh, **about, model="tiny-qwen3", overrides=dense) for mesh in (*sizes, {"shard": 2, "tensor": 2})]
    sizes = [{"expert": 2}, {"shard": 2, "expert": 2}, {"expert": 2, "tensor": 2}]
    jobs += [Job(**mesh, **about, overrides=moe) for mesh in sizes]
    of = run(jobs, tmp_path)
    peaks = [max(of(job, rank)["peaks"]["again"] for rank in range(job.size)) for job in jobs]
    ratios = [sum(planned(job).values()) / peak for job, peak in zip(jobs, peaks, strict=True)]
    assert 0.95 < min(ratios) < max(ratios) < 1.15, ratios


@pytest.mark.slow
def test_no_rank_ever_holds_a_model_of_200_million(tmp_path: Path) -> None:
    fields = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 15, "vocab_size": 2048}
    jobs = [Job(shard=s, what="watched", model="tiny-qwen3", parts=True, overrides=fields) for s in (2, 4)]
    of = sound(jobs, tmp_path)
    for job in jobs:
        for rank in range(job.size):
            seen = of(job, rank)
            assert_in_parts(job, seen)
            whole = seen["weights"] * job.shard
            assert whole > 4 * 195e6
            assert seen["peaks"]["load"] < 0.9 * whole
            assert seen["peaks"]["named_weights"] - seen["moments"] < 0.7 * whole


def assert_in_parts(job: Job, seen: dict[str, Any]) -> None:
    model: Any = load_policy(ModelConfig(path=f"preset:{job.model}", overrides=job.overrides), whole=False).model
    sizes = [4 * p.numel() for p in model.parameters()]
    total, largest = sum(sizes), max(sizes)
    layer = sum(4 * p.numel() for p in model.model.layers[0].parameters())
    ends = 4 * (model.lm_head.weight.numel() + model.model.embed_tokens.weight.numel())
    if job.expert == 1:
        for kind, times in {"weights": 1, "gradients": 1, "moments": 2}.items():
            assert seen[kind] == pytest.approx(times * total / job.shard, rel=0.1), kind
    state = seen["weights"] + seen["moments"]
    for name in seen["peaks"].keys() - {"load", "step", "again"}:
        # A parameter that is brought together lies there once in parts and once whole; a checkpoint goes through a buffer. Of the last
        # part that was sent gloo's thread may let go late.
        assert seen["peaks"][name] <= state + 2 * largest + largest // job.shard + BUFFER, name
    # Passes bring in embeddings and head, and two layers, once for weights and once for gradients; drawing and AdamW take a parameter.
    bucket = 2 * (ends + 2 * layer) + 2 * largest + 2**20
    assert seen["peaks"]["load"] <= seen["weights"] + bucket
    assert seen["peaks"]["step"] <= state + seen["gradients"] + bucket


def shards_of_experts(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> ModelConfig:
    """The folder of tiny-qwen3-moe with other weights."""
    save_policy(load_policy(ModelConfig(path="preset:tiny-qwen3-moe")), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("in_parts", [True, False])
def test_weights_that_fit_nowhere_are_refused_and_computed_ones_are_not(tmp_path: Path, in_parts: bool) -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        weights["model.layers.7.extra.weight"] = torch.ones(2)

    config = shards_of_experts(tmp_path, change)
    with pytest.raises(
        BadInput, match=r"no place for 1 of its weights, first model\.layers\.7\.extra\.weight"
    ) as error:
        load_policy(config, whole=not in_parts)
    assert "\n" not in str(error.value)
    load_policy(
        shards_of_experts(tmp_path, lambda w: w.update({"model.rotary_emb.inv_freq": torch.ones(2)})),
        whole=not in_parts,
    )


def test_missing_and_misshapen_weights_are_refused_by_name(tmp_path: Path) -> None:
    gate = "model.layers.1.mlp.experts.3.gate_proj.weight"
    with pytest.raises(BadInput, match=rf"the checkpoint lacks weight {gate}"):
        load_policy(shards_of_experts(tmp_path, lambda w: w.pop(gate)), whole=False)
    with pytest.raises(BadInput, match=rf"weight {gate} has shape \[3\], config.json asks for \[32, 64\]"):
        load_policy(shards_of_experts(tmp_path, lambda w: w.update({gate: torch.ones(3)})), whole=False)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"expected model\.safetensors, found none"):
        load_policy(ModelConfig(path=str(tmp_path)), whole=False)


def broken(how: str, folder: Path, other: Path) -> str:
    """The file that is named."""
    part, index = folder / "part-00002.safetensors", folder / "index.json"
    if how == "missing":
        part.unlink()
    elif how == "short":
        os.truncate(part, part.stat().st_size - 1)
    elif how == "changed":
        data = bytearray(part.read_bytes())
        data[-9] ^= 1
        part.write_bytes(data)
    elif how == "foreign":
        shutil.copy(other / part.name, part)
    elif how == "no index":
        index.unlink()
        return index.name
    else:
        text = index.read_text()
        index.write_text(text.replace('"updates": 2', '"updates": 3'))
        return index.name
    return part.name


@pytest.mark.parametrize("how", ["missing", "short", "changed", "foreign", "no index", "changed index"])
def test_damaged_parts_are_refused_by_name(how: str, found: Found, folder: Path, tmp_path: Path) -> None:
    other = folder / found(AGAIN[1])["again"]
    shutil.copytree(folder / "four", tmp_path / "c")
    name = broken(how, tmp_path / "c", other)
    t = trainer(Case(**KEPT), Mesh())
    before = weights_of(t)
    with pytest.raises(Corrupt, match=name) as error:
        t.load(tmp_path / "c")
    assert "\n" not in str(error.value)
    assert_same(weights_of(t), before)


def test_files_are_described_as_they_are(found: Found, folder: Path) -> None:
    files = found(WRITTEN)["files"]
    assert files == {
        path.name: {"size": path.stat().st_size, "sha256": checkpoint._sha256(path)}
        for path in (folder / "four").iterdir()
    }
    assert found(WRITTEN, 3)["files"] == files
    weights = sorted((folder / "four-model").glob("*.safetensors"))
    assert len(weights) > 1
    told = {file.name: {"size": file.stat().st_size, "sha256": checkpoint._sha256(file)} for file in weights}
    assert (found(WRITTEN)["model"], found(WRITTEN, 3)["model"]) == (told, {})


def test_another_model_and_another_reference_are_refused(found: Found, folder: Path) -> None:
    assert found(WRITTEN)
    with pytest.raises(BadInput, match=r"weight .*: the model has .*; resume with the same model"):
        trainer(Case(model="tiny-qwen3", **KEPT), Mesh()).load(folder / "four")
    with pytest.raises(BadInput, match="checkpoint has no reference weights"):
        trainer(Case(**KEPT), Mesh()).load(folder / "one")


@pytest.mark.parametrize("job", TAUGHT, ids=str)
def test_supervised_training_on_ranks_is_that_of_one_process(job: Job, found: Found, folder: Path) -> None:
    assert_taught(job, found, folder)


@pytest.mark.slow
def test_supervised_training_that_is_added_up_in_a_tree_or_leaves_routers_alone(tmp_path: Path) -> None:
    of = sound(MORE_TAUGHT, tmp_path)
    for job in MORE_TAUGHT:
        assert_taught(job, of, tmp_path)


def assert_taught(job: Job, found: Found, folder: Path) -> None:
    ours, one = found(job), alone(job, folder, parts=False)
    if job.dtype == "float32":
        assert distance(ours["weights"], one["weights"]) < 1e-5
        assert_near(ours["metrics"], one["metrics"])
    else:  # ranks cut smaller micro-batches, and the gradient of each is rounded
        assert distance(ours["weights"], one["weights"]) < 2e-3
    for rank in range(job.size):
        assert_same(found(job, rank)["weights"], ours["weights"])
        assert found(job, rank)["metrics"] == ours["metrics"]
    if "start" in ours:  # the reference starts behind it
        assert torch.equal(*ours["start"])


@pytest.mark.parametrize("job", TAUGHT_AGAIN, ids=str)
def test_supervised_training_that_was_stopped_goes_on_to_the_same_bits(job: Job, found: Found) -> None:
    ours, undisturbed = found(job), found(replace(job, source=""))
    assert_same(ours["weights"], undisturbed["weights"])
    assert ours["metrics"] == undisturbed["metrics"]


def test_adapters_of_ranks_are_those_of_one_process(found: Found, folder: Path, tmp_path: Path) -> None:
    first, ours = found(ADAPTED), found(ADAPTED_AGAIN)
    one = trainer(Case(options=ADAPTED.options), Mesh())
    assert one.load(folder / "adapted") == ours["lacking"] == []
    for weights in (ours["weights"], weights_of(one)):
        assert_same(first["weights"], weights)
    assert_near(ours["metrics"], first["metrics"])
    one.save_model(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (folder / "adapted-model" / path.name).read_bytes(), path.name
    load_policy(ModelConfig(path=str(folder / "adapted-model")))  # its base is told
    other = trainer(Case(model="tiny-qwen3", options=ADAPTED.options | {"lora": {"rank": 4}}), Mesh())
    with pytest.raises(BadInput, match="its adapters stand beside"):
        other.load(folder / "adapted")


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """Float32 values of what was trained."""
    held = sorted(whole(folder).items())
    rests = {name.removeprefix("rest/"): rest.view(-1) for name, rest in held if name.startswith("rest/")}
    weights = {name.removeprefix("weights/"): w.view(-1) for name, w in held if name.startswith("weights/")}
    return {name: master(weight, rests.get(name)) for name, weight in weights.items()}


@pytest.mark.parametrize("job", HALF, ids=str)
def test_masters_of_bfloat16_on_ranks_are_those_of_one_process(
    job: Job, found: Found, folder: Path, tmp_path: Path
) -> None:
    assert_masters(job, found, folder, tmp_path)


@pytest.mark.slow
def test_masters_of_replicas_and_trees_are_those_of_one_process(tmp_path: Path) -> None:
    of = sound([*MORE_HALF, *MORE_SCALED], tmp_path)
    for job in MORE_HALF:
        assert_masters(job, of, tmp_path, tmp_path / f"one-{job.source}")
    for job in MORE_SCALED:
        assert_scaled(job, of, tmp_path, tmp_path / f"one-{job.source}")


def assert_masters(job: Job, found: Found, folder: Path, tmp_path: Path) -> None:
    assert found(job)
    one = trainer(replace(job, **dict.fromkeys(SIZES, 1), parts=False), Mesh())
    for number in range(2):
        update(one, number)
    one.save(tmp_path)
    ours, theirs = masters(folder / job.source), masters(tmp_path)
    assert job.source == "half-adapted" or any(bool((w.bfloat16() != w).any()) for w in theirs.values())
    assert distance(ours, theirs) < 1e-5


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """What the first moments are after one update, up to a factor."""
    return {name: m for name, m in sorted(whole(folder).items()) if name.startswith("exp_avg/")}


def test_gradients_of_bfloat16_are_as_close_to_those_of_float32_as_one_process_comes(
    found: Found, folder: Path, tmp_path: Path
) -> None:
    """Ranks round elsewhere than one process does, and so come to other masters. They must not round more."""
    jobs = rounded(folder)
    one = replace(jobs[0], **dict.fromkeys(SIZES, 1), parts=False, source="one")
    for dtype in ("float32", "bfloat16"):
        once(replace(one, dtype=dtype, source=dtype), Mesh(), tmp_path)
    truth = gradients(tmp_path / "float32")
    alone = distance(gradients(tmp_path / "bfloat16"), truth)
    assert alone > 1e-3
    for job in jobs:
        assert found(job)
        assert distance(gradients(folder / job.source), truth) < 1.1 * alone, job


@pytest.mark.parametrize("job", SCALED, ids=str)
def test_float16_on_ranks_scales_its_loss_as_one_process_does(
    job: Job, found: Found, folder: Path, tmp_path: Path
) -> None:
    assert_scaled(job, found, folder, tmp_path)


def assert_scaled(job: Job, found: Found, folder: Path, tmp_path: Path) -> None:
    ours = found(job)
    one = trainer(replace(job, **dict.fromkeys(SIZES, 1), parts=False), Mesh())
    for number in range(2):
        update(one, number)
    one.save(tmp_path)
    theirs = masters(tmp_path)
    assert any(bool((w.half() != w).any()) for w in theirs.values())
    assert distance(masters(folder / job.source), theirs) < 1e-5
    metrics = [update(one, number) for number in (2, 3)]
    assert [m["optimizer/loss_scale"] for m in ours["metrics"]] == [m["optimizer/loss_scale"] for m in metrics]


def test_an_overflow_of_float16_leaves_an_update_out_on_all_ranks(found: Found, tmp_path: Path) -> None:
    alone = overflows(replace(OVERFLOWS, shard=1, parts=False), Mesh(), tmp_path)
    skipped = [m["optimizer/skipped"] for m in alone["metrics"]]
    assert 2 < sum(skipped) < 12
    for rank in range(2):
        ours = found(OVERFLOWS, rank)
        assert [m["optimizer/skipped"] for m in ours["metrics"]] == skipped
        assert [m["optimizer/loss_scale"] for m in ours["metrics"]] == [m["optimizer/loss_scale"] for m in alone["metrics"]]  # fmt: skip
        assert distance(ours["weights"], alone["weights"]) < 1e-3  # weights of float16, rounded


def test_float16_resumes_on_another_mesh_with_its_scale(found: Found, folder: Path) -> None:
    ours = found(SCALED_AGAIN)
    assert ours["lacking"] == []
    assert_same(whole(folder / ours["again"]), whole(folder / "scaled"))
    for a, b in zip(ours["metrics"], found(SCALED[0])["metrics"], strict=True):
        assert a["optimizer/loss_scale"] == b["optimizer/loss_scale"]


def test_masters_of_bfloat16_resume_on_another_mesh(found: Found, folder: Path) -> None:
    ours = found(HALF_AGAIN)
    assert ours["lacking"] == []
    assert_same(whole(folder / ours["again"]), whole(folder / "half"))
    assert_same(ours["weights"], found(HALF[0])["weights"])
