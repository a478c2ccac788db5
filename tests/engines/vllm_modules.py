"""Stand-ins of vLLM's layers with its names and sizes, loaded as its loaders load: each rank its rows or columns, fused ones behind each other.

Written from vLLM 0.32's description of its layers, on their own: nothing here is used by the map that is tested with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PADDING = 64
"""Rows that a vocabulary is padded to a multiple of."""


class UnquantizedLinearMethod: ...


class UnquantizedEmbeddingMethod: ...


class UnquantizedFusedMoEMethod:
    def __init__(self, kernel: Any) -> None:
        self.moe_kernel = SimpleNamespace(fused_experts=kernel)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = parameter(size)


class LinearBase(nn.Module):
    def __init__(self, rows: int, columns: int, rank: int, ranks: int, bias: bool = False) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, ranks
        self.input_size, self.output_size = columns, rows
        self.quant_method: Any = UnquantizedLinearMethod()
        self.make(bias)

    def make(self, bias: bool) -> None:
        raise NotImplementedError

    def allocate(self, sizes: list[int], columns: int, bias: bool) -> None:
        self.output_partition_sizes, self.input_size_per_partition = sizes, columns
        self.weight = parameter(sum(sizes), columns)
        self.bias = parameter(sum(sizes)) if bias else None


class ReplicatedLinear(LinearBase):
    def make(self, bias: bool) -> None:
        self.allocate([self.output_size], self.input_size, bias)


class ColumnParallelLinear(LinearBase):
    def make(self, bias: bool) -> None:
        sizes = getattr(self, "output_sizes", [self.output_size])
        self.allocate([n // self.tp_size for n in sizes], self.input_size, bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, columns: int, sizes: list[int], rank: int, ranks: int) -> None:
        self.__dict__["output_sizes"] = sizes
        super().__init__(sum(sizes), columns, rank, ranks)


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(self, columns: int, head: int, heads: int, kv_heads: int, rank: int, ranks: int, bias: bool) -> None:
        own = self.__dict__
        own["head_size"] = own["v_head_size"] = head
        own["total_num_heads"], own["total_num_kv_heads"], own["num_heads"] = heads, kv_heads, heads // ranks
        own["num_kv_heads"] = max(1, kv_heads // ranks)
        own["num_kv_head_replicas"] = max(1, ranks // kv_heads)
        own["output_sizes"] = [n * head * ranks for n in (own["num_heads"], *[own["num_kv_heads"]] * 2)]
        super().__init__(sum(own["output_sizes"]), columns, rank, ranks, bias)


class RowParallelLinear(LinearBase):
    def make(self, bias: bool) -> None:
        self.allocate([self.output_size], self.input_size // self.tp_size, bias)


class VocabParallelEmbedding(nn.Module):
    def __init__(self, words: int, width: int, rank: int, ranks: int) -> None:
        super().__init__()
        padded = -(-words // PADDING) * PADDING // ranks
        first, end = min(rank * padded, words), min((rank + 1) * padded, words)
        self.org_vocab_size, self.num_added_embeddings = words, 0
        self.shard_indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.weight = parameter(padded, width)


class ParallelLMHead(VocabParallelEmbedding): ...


class RoutedExperts(nn.Module):
    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"

    def __init__(self, count: int, width: int, inner: int, rank: int, ranks: int, spread: bool, kernel: Any) -> None:
        """`spread`: experts are dealt over ranks, and none is cut."""
        super().__init__()
        here = range(count)
        self._expert_map = None
        if spread:
            here = range(rank * count // ranks, (rank + 1) * count // ranks)
            self._expert_map = torch.tensor([e - here.start if e in here else -1 for e in range(count)])
            rank, ranks = 0, 1
        each = inner // ranks
        self.global_num_experts = count
        self.moe_config = SimpleNamespace(
            intermediate_size_per_partition_unpadded=each, hidden_dim_unpadded=width, tp_rank=rank, tp_size=ranks
        )
        self.quant_method = UnquantizedFusedMoEMethod(kernel)
        self.w13_weight = parameter(len(here), 2 * each, width)
        self.w2_weight = parameter(len(here), width, each)


class Sizes(SimpleNamespace):
    """Of a small model: width, head, heads, kv_heads, inner, experts (0: dense), words, tied, bias."""


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)


def model(s: Sizes, rank: int, ranks: int, spread: bool = False, kernel: Any = None) -> nn.Module:
    """A layer of a model as one rank of a server has it, its weights not loaded."""
    root, body, layer, attention, mlp = (nn.Module() for _ in range(5))
    attention.qkv_proj = QKVParallelLinear(s.width, s.head, s.heads, s.kv_heads, rank, ranks, s.bias)
    attention.o_proj = RowParallelLinear(s.width, s.heads * s.head, rank, ranks, s.bias)
    attention.q_norm = RMSNorm(s.head)
    if s.experts:
        mlp.gate, mlp.experts = ReplicatedLinear(s.experts, s.width, 0, 1), nn.Module()
        mlp.experts.gate = mlp.gate  # as vLLM's runner has it
        mlp.experts.routed_experts = RoutedExperts(s.experts, s.width, s.inner, rank, ranks, spread, kernel)
    else:
        mlp.gate_up_proj = MergedColumnParallelLinear(s.width, [s.inner, s.inner], rank, ranks)
        mlp.down_proj = RowParallelLinear(s.width, s.inner, rank, ranks)
    layer.self_attn, layer.mlp, layer.input_layernorm = attention, mlp, RMSNorm(s.width)
    body.embed_tokens = VocabParallelEmbedding(s.words, s.width, rank, ranks)
    body.layers, body.norm = nn.ModuleList([layer]), RMSNorm(s.width)
    root.model, root.lm_head = body, ParallelLMHead(s.words, s.width, rank, ranks)
    if s.tied:
        root.lm_head.weight = body.embed_tokens.weight
    root.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # type: ignore[assignment]
    return root


def checkpoint(s: Sizes, seed: int) -> dict[str, torch.Tensor]:
    """Weights of such a model, by checkpoint name."""
    at, draw = "model.layers.0", torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.self_attn.q_proj.weight": (s.heads * s.head, s.width),
        f"{at}.self_attn.k_proj.weight": (s.kv_heads * s.head, s.width),
        f"{at}.self_attn.v_proj.weight": (s.kv_heads * s.head, s.width),
        f"{at}.self_attn.o_proj.weight": (s.width, s.heads * s.head),
        f"{at}.self_attn.q_norm.weight": (s.head,),
        f"{at}.input_layernorm.weight": (s.width,),
        "model.embed_tokens.weight": (s.words, s.width),
        "model.norm.weight": (s.width,),
    }
    if s.bias:
        shapes |= {f"{at}.self_attn.{n}_proj.bias": shapes[f"{at}.self_attn.{n}_proj.weight"][:1] for n in "qkvo"}
    if s.experts:
        shapes[f"{at}.mlp.gate.weight"] = (s.experts, s.width)
    for part in [f".experts.{e}" for e in range(s.experts)] or [""]:
        shapes |= {f"{at}.mlp{part}.{n}_proj.weight": (s.inner, s.width) for n in ("gate", "up")}
        shapes[f"{at}.mlp{part}.down_proj.weight"] = (s.width, s.inner)
    if not s.tied:
        shapes["lm_head.weight"] = (s.words, s.width)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def load(root: nn.Module, weights: Mapping[str, torch.Tensor], pack: Any = None) -> None:
    """Fill the model as vLLM's loaders do; `pack`: what the experts' kernel then makes of them."""
    for path, module in root.named_modules():
        for name, place in _places(path, module, weights):
            place.copy_(weights[name] if place.shape == weights[name].shape else _mine(module, name, weights[name]))
        if isinstance(module, VocabParallelEmbedding):
            held = module.shard_indices
            module.weight[held.org_vocab_end_index - held.org_vocab_start_index :].zero_()
        if isinstance(module, RoutedExperts) and pack is not None:
            module.w13_weight.copy_(pack(module.w13_weight.data))
            module.w2_weight.copy_(pack(module.w2_weight.data))


def _places(path: str, module: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Where each checkpoint tensor goes, in rows of the module's weights."""
    above, _, last = path.rpartition(".")
    ends = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
    if isinstance(module, RoutedExperts):
        for e in range(module.global_num_experts):
            at = e if module._expert_map is None else int(module._expert_map[e])
            if at >= 0:
                gate, up = module.w13_weight[at].chunk(2)
                base = f"{above}.{e}"
                yield f"{base}.gate_proj.weight", gate
                yield f"{base}.up_proj.weight", up
                yield f"{base}.down_proj.weight", module.w2_weight[at]
        return
    sized: Any = module
    for kind in ("weight", "bias"):
        whole = getattr(module, kind, None)
        if whole is None or (last == "lm_head" and "lm_head.weight" not in weights):
            continue
        if isinstance(module, VocabParallelEmbedding):
            held = module.shard_indices
            whole = whole[: held.org_vocab_end_index - held.org_vocab_start_index]
        sizes = [len(whole)]
        if isinstance(module, QKVParallelLinear):
            kv = sized.num_kv_heads * sized.head_size
            sizes = [sized.num_heads * sized.head_size, kv, kv]
        elif isinstance(module, MergedColumnParallelLinear):
            sizes = module.output_partition_sizes
        for end, part in zip(ends, whole.split(sizes), strict=True):
            yield f"{above}.{end}.{kind}" if above else f"{end}.{kind}", part


def _mine(module: Any, name: str, whole: torch.Tensor) -> torch.Tensor:
    """The rows or columns of this rank."""
    if isinstance(module, VocabParallelEmbedding):
        return whole[module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index]
    if isinstance(module, RoutedExperts):
        about = module.moe_config
        return whole.chunk(about.tp_size, dim=1 if "down_proj" in name else 0)[about.tp_rank]
    if isinstance(module, RowParallelLinear):
        return whole.chunk(module.tp_size, dim=1)[module.tp_rank]
    if isinstance(module, QKVParallelLinear) and ("k_proj" in name or "v_proj" in name):
        own: Any = module
        return whole.split(own.num_kv_heads * own.head_size)[own.tp_rank // own.num_kv_head_replicas]
    return whole.chunk(module.tp_size)[module.tp_rank]
