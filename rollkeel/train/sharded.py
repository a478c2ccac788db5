"""The trainer's model when its parts lie on several ranks: brought in for passes, and one parameter at a time for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from rollkeel.config import Recompute, TrainConfig
from rollkeel.errors import BadInput
from rollkeel.models.adapters import parameters, peft_name
from rollkeel.models.checkpointing import decoder_layers
from rollkeel.models.loading import Policy
from rollkeel.models.lora import ADAPTER
from rollkeel.models.names import checkpoint_pieces, piece_of
from rollkeel.models.sources import Source
from rollkeel.train.expert_parallel import check_experts, send_to_experts
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh, gather_into, keep_float32, local, spread, spread_like
from rollkeel.train.parts import Box, Deal, boxes, part_shape
from rollkeel.train.tree import Tree, reduce_scatter

Pieces = Sequence[tuple[str, str, torch.Tensor]]
"""Checkpoint name, the parameter's, and which piece of it that is."""


def check_ranks(mesh: Mesh, config: TrainConfig, policy: Policy, rounding: str, parity: bool) -> None:
    """Raises `BadInput` for what does not run on several ranks yet."""
    dtypes = {p.dtype for name, p in policy.model.named_parameters() if ADAPTER not in name}
    # Partial sums of tensor ranks are rounded before they are added. In bfloat16 that adds 2 to 4 % to the error of gradients.
    rounded = (torch.bfloat16,) if mesh.over("expert", "context", "tensor") > 1 else (torch.bfloat16, torch.float16)
    asked = {
        "train.processes": config.processes > 1,
        "train.compile": config.compile,
        "train.lora": policy.lora is not None and mesh.over("expert", "tensor") > 1,
        "train.moments": config.moments == "int8",
        "run.parity": parity,
        "experiment.rounding": rounding != "none",
        "model.dtype": len(dtypes) > 1 or not dtypes <= {torch.float32, *rounded},
        "train.reduce": config.reduce == "tree" and mesh.size > mesh.over("replicate", "shard"),
    }
    if mesh.size > 1:
        for name in (name for name, there in asked.items() if there):
            raise BadInput(f"{name}: cannot be on {mesh.size} ranks yet; set its default or train.mesh to 1")
    if mesh.expert > 1:
        check_experts(policy.model, mesh)
    if mesh.tensor > 1:
        from rollkeel.train.tensor_parallel import check_tensor

        check_tensor(policy.model, mesh)
    if mesh.context > 1:
        from rollkeel.train.context_parallel import check_context

        check_context(policy.model, "", mesh)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, tied ones once."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True)
    return named | {name: b for name, b in model.named_buffers() if name in persistent}


class Layout:
    """What lies on this rank of each tensor of a model, asked while the model is whole."""

    def __init__(self, model: torch.nn.Module, mesh: Mesh) -> None:
        self.mesh = mesh
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}
        """Of the whole."""
        self.dealt = {name for name, _ in model.named_parameters()}
        """Those of them that lie in parts, if there are several ranks: parameters."""

    def boxes(self, name: str, rank: Mesh | None = None) -> list[Box]:
        """Of a buffer, all of it on every rank. `rank`: the mesh as another rank sees it."""
        return boxes((rank or self.mesh) if name in self.dealt else Mesh(), name, self.shapes[name])

    def part(self, name: str) -> tuple[int, ...]:
        """Shape of what lies here."""
        return part_shape(self.mesh if name in self.dealt else Mesh(), name, self.shapes[name])


def pieces_of(model: Any, mesh: Mesh | None = None) -> Pieces:
    """What a model's checkpoint tensors are, asked while it is whole; empty for one that stays so on `mesh`."""
    names = {id(t): name for name, t in tensors_of(model).items()}
    pieces = checkpoint_pieces(model) if mesh is None or mesh.in_step else ()
    return [(name, names[id(owner)], piece) for name, owner, piece in pieces]


class Sharded:
    """A model of which this rank keeps its part."""

    def __init__(
        self, model: torch.nn.Module, mesh: Mesh, tree: Tree | None, source: Source | None, device: torch.device
    ) -> None:
        """`source`: where the part comes from, onto `device`, if `model` has no weights yet."""
        layout, deal = Layout(model, mesh), Deal.of(model, mesh)
        deal.keep(model)
        send_to_experts(model, mesh)
        self._mesh, self._vocabulary = mesh, None
        if mesh.tensor > 1:
            from rollkeel.train.tensor_parallel import cut_layers

            self._vocabulary = cut_layers(model, mesh)
        self._root: Any = None
        if mesh.shard > 1:
            layers = [layer.module for layer in decoder_layers(model, Recompute("layer"))]
            self._root = spread(model, layers, mesh, tree and reduce_scatter(tree))
        if source is not None:
            _fill(model, layout, source, device)

    def __call__(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`call`, with the weights that it needs brought in."""
        return call(*args, **options) if self._root is None else self._root(call, *args, **options)

    def forward(self, model: Any, **how: Any) -> PolicyForward:
        """The passes of this model."""
        forward = self.once(PolicyForward, model, **how)
        forward.vocabulary = self._vocabulary
        if self._root is not None:
            forward.score = partial(self, forward.score)  # type: ignore[method-assign]
            keep_float32(self._root)
        return forward

    def settle(self) -> None:
        """Without `forward`, before the first pass with gradients. Collective."""
        if self._root is not None:
            self.once(lambda: None)
            keep_float32(self._root)

    def share(self, *forwards: PolicyForward | None) -> None:
        """Let these passes run micro-batches together with the context ranks from now on."""
        if self._mesh.context == 1:
            return
        from rollkeel.train.context_parallel import Context, check_context

        for forward in filter(None, forwards):
            check_context(forward.packed.model, forward.packed.padded, self._mesh)
            forward.share(Context(self._mesh))

    def once(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The same without gradients, and at rest behind it."""
        with torch.no_grad():
            try:
                return self(call, *args, **options)
            finally:
                self.rest()

    def rest(self) -> None:
        """Give back what belongs to no layer, which FSDP leaves whole behind a pass without gradients: parameters are parts again."""
        if self._root is not None:
            self._root.reshard()


@torch.no_grad()
def _fill(model: torch.nn.Module, layout: Layout, source: Source, device: torch.device) -> None:
    """Give the parameters of `model` their memory, and the values that `source` has for it."""
    made = dict[int, torch.nn.Parameter]()
    for name, tensor in tensors_of(model).items():
        if ADAPTER in name:
            continue  # which are drawn already
        part = torch.empty(layout.part(name), dtype=tensor.dtype, device=device) if tensor.is_meta else tensor
        source.fill(name, [(box.of_whole, box.of_part) for box in layout.boxes(name)], part)
        if tensor.is_meta:
            made[id(tensor)] = torch.nn.Parameter(spread_like(tensor, part), tensor.requires_grad)
    for module in model.modules():
        for key, p in list(module._parameters.items()):
            if p is not None and id(p) in made:
                setattr(module, key, made[id(p)])
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(device)


def gathered(model: torch.nn.Module, pieces: Pieces, deal: Deal) -> Iterator[tuple[str, torch.Tensor]]:
    """(Checkpoint name, tensor) of a sharded model: one parameter whole at a time, on every rank."""
    live = tensors_of(model)
    held = ""
    whole = torch.empty(0)
    for name, owner, piece in pieces:
        if owner != held:
            whole = torch.empty(0)
            held = owner
            part = live[owner].detach()
            whole = part if local(part) is part else _all_rows(part, deal.mesh)
            whole = deal.whole(owner, whole)
        yield name, piece_of(whole, piece)


def all_adapters(model: torch.nn.Module, deal: Deal) -> dict[str, torch.Tensor]:
    """PEFT's name → tensor, whole on every rank: in a model that is not sharded the live one."""
    named = {peft_name(name): p.detach() for name, p in parameters(model).items()}
    return {name: p if local(p) is p else _all_rows(p, deal.mesh) for name, p in named.items()}


def _all_rows(tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """A tensor whose rows are dealt to shards, whole, in memory of its own and no more."""
    part, rows = local(tensor), len(tensor)
    each = -(-rows // mesh.shard)
    out = part.new_empty(each * mesh.shard, *part.shape[1:])
    own = out[mesh.part * each :][:each]  # in place: each rank's rows stand where they belong
    own[: len(part)] = part
    gather_into(out, own, mesh.shards.get_group())
    return out[:rows]
