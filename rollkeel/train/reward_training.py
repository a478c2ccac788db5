"""Training of a reward model on preference pairs, in one process or on ranks that hold a part of it and see a share of the pairs.

A gradient is a sum over pairs with the coefficient 1 / pairs of the step: which rank sees which pair changes rounding alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollkeel.config import SftConfig
from rollkeel.errors import Interrupted, NonFinite
from rollkeel.events import write_atomic
from rollkeel.models.loading import Policy
from rollkeel.tasks.base import keyed_rng
from rollkeel.tasks.published import Pair
from rollkeel.train.balance import dealt
from rollkeel.train.mesh import Mesh, add_gradients
from rollkeel.train.optimizer import PACK_TOKENS, supervised
from rollkeel.train.parts import Deal
from rollkeel.train.preferences import RewardModel, bradley_terry, by_width
from rollkeel.train.sft import cuts
from rollkeel.train.sharded import Layout, Sharded, gathered, pieces_of
from rollkeel.train.together import UnfinishedTogether, replace_folder
from rollkeel.train.trained import Trained, save_model

METRICS = "metrics.jsonl"
Render = Callable[[str], str]
"""From a prompt of the data to what a policy sees, for example by a chat template."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides the weights that come out, beside the model and the pairs."""

    sft: SftConfig
    """Steps, pairs per step, learning rate."""
    weight_decay: float = 0.0
    pack_tokens: int = PACK_TOKENS
    """Most tokens of a forward pass, with padding; a pair that has more takes one alone."""
    seed: int = 0
    every: int = 0
    """Steps between evaluations and checkpoints; 0 has them at the end alone, but for a checkpoint a minute."""
    render: Render = str


def train_reward_model(
    start: Callable[[], RewardModel],
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    training: Training,
    out: Path,
    *,
    mesh: Mesh = Mesh(),
    device: torch.device | str = "cpu",
    progress: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train to `out/model`, with `out/metrics.jsonl` and `out/checkpoints`; goes on from there, bit for bit on the same mesh.

    `mesh`: of `replicate` and `shard` ranks, each of which makes the same call; any other one can go on. `device`: where they
    take their parts of a model that has no weights yet. Step s takes pairs s · batch … of an endless sequence of shuffles
    keyed by the seed. Returns the last metrics: `loss`, `accuracy` (a tie counts half) with `accuracy_se` over pairs, `margin`
    (mean r_c − r_r) of the held-out pairs under `eval/`, of the last step's under `train/`. Raises `Interrupted` after a
    checkpoint, `NonFinite` with the last good checkpoint kept.
    """
    batches = cuts(training.sft, len(train))
    steps = len(batches) - 1
    work = _Work(start(), training, steps, mesh, torch.device(device))
    kept = UnfinishedTogether(out / "checkpoints", "reward model", mesh)
    saved = kept.load(work.trained)
    rows: list[dict[str, float]] = [] if saved is None else saved["rows"]

    def save() -> None:
        kept.save(len(rows), work.trained, {"rows": rows})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        mesh.attempt(lambda: write_atomic(out / METRICS, text) if mesh.rank == 0 else None, f"cannot write {out}")

    for step in range(len(rows) + 1, steps + 1):
        stopped = any(mesh.everyone(should_stop()))
        if stopped or any(mesh.everyone(kept.due())):
            save()
        if stopped:
            raise Interrupted(f"stopped after {len(rows)} of {steps} steps; the same command goes on")
        pairs = _batch(train, range(*batches[step - 1 : step + 1]), training.seed)
        metrics = {"step": step, **work.step(pairs)}
        due = step == steps or (training.every and step % training.every == 0)
        if due and held_out:
            metrics |= {f"eval/{k}": v for k, v in work.measure(held_out).items()}
        rows.append(metrics)
        progress(step, metrics)
        if due:
            save()
    work.save_model(out / "model")
    return rows[-1] if rows else {}


class _Work:
    """A model in training."""

    def __init__(self, model: RewardModel, training: Training, steps: int, mesh: Mesh, device: torch.device) -> None:
        net = model.model
        self._model = model
        self._mesh = mesh
        self._tokens = training.pack_tokens
        self._render = training.render
        self._layout = Layout(net, mesh)
        self._pieces = pieces_of(net, mesh)
        self._deal = Deal.of(net, mesh)
        self._sharded = Sharded(net, mesh, None, model.source, device)
        self._device = next(net.parameters()).device
        self._sharded.settle()
        model.through = self._sharded
        held = {"mesh": mesh, "counts": self._deal.counts}
        self._stepper = supervised(net, training.sft, steps, training.weight_decay, **held)
        self.trained = Trained(self._layout, net, self._stepper, None, {})

    def step(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """One update."""
        self._stepper.zero_grad()
        chosen, rejected = self._rewards(pairs, self._stepper.scale / len(pairs))
        metrics = _metrics(chosen, rejected, _margins(pairs, chosen))
        if not math.isfinite(metrics["loss"]):
            self._stepper.zero_grad()
            raise NonFinite(
                f"reward model update {self._stepper.updates}: the loss is not finite; weights left untouched"
            )
        add_gradients(self._stepper.named, self._mesh, self._deal.adds)
        return {**{f"train/{k}": v for k, v in metrics.items()}, **self._stepper.step()}

    @torch.no_grad()
    def measure(self, pairs: Sequence[Pair]) -> dict[str, float]:
        """Metrics of these pairs."""
        chosen, rejected = self._rewards(pairs)
        self._sharded.rest()
        return _metrics(chosen, rejected, _margins(pairs, chosen))

    def save_model(self, folder: Path) -> None:
        """Write the Hugging Face folder that one process would write."""
        model = self._model

        def write(path: Path) -> None:
            if self._mesh.in_step:
                weights = gathered(model.model, self._pieces, self._deal)
                save_model(path, Policy(model.model, model.tokenizer), self._layout, self._pieces, weights)
            elif self._mesh.rank == 0:
                model.save(path)

        replace_folder(folder, self._mesh, write)

    def _rewards(self, pairs: Sequence[Pair], coefficient: float | None = None) -> torch.Tensor:
        """`[2, pairs]`, those of the chosen and the rejected sides, the same on all ranks. `coefficient`: of each pair's loss,
        whose gradient goes into the parameters."""
        ids = [[self._model.encode(self._render(p.prompt) + side) for side in (p.chosen, p.rejected)] for p in pairs]
        out = torch.zeros(2, len(pairs), device=self._device)
        for members, real in self._rounds([max(map(len, sides)) for sides in ids]):
            scores = self._model.forward([ids[i][side] for side in (0, 1) for i in members]).view(2, -1)
            if coefficient is not None:
                losses = bradley_terry(scores[0], scores[1], _margins([pairs[i] for i in members], scores))
                (losses.sum() * (coefficient * real)).backward()
            if real:
                out[:, members] = scores.detach()
        return self._mesh.total(out)

    def _rounds(self, widths: Sequence[int]) -> Iterator[tuple[list[int], bool]]:
        """Pairs of each pass here, both sides in one, and whether they are this rank's own: others are run for the sake of ranks
        that wait, and count nothing."""
        workers, most = self._mesh.workers, self._tokens
        if workers > 1:
            most = min(most, max(2 * max(widths), -(-sum(widths) // workers)))
        passes = by_width(widths, most // 2)
        shares = dealt([len(some) * widths[some[-1]] for some in passes], workers)
        own = shares[self._mesh.worker]
        rounds = max(map(len, shares)) if self._mesh.in_step else max(1, len(own))
        for number in range(rounds):
            real = number < len(own)
            yield passes[own[number] if real else 0], real


def _metrics(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor) -> dict[str, float]:
    gap = (chosen - rejected).double().cpu().numpy()
    right = np.where(gap == 0, 0.5, gap > 0)
    se = float(right.std(ddof=1) / math.sqrt(len(right))) if len(right) > 1 else 0.0
    loss = float(bradley_terry(chosen, rejected, margins).double().mean())
    return {"loss": loss, "accuracy": float(right.mean()), "accuracy_se": se, "margin": float(gap.mean())}


def _margins(pairs: Sequence[Pair], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([p.margin for p in pairs], device=like.device)


def _batch(pairs: Sequence[Pair], indices: Sequence[int], seed: int) -> list[Pair]:
    """Pairs of one step; every pair is seen once before any is seen again."""
    orders: dict[int, list[int]] = {}
    out = []
    for index in indices:
        epoch, place = divmod(index, len(pairs))
        if epoch not in orders:
            orders[epoch] = list(range(len(pairs)))
            keyed_rng("preferences", seed, epoch).shuffle(orders[epoch])
        out.append(pairs[orders[epoch][place]])
    return out
