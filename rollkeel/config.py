"""One typed tree of settings. `recipe.py` reads it from YAML and overrides; the resolved tree is saved with every run.

Importing this module costs no torch import.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollkeel.config_cluster import ClusterConfig, MemoryConfig, MeshConfig, SyncConfig
from rollkeel.config_data import DataConfig, EvalSet, Node
from rollkeel.config_train import LoraConfig, OrOff, Recompute, TrainConfig
from rollkeel.plugins import OrOwn
from rollkeel.yaml_numbers import dump_yaml, parse_yaml

__all__ = ["Config", "DataConfig", "LoraConfig", "Node", "Recompute", "TrainConfig", "parse_yaml"]


_PARKED = "SGLang's client never ran against a live server and is kept on the branch parked-sglang"


class RunConfig(Node):
    """What to run and where it is written."""

    dir: str | None = None
    """Run folder; None makes `runs/<recipe name>-<time>`."""
    name: str = Field(default="run", description="Part of the default folder's name, and the trackers'.")
    seed: int = Field(default=0, ge=0, description="Of prompts, sampling, shuffles and evaluation draws.")
    steps: int = Field(default=150, ge=0)
    """RL steps; 0 stops after SFT."""
    loop: Annotated[str, OrOwn("sync", "budgeted", "async")] = "sync"
    """`sync` waits for every rollout of a step, `budgeted` is C3PO++: see `rollout.budget`, `async` samples while it trains:
    see `rollout.overlap`. Your own feed is `path/file.py:name`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and embedded engine compute; `auto` takes a GPU if there is one and the model has 20 million parameters or more."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the trainer process; worker processes of the engine share as many."""
    tf32: bool = False
    """Whether a GPU multiplies float32 matrices in TF32: several times as fast, with 10 bits of mantissa, on both sides."""
    parity: bool = False
    """Engine and trainer share one fixed-order arithmetic, so that ρ of fresh tokens is exactly 1: see docs/parity.md."""


class ModelConfig(Node):
    """Policy to train: `preset:<name>` or a Hugging Face folder or id."""

    path: str = Field(default="preset:tiny-qwen3-moe", description="`preset:<name>`, a Hugging Face folder, or an id.")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the trainer's weights and arithmetic; a lower one keeps exact float32 masters, and `float16` scales its loss."""
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Preset architecture fields to change, for example `{num_hidden_layers: 4}`."""
    context: int | None = Field(default=None, ge=2)
    """Longest sequence, tokens; beyond the model's own, YaRN (Peng et al. 2023) extends its rotary embedding by that factor, for
    training, the embedded engine and the server alike. None takes the model's own."""


class SftConfig(Node):
    """Supervised warm start on gold answers, loss on responses only, packed. `ROLLKEEL_CACHE` in the environment says where
    warm starts are kept; without it that is `~/.cache/rollkeel`."""

    steps: int = Field(default=160, ge=0, description="Optimizer steps before RL; 0 is no warm start.")
    epochs: int = Field(default=0, ge=0)
    """Passes over the rows of file data, in the place of `steps`; 0 counts `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Examples per optimizer step."""
    batch_tokens: int = Field(default=0, ge=0)
    """Prompt + response tokens per optimizer step, in the place of `batch_size`: as many whole examples as fit, at least one."""
    lr: float = Field(default=5e-3, gt=0, description="Highest learning rate.")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a share of `lr`; 0 takes it to zero."""
    warmup_steps: int = Field(default=10, ge=0, description="Optimizer steps of linear warm-up.")

    @property
    def on(self) -> bool:
        return bool(self.steps or self.epochs)


class ServerConfig(Node):
    """The inference server behind `engine.kind=vllm`: one that is started here, or one that runs already."""

    url: str | None = None
    """Address of a running server, which is never started, restarted or ended; None starts one."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further command line options of the server, `name: value`; they win over rollkeel's."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest median of |engine − trainer| log-prob over the probes that follow every publication; None takes what the engine's
    dtype allows."""


class EngineConfig(Node):
    """What samples. The numeric mode is independent of the trainer's."""

    kind: Annotated[str, OrOwn("local", "vllm", sglang=_PARKED)] = "local"
    """`local` is the embedded engine, `vllm` a server (see `server`), for which `forward` and `processes` have no meaning."""
    kv: Literal["recompute", "keep"] = "recompute"
    """KV of sequences that new weights find unfinished: computed again under them, or kept as older weights computed it."""
    dtype: Literal["fp32", "bf16", "fp16", "fp8", "fp8_weights", "int8", "int4"] = "fp32"
    """`fp8` is weights and activations, `fp8_weights`/`int8`/`int4` weights only; router, norms, embeddings and head stay high precision."""
    processes: int = Field(default=0, ge=0)
    """Worker processes; 0 samples in this process."""
    slots: int = Field(default=128, ge=1)
    """Sequences decoded together, per process."""
    max_length: int | None = None
    """Longest prompt + response, tokens, at most the model's context; None takes that context, or what the KV memory holds of it."""
    kv_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory for the KV cache, per process; when it runs out the youngest sequence waits and is recomputed. None takes 4 on
    a CPU, and on a GPU four fifths of what the run leaves of it, see docs/memory.md."""
    forward: Literal["auto", "fast", "compiled", "transformers", "parity"] = "auto"
    """`fast` is rollkeel's own inference forward (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), `compiled` the same with compiled
    decode steps (float32 on a CPU, extra `cpu`, compiled once), `transformers` fits the rest; `auto` takes the fastest that fits; `parity` belongs to
    `run.parity`, which sets it."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest silence before the engine counts as hung. A server has half of it to start, and is killed and started again after
    a fifth of it without a token."""
    server: ServerConfig = ServerConfig()


class SamplingConfig(Node):
    temperature: float = Field(default=1.0, ge=0, description="Divides the logits; 0 is greedy, for evaluation only.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest tokens that hold this probability."""
    top_k: int = Field(default=0, ge=0, description="Sample from so many most likely tokens; 0 is no limit.")
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Leave out tokens below this share of the most likely one's probability."""
    max_new_tokens: int = Field(default=16, ge=1, description="Most tokens of a response.")


class BudgetConfig(Node):
    """C3PO++ (Ring-1T report §2.3.3): a step's rollouts end with Φ tokens; what is unfinished goes on in the next. `engine.kv` says
    what becomes of the KV of parked rollouts."""

    tokens: int = Field(default=1024, ge=1)
    """Φ: tokens that end a step's rollouts. An engine on a GPU is asked every 16 decode steps what has finished."""
    capacity: int = Field(default=128, ge=1, description="Ω_infer: rollouts in the engine at once.")
    train_capacity: int = Field(default=0, ge=0, description="Ω_train: most rollouts in a batch; 0 is no limit.")
    retention: int = Field(default=3, ge=0)
    """σ: an unfinished rollout that was parked more often is given up."""
    count: Literal["finished", "generated"] = "finished"
    """What Φ counts: whole rollouts as they finish (Algorithm 1), or every token when it is generated."""
    group: Literal["wait", "partial"] = "wait"
    """`wait` for whole groups, or train `partial` ones with a leave-one-out baseline over what is there."""


class OverlapConfig(Node):
    """With `run.loop=async`: how far sampling may run ahead of training."""

    max_staleness: int = Field(default=4, ge=0)
    """Most optimizer updates between the weights that sampled a token and those that begin the step that trains on it.
    Sampling runs `max_staleness // train.updates_per_step` whole steps ahead; 0 of them is no overlap."""


class EnvironmentConfig(Node):
    """Of tasks that are played turn by turn (docs/environments.md); `sampling.max_new_tokens` is for all turns together."""

    turn_tokens: int = Field(default=0, ge=0)
    """Most tokens of one turn; 0 is no limit."""


class RolloutConfig(Node):
    prompts: int = Field(default=16, ge=1)
    """Prompts (groups) per step."""
    samples: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    zero_variance: Literal["keep", "drop", "refill"] | Annotated[int, Field(ge=1)] = "keep"
    """Groups whose rewards are all equal: `keep` them, `drop` them from the batch, or `refill` it with further prompts until
    `prompts` groups have rewards that differ (DAPO's dynamic sampling), in at most 4 rounds; a number is `refill` with that many.
    With `run.loop=budgeted`, what equal groups took of the budget is spent again."""
    routing: Annotated[Literal["off", "record", "replay"], OrOff] = "record"
    """Experts each token was routed to: `record` them where engine and model can, for `routing/flip_rate`, or `replay` them in
    training as well (rollout routing replay, Ma et al. 2025)."""
    failure_budget: float = Field(default=0.05, ge=0, le=1)
    """Share of a step's rollouts that may fail in engine or grader before the run stops."""
    budget: BudgetConfig = BudgetConfig()
    """With `run.loop=budgeted`, in the place of `prompts`."""
    overlap: OverlapConfig = OverlapConfig()
    """With `run.loop=async`."""
    environment: EnvironmentConfig = EnvironmentConfig()


class OverlongConfig(Node):
    """Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13)."""

    buffer: int = Field(default=0, ge=0)
    """Tokens before `sampling.max_new_tokens` over which 0 to 1 is taken off the reward; 0 is off."""


class GradersConfig(Node):
    """What graders may take and where they run, see `docs/rewards.md`."""

    workers: int = Field(default=2, ge=1)
    """Processes for graders that are not trusted to return (`math`), and jobs in the sandbox at one time."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Of one grading in a worker; jobs in the sandbox have their own limits. A step of an environment that takes 6 times it is
    given up, and a step waits 90 times it for any one grading before the run stops and names it."""
    sandbox: str = "local"
    """Where `code` runs: `local`, or the address of a `rollkeel-sandbox serve`, whose token is in `ROLLKEEL_SANDBOX_TOKEN`."""
    sandbox_level: Literal["restricted", "namespaces", "full"] = "namespaces"
    """Isolation below which nothing is run; every grading is then a failure."""


class RewardConfig(Node):
    """How rewards come about, and what is added to them before they become advantages. `reward/mean` stays the grader's."""

    overlong: OverlongConfig = OverlongConfig()
    graders: GradersConfig = GradersConfig()


class ObjectiveConfig(BaseModel):
    """`{name: kpop, phi: 0.1}`: every other key is an option of that recipe, checked by the recipe itself."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = "kpop"
    """A recipe (`rollkeel objectives list`), `composed`, or your own `file.py:function`."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class AdvantageConfig(Node):
    name: Annotated[str, OrOwn("grpo", "dr_grpo", "rloo", "batch_std", "reinforce_plus_plus", "maxrl", "opo", "gpg", "grpo_passk", "pass@2", "pass@4", "pass@8", "reinforce_plus_plus_tokens", "reinforce_plus_plus_no_baseline")] | None = None  # fmt: skip
    """How rewards become credit; None takes the objective's own."""


class EvalConfig(Node):
    every: int = Field(default=25, ge=0)
    """Steps between evaluations; 0 evaluates only at start and end."""
    items: int = Field(default=128, ge=1, description="Held-out items.")
    samples: int = Field(default=4, ge=1)
    """k of avg@k, at the training temperature."""
    greedy: bool = True
    """Also score one greedy answer per item."""
    sets: tuple[EvalSet, ...] = ()
    """Further evaluations, `{benchmark, source, task or path, name, every, sampling, samples, items}` each: see docs/evaluation.md."""


class CheckpointConfig(Node):
    every: int = Field(default=25, ge=0)
    """Steps between checkpoints; 0 saves only at the end and on Ctrl-C, and only what a resume needs: weights and moments, without the
    model in Hugging Face format beside them."""
    keep: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")


class ReportConfig(Node):
    samples: int = Field(default=4, ge=0)
    """Rollouts shown token by token."""
    rollouts: bool = True
    """Write every step's rollouts to parquet."""
    trackers: tuple[Annotated[str, OrOwn("tensorboard", "trackio", "wandb")], ...] = ()
    """Also log every step's numbers there, and with every evaluation `samples` rollouts as text."""


class AlarmConfig(Node):
    """Early warning from several metrics together, see `rollkeel/record/alarms.py`."""

    on_alarm: Annotated[Literal["off", "warn", "checkpoint", "stop"], OrOff] = "warn"
    """`warn` says it, `checkpoint` saves the state as well, `stop` ends the run behind that (exit code 3)."""
    on_impossible: Literal["stop", "warn"] = "stop"
    """What numbers that no sound step has (log-probs of the same weights that differ, a batch that comes twice) do before the update:
    `stop` ends the run with its weights as they were (exit code 3), `warn` says it and trains."""


class TraceConfig(Node):
    """Tensors of the trainer on the first two rollouts of a step, for `rollkeel analyze`: `tensors/step_000012.safetensors`. Metrics
    and tokens are `report`'s."""

    tensors_every: int = Field(default=0, ge=0)
    """Steps between recordings; 0 records none."""
    layers: tuple[int, ...] = ()
    """Record these layers only; empty is all of them."""


class ExperimentConfig(Node):
    """What only experiments and controls change."""

    lag: int = Field(default=0, ge=0)
    """Steps between sampling a batch and training on it (with `run.loop=sync`); staleness is exactly that."""
    schedule: str | None = None
    """With `run.loop=async`: the `schedule.jsonl` of another run of this config, to be replayed bit for bit."""
    label_noise: float = Field(default=0.07, ge=0, le=1)
    """Share of the warm start's demonstration steps made wrong on purpose (tasks that support it), so that RL has entropy left."""
    advantages: Literal["all", "negative", "positive", "shuffled"] = "all"
    """`negative`, `positive`: those of the other sign become 0, and their tokens still count in denominators. `shuffled` permutes
    them over the batch's rollouts, so that nothing can be learnt."""
    rounding: Literal["none", "fp8_weights", "int8", "int4"] = "none"
    """The trainer computes with weights rounded as an engine of this dtype rounds them; gradients go straight through to the exact
    weights, which are what is published and saved. With the same `engine.dtype` both sides compute one function: ρ = 1."""


class Config(Node):
    """The whole tree. Section defaults are the default recipe."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    advantages: AdvantageConfig = AdvantageConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    alarms: AlarmConfig = AlarmConfig()
    trace: TraceConfig = TraceConfig()
    sync: SyncConfig = SyncConfig()
    experiment: ExperimentConfig = ExperimentConfig()
    cluster: ClusterConfig = ClusterConfig()
    memory: MemoryConfig = MemoryConfig()

    @property
    def clustered(self) -> bool:
        """Whether trainer and engines are actors of a Ray cluster, and not this process."""
        return self.cluster.asked or self.train.mesh.size > 1

    @property
    def mesh(self) -> MeshConfig:
        """`train.mesh`, or the shards that `cluster.trainers` asks for."""
        mesh, asked = self.train.mesh, self.cluster.trainers
        return mesh if asked is None or mesh.size > 1 else MeshConfig(shard=asked)

    @property
    def silence_s(self) -> float:
        """Longest silence of the engine: where it replaces parts of itself, each with a deadline of its own, that takes as long."""
        deadline_s = self.engine.deadline_s
        return deadline_s * (1 + (3 * self.cluster.restarts if self.clustered else 0))

    def to_yaml(self) -> str:
        """The tree as YAML that `load` reads back to an equal tree."""
        return dump_yaml(self.model_dump(mode="json"))
