"""docs/memory.md: `python -m rollkeel.memory.table > docs/memory.md`."""

from __future__ import annotations

from rollkeel.config import LoraConfig
from rollkeel.memory.advice import most_tokens
from rollkeel.memory.plan import DEVICES, GB, RESERVED, layer_bytes, plan, with_values
from rollkeel.memory.residency import PHASES, RULES, place
from rollkeel.memory.shapes import shape_of
from rollkeel.recipe import load

MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B")
SETTINGS = (
    "model.dtype=bfloat16",
    "engine.dtype=bf16",
    "engine.slots=64",
    "engine.max_length=8192",
    "engine.kv_memory_gb=8",
    "sampling.max_new_tokens=4096",
    "train.checkpointing=layer",
    "train.micro_batch_tokens=8192",
)
RANK = 32
COLUMNS = {
    "weights": ("weights", "master remainder"),
    "gradients": ("gradients",),
    "moments": ("moments",),
    "passes": ("activations", "backward"),
    "engine": ("engine's weights", "KV blocks", "engine's buffers"),
}
HEAD = f"""# Memory

`rollkeel plan RECIPE [KEY=VALUE]... --device h100|h200|a100|cpu` computes what a run takes before anything is built, and what to
change if it does not fit (exit code 1). It knows presets, folders with a `config.json`, and a few public models by name.

**The table is computed.** On one H200 updates of one micro-batch of 16,384 tokens took 32.4 GB (0.6B, everything kept), 58.8 (1.7B,
everything kept), 29.5 (1.7B, `layer`) and 67.2 (4B, `layer`); the plan of their trainer's part is 35.4, 67.0, 36.0 and 74.6. It counts updates of
several micro-batches, in which gradients of the first lie beside activations of the next; without gradients the first three are within 3 %.
What is tested beside: sums of the trainer's parts are within 10 % of the peak that
torch's allocator sees in real updates on a CPU, for three presets with every `train.checkpointing`; the weights that
trainer and engine hold, once or twice, are within 2 % of what it gives out; activations of transformers' modules in bfloat16 are
within 1 % of what autograd keeps on the meta device. Not counted: a vLLM server, which takes what is left ([engines](engines.md)), models of graders, the embedded engine's scores of a long prompt, and {RESERVED:.0%} of a GPU, which are set aside.

**Some layers again.** With `train.checkpointing` the backward computes layers again, a quarter of an update's work, and it need not be all of
them: `train.checkpointed_layers=N` is the first N, whose inputs alone are kept. The others are computed once; what they keep is gone when the first
of the N is computed again. The last line of a plan names the fewest with which the run fits; where the cache takes what is left (`engine.kv_memory_gb=null`), half of that stays
for it. Bits are the same with every N.

**One copy of the weights.** Where the embedded engine lies in the trainer's process and `engine.dtype` is exactly `model.dtype` (fp32
and float32, bf16 and bfloat16, fp16 and float16), the trainer's parameters are views of the engine's fused tensors. Publication then
copies nothing, and "engine's weights" are 0, or with LoRA its own adapters. A run says which it is (`weights once`, `weights twice`
with the reason; event `weights` in `events.jsonl`). The rule is `rollkeel/sync/shared.py`: a server, `engine.processes`, rounding modes,
`train.processes` above 1 and `experiment.rounding` keep two. While such a run is opened on a GPU its weights wait in host memory, so that
they never lie there twice.

**KV on a GPU.** Plans count `engine.kv_memory_gb`, or 4 where it is null. A run takes four fifths of what its own plan leaves of the card then, with prompts
as long as `engine.max_length` allows, or of 4,096 tokens; where prompts are longer than that, or graders have models on the same card, set one of the two.

**The last publication.** `sync.kind=delta` and `auto` keep the weights as they were served last, and up to a quarter of their bytes
of deltas, in host memory. `--device cpu` counts them ("last publication"); beside a GPU they are in no sum.

**Over a cluster** (`rollkeel plan RECIPE cluster.trainers=8`, or a `train.mesh`) the parts are those of the fullest rank and of one engine
([cluster](cluster.md)). Each must fit a device; with `cluster.placement=colocated` both together must. "of other ranks" are embeddings,
head and two layers that shards bring in for a pass, and gradients of one layer; "messages" are gradients and weights on their way. If it
does not fit, the last line names the fewest shards with which it does. Tested: weights, gradients and moments are what ranks hold,
to the byte, on eight meshes; with the passes they are at most 5 % below and 15 % above the peak that a watcher of allocations sees, on nine.

`train.lora` counts as the config says it; `--lora RANK` is rank RANK on every projection, experts too.

GB, with `{" ".join(SETTINGS[:4])}
{" ".join(SETTINGS[4:])}` and prompts of 512 tokens. LoRA: rank {RANK} on every projection, experts too. "int8 moments":
`train.moments=int8`. The last two columns are the largest `train.micro_batch_tokens` that fits.
"""

MOVES = """## What leaves the device while others compute

`memory.offload` is for trainer and engine that share a device and take turns: one process, and `cluster.placement=colocated`. The table is
what `memory.offload=all` does, from `rollkeel/memory/residency.py`; `optimizer` moves what its column says and leaves the rest where it
is; `auto` takes the least of `none`, `optimizer` and `all` whose largest phase fits the device. `rollkeel plan RECIPE memory.offload=all`
counts the largest phase in the place of the sum.
"""
MOVED = """* **Where to.** From a GPU to pinned host memory, on a stream of its own. On a CPU to a file without a name in the run folder, whose pages take
  the place of the tensors' own pages at the same addresses: the process holds them no more, the kernel keeps the file in memory as long as
  nobody needs the room, and then on disk. The folder must not lie on a file system that is memory itself (tmpfs).
* **When.** What leaves is on its way while the next phase begins. Weights and reference model are back before they are used; moments and
  masters come back while the first passes of an update run, and the optimizer waits for them. Nothing is kept twice behind a move, but that torch keeps pinned host memory for
  the next one: beside a GPU the host needs as much as leaves it, all the time.
* **Dropped.** KV is computed again, or belongs to unfinished rollouts, which take it along (`engine.kv=keep`). On a GPU decode steps are recorded
  anew behind it, unless the package `torch_memory_saver` is installed, under which addresses stay (it has not run). The engine's weights come with
  the next publication. A vLLM server sleeps at level 2 ([engines](engines.md)) and may take what training gives away. NCCL communicators
  give their buffers away where torch offers it (NCCL 2.29).
* **What stays.** Weights that trainer and engine share; an engine's weights where adapters or deltas come on top of them; engines in worker processes.
* **Checkpoints** read moments and reference from where they wait. A resumed run has the bits of the undisturbed one, and a run that moves
  those of one that does not.
* **If it fails** (no room for the file, no memory on the way back), everything is where it was, and the run stops with the reason.
* **What it did.** `metrics.jsonl` has bytes and seconds of each phase (`memory/<phase>/…`), `report.html` puts plan and measurement side by side.

Tested: bits of runs, on a CPU and on a device that only pretends to be another one; on one H200 a run with `memory.offload=all`; resident memory of
CPU processes. `python -m benchmarks.residency` measures a colocated run.
"""


def moves() -> str:
    """The section about `memory.offload`."""
    said = {"device": "device", "host": "host", "dropped": "–"}
    lines = [["component", "leaves with", *PHASES], ["---"] * (2 + len(PHASES))]
    for name, rule in RULES.items():
        level = {"none": "always"}.get(rule.level, f"`{rule.level}`")
        lines.append([name, level, *(said[place(name, phase, "all")] for phase in PHASES)])
    return "\n".join([MOVES, *(f"| {' | '.join(cells)} |" for cells in lines), "", MOVED])


def per_parameter() -> str:
    """Bytes that training holds of a weight, by dtype and moments."""
    lines = [["model.dtype", "train.moments", "weight", "remainder", "gradient", "moments", "together"], ["---"] * 7]
    shape = shape_of("Qwen/Qwen3-4B", {})
    for dtype in ("float32", "bfloat16", "float16"):
        for moments in ("float32", "int8"):
            words = [f"model.dtype={dtype}", f"train.moments={moments}", "engine.dtype=fp8"]
            parts = plan(load(None, words), shape).parts
            found = [parts[name] / shape.parameters for name in ("weights", "master remainder", "gradients", "moments")]
            lines.append([f"`{dtype}`", f"`{moments}`", *(f"{size:.4g}" for size in (*found, sum(found)))])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rows() -> list[list[str]]:
    out = []
    for model in MODELS:
        config = load(None, [f"model.path=Qwen/{model}", *SETTINGS])
        shape = shape_of(config.model.path, {})
        for trained, lora, moments in (
            ("all", 0, "float32"),
            ("all, int8 moments", 0, "int8"),
            ("LoRA", RANK, "float32"),
        ):
            config = with_values(config, "train", lora=LoraConfig(rank=lora, experts=True), moments=moments)
            made = plan(config, shape)
            sums = [sum(made.parts[name] for name in names) for names in COLUMNS.values()]
            most = [most_tokens(config, shape, int(DEVICES[d] * (1 - RESERVED))) for d in ("h100", "h200")]
            cells = [f"{count / GB:.1f}" for count in (*sums, made.total)]
            out.append([model, trained, *cells, *(f"{n:,}" if n else "does not fit" for n in most)])
    return out


def markdown() -> str:
    """The page."""
    lines = [["model", "trained", *COLUMNS, "together", "on 80 GB", "on 141 GB"], ["---"] * 10, *rows()]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    shape = shape_of("Qwen/Qwen3-4B", {})
    kept = [shape.layers * layer_bytes(shape, 2, "gpu"), shape.layers * shape.width * 2]
    last = f"Activations of Qwen3-4B in bfloat16, bytes per token: {kept[0]:,} with `none`, {kept[1]:,} with `layer`."
    each = f"Bytes of a weight that is trained:\n\n{per_parameter()}"
    return f"{HEAD}\n{table}\n\n{last}\n\n{each}\n\n{moves()}"


if __name__ == "__main__":
    print(markdown(), end="")
