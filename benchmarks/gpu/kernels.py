"""Stage 1: single operations against float64, at odd shapes and on fresh inputs; a row alone must be what it is in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from benchmarks.gpu import probe
from benchmarks.gpu.bench import Bench
from rollkeel.engines.kv import PagedCache, Step
from rollkeel.models.checksum import tensor_checksum
from rollkeel.models.numerics import product
from rollkeel.train.logprobs import token_logprobs

LOW = torch.bfloat16


def run(bench: Bench) -> None:
    bench.attempt("product", products)
    if "Triton" not in bench.ways:
        bench.absent(
            "Triton kernels", "no rollkeel.models.gpu" if bench.cuda else "no card; tests/models/gpu interprets them"
        )
    for way, inside in bench.ways.items():
        with inside:
            for dtype in (torch.float32, LOW):
                bench.attempt(f"token_logprobs {dtype}, {way}", scores, dtype, way)
                bench.attempt(f"paged attention {dtype}, {way}", attention, dtype, way)
            bench.attempt(f"checksum, {way}", checksums, way)
            bench.attempt(f"paged attention, speed, {way}", speed, way)


def products(bench: Bench) -> None:
    """Low-precision products must sum in float32 and stay there."""
    worst = 0.0
    for m, k, n in ((1, 33, 7), (33, 64, 40), (129, 1000, 65)):
        a, b = (torch.randn(s, device=bench.device).to(LOW) for s in ((m, k), (k, n)))
        exact = a.double() @ b.double()
        worst = max(worst, float((product(a, b).double() - exact).abs().max() / exact.abs().max()))
    bench.check("product bf16 × bf16 → fp32, relative to float64", worst, 2e-6)


def exact_scores(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, coefficients: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Log-probs and entropies in float64, and the gradients of their weighted sum."""
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logp = (h @ w.t()).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    taken = logp.gather(1, targets[:, None])[:, 0]
    grads = torch.autograd.grad((coefficients.double() * (taken + 0.3 * entropy)).sum(), (h, w))
    return taken.detach(), entropy.detach(), *grads


def scores(bench: Bench, dtype: torch.dtype, way: str) -> None:
    worst, gradient = 0.0, 0.0
    sizes = ((1, 17, 33), (65, 64, 300)) if bench.toy else ((1, 17, 33), (130, 127, 1000), (1025, 96, 5003))
    for tokens, width, vocab in sizes:
        hidden = torch.randn(tokens, width, device=bench.device).to(dtype).requires_grad_()
        weight = (torch.randn(vocab, width, device=bench.device) * 3 * width**-0.5).to(dtype).requires_grad_()
        targets = torch.randint(0, vocab, (tokens,), device=bench.device)
        coefficients = torch.randn(tokens, device=bench.device)
        wanted = exact_scores(hidden, weight, targets, coefficients)
        logprobs, entropy, _ = token_logprobs(hidden, weight, targets, chunk=64)
        assert entropy is not None
        grads = torch.autograd.grad((coefficients * (logprobs + 0.3 * entropy)).sum(), (hidden, weight))
        for one, other in zip((logprobs.detach(), entropy.detach()), wanted[:2], strict=True):
            worst = max(worst, float((one.double() - other).abs().max()))
        for one, other in zip(grads, wanted[2:], strict=True):
            gradient = max(gradient, float((one.double() - other).norm() / other.norm()))
    bench.check(f"token_logprobs {name(dtype)}, {way}, against float64", worst, 2e-5)
    bench.check(f"its gradients {name(dtype)}, {way}, relative", gradient, 1e-5 if dtype == torch.float32 else 6e-3)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Pages:
    """Sequences of these lengths in a paged cache, all but their last token, whose decode step is what is looked at."""

    def __init__(self, bench: Bench, dtype: torch.dtype, lengths: list[int], heads: int, kv: int, width: int) -> None:
        self.size, self.scale, self.lengths = 16, width**-0.5, lengths
        counts = [-(-n // self.size) for n in lengths]
        self.cache = PagedCache(sum(counts) + 1, self.size, dtype, bench.device)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int64, device=bench.device)
        places = torch.randperm(sum(counts), device=bench.device) + 1  # a sequence's blocks lie anywhere
        for row, (first, count) in enumerate(zip(itertools.accumulate(counts, initial=0), counts, strict=False)):
            self.table[row, :count] = places[first : first + count]

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=bench.device).to(dtype)

        self.keys, self.values = ([draw(n, kv, width) for n in lengths] for _ in range(2))
        self.query = draw(len(lengths), heads, width)
        owner = torch.repeat_interleave(torch.tensor([n - 1 for n in lengths]))
        at = torch.cat([torch.arange(n - 1) for n in lengths])
        if len(at):  # one query is enough to have all keys written
            self._attending(self.table[:1], self._slots(owner, at), at[:1, None] * 0, slice(0, 1), slice(0, -1))()

    def decode(self, first: int, last: int) -> torch.Tensor:
        """The step of sequences `first` … `last` − 1 together, `[n, heads * width]`."""
        return self.step(first, last)()

    def step(self, first: int, last: int) -> Callable[[], torch.Tensor]:
        """What computes `decode`, with everything that it is told on the device."""
        at = torch.tensor([n - 1 for n in self.lengths[first:last]])
        table = self.table[first:last, : -(-max(self.lengths[first:last]) // self.size)].contiguous()
        slots = self._slots(torch.arange(first, last), at)
        return self._attending(table, slots, at[:, None], slice(first, last), slice(-1, None))

    def _slots(self, owner: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        owner, at = owner.to(self.table.device), at.to(self.table.device)
        return self.table[owner, at // self.size] * self.size + at % self.size

    def _attending(
        self, table: torch.Tensor, slots: torch.Tensor, at: torch.Tensor, who: slice, part: slice
    ) -> Callable[[], torch.Tensor]:
        step = Step(slots=slots, table=table, query_positions=at.to(table.device), scatter=None)
        owners = who if part.start else slice(None)
        key, value = (torch.cat([t[part] for t in kind[owners]]) for kind in (self.keys, self.values))
        return lambda: self.cache.attend(step, 0, self.query[who], key, value, self.scale)

    def exact(self) -> torch.Tensor:
        out = []
        for row, query in enumerate(self.query.double()):
            k, v = (
                t[row].double().repeat_interleave(len(query) // t[row].shape[1], 1) for t in (self.keys, self.values)
            )
            out.append(torch.einsum("hn,nhd->hd", torch.einsum("hd,nhd->hn", query, k).mul(self.scale).softmax(-1), v))
        return torch.stack(out).flatten(1)


@torch.inference_mode()
def attention(bench: Bench, dtype: torch.dtype, way: str) -> None:
    """Against float64; and every row alone, bit for bit, which only a kernel with a fixed order of keys promises."""
    worst, other = 0.0, 0
    shapes = [([1], 8, 2, 64), ([17, 3, 64, 1], 4, 4, 32), ([100, 15, 16, 33, 257, 2, 48], 16, 8, 128)]
    for lengths, heads, kv, width in shapes if bench.toy else [*shapes, ([1025, 7, 4097, 513, 31], 32, 8, 128)]:
        pages = Pages(bench, dtype, lengths, heads, kv, width)
        wanted, out = pages.exact(), pages.decode(0, len(lengths))
        worst = max(worst, float((out.double() - wanted).abs().max() / wanted.abs().max()))
        other += sum(not torch.equal(pages.decode(row, row + 1)[0], out[row]) for row in range(len(lengths)))
    bound = 3e-6 if dtype == torch.float32 else 1e-2
    bench.check(f"paged attention {name(dtype)}, {way}, against float64", worst, bound)
    alone = f"paged attention {name(dtype)}, {way}, rows with other bits alone than in a batch"
    if way == "Triton":
        bench.check(alone, float(other), 0)
    else:
        bench.row(alone, float(other))


@torch.inference_mode()
def speed(bench: Bench, way: str) -> None:
    """Decode attention of one layer of Qwen3-4B, keys and values read once being the floor; on a card played from a graph."""
    layers = 2 if bench.toy else 10
    for count, length in ((2, 40),) if bench.toy else ((256, 1024), (64, 4096), (1, 32_768)):
        pages = Pages(bench, LOW, [length] * count, 32, 8, 128)
        attend = pages.step(0, count)

        def work(attend: Callable[[], torch.Tensor] = attend) -> None:
            for _ in range(layers):
                attend()

        seconds = bench.timed(probe.captured(work).replay if bench.cuda else work) / layers
        read, bandwidth = 2 * 2e-9 * count * length * 8 * 128, bench.probed(probe.COPY)
        about = {"share_of_floor": bench.share(bandwidth and read / bandwidth, seconds), "peak_gb": bench.peak_gb}
        bench.row(f"paged attention, {count} × {length:,}, {way}", read / seconds, "GB/s", ms=seconds * 1e3, **about)


def checksums(bench: Bench, way: str) -> None:
    """The device's sum is the host's, also of a view, and sees one changed bit."""
    wrong = 0
    for dtype, count in itertools.product((torch.float32, LOW, torch.int16), (1, 1023, 2**19 + 77)):
        tensor = torch.randn(count, device=bench.device).mul(100).to(dtype)
        mine = tensor_checksum("w", tensor)
        wrong += mine != tensor_checksum("w", tensor.cpu())
        tensor.view(torch.uint8)[count // 2] ^= 1
        wrong += mine == tensor_checksum("w", tensor)
    bench.check(f"checksums, {way}, that differ from the host's or overlook a bit", float(wrong), 0)
