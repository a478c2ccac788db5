"""The section of settings about the trainer. Importing it costs no torch import."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from rollkeel.config_cluster import MeshConfig
from rollkeel.config_data import Node

OrOff = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads an unquoted `off` as false."""
OrRouter = BeforeValidator(lambda value: "router" if value is True else value)
Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Node):
    """Adapters beside frozen weights: y = xW + (alpha / rank)(xA)B (Hu et al., arXiv:2106.09685), for the embedded engine. They alone are
    trained, published, checkpointed and saved, in PEFT's format."""

    rank: int = Field(default=0, ge=0)
    """Columns of A, rows of B; 0 trains the weights themselves."""
    alpha: float = Field(default=32.0, gt=0, description="The adapters' share is scaled by alpha / rank.")
    targets: tuple[str, ...] = ()
    """Linear layers inside the model's layers that get adapters, by the end of their names (`q_proj`); empty is all but routers."""
    experts: bool = False
    """Adapters of its own for every routed expert; without them experts stay as they are."""


class Recompute(NamedTuple):
    """What the backward of a model computes again."""

    mode: str = "none"
    """`train.checkpointing`."""
    layers: int | None = None
    """Of how many decoder layers, from the first one on; None is all."""

    def of(self, count: int) -> int:
        """Of how many of `count` layers."""
        return 0 if self.mode == "none" else count if self.layers is None else min(count, self.layers)


class TrainConfig(Node):
    lr: float = Field(default=3e-4, gt=0, description="Highest learning rate.")
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer updates of linear warm-up."""
    schedule: Literal["constant", "cosine"] = Field(default="constant", description="Learning rate behind the warm-up.")
    moments: Literal["float32", "int8"] = "float32"
    """Numbers of AdamW's two moments: 8 bytes a parameter together, or 2."""
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW's decay rates of both moments.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's, decoupled, of the warm start as well.")
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down."""
    updates_per_step: int = Field(default=4, ge=1)
    """Optimizer updates per batch of rollouts; the batch is split by whole groups."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Prompt + response tokens per forward pass: whole sequences, and one longer than this is alone. The warm start packs at least
    8192."""
    checkpointing: Literal["none", "layer", "selective"] = "none"
    """What the backward computes again, to the same bits: nothing, every decoder layer, or every layer but attention itself. Of
    Qwen3-4B in bfloat16 that keeps 3.9, 0.2 and 0.5 MB of activations per token, with transformers' modules 6.1 of them."""
    checkpointed_layers: int | None = Field(default=None, ge=0)
    """How many decoder layers `checkpointing` is for, from the first one on; null is all. What a layer outside takes is gone when a layer
    inside is computed again; `rollkeel plan` says with how few a run fits."""
    compile: bool = False
    """Run decoder layers through torch.compile, which wants a C++ compiler and a minute at the start; for models of some size."""
    processes: int = Field(default=1, ge=1)
    """Processes that run forward and backward on shared weights; CPU only."""
    reduce: Literal["sum", "tree"] = "sum"
    """How gradients of micro-batches are added: as they come, or along a binary tree over their numbers, with the same bits on 1, 2, 4, …
    ranks."""
    mesh: MeshConfig = MeshConfig()
    lora: LoraConfig = LoraConfig()
    freeze_router: Annotated[Literal["off", "bias", "router"], OrOff, OrRouter] = "off"
    """What to leave as it is of a mixture's routers: nothing, their biases (the correction of expert scores that balances load), or
    the whole `router`, which `true` means too."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """γ: weight of KL(p‖ref); above 0 keeps a frozen copy of the start model."""
    kl_every: int = Field(default=0, ge=0)
    """Without a KL term: steps between measurements of `policy/kl_base`, the KL to the start model, on half of the rollouts;
    above 0 keeps the copy as well."""
    kl_estimator: Literal["k1", "k2", "k3", "rk3", "uk3", "sk3"] = "k3"
    """Estimator of that KL: k1, k2 or k3 (Schulman 2020); the others multiply k3 by a ratio, see `rollkeel.objectives.kl`."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`reward` takes γ·Σ_t KL_t of the old policy off a rollout's reward instead (k1 is the unbiased choice there)."""
    entropy_coefficient: float = Field(default=0.0, ge=0, description="Weight of an entropy bonus.")

    @property
    def recompute(self) -> Recompute:
        """What the backward computes again."""
        return Recompute(self.checkpointing, self.checkpointed_layers)

    @property
    def keeps_reference(self) -> bool:
        """Whether the start model is kept."""
        return self.kl_coefficient > 0 or self.kl_every > 0
