"""A trainer's state and its model on disk, written and read by ranks that hold a part each. No rank ever holds the whole."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollkeel.errors import BadInput, Corrupt
from rollkeel.models.adapters import check_base, parameters
from rollkeel.models.loading import Policy, save_about
from rollkeel.models.part_files import DTYPES, Entry
from rollkeel.models.saving import write_weights
from rollkeel.train.eight_bit import unpack
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh, local
from rollkeel.train.optimizer import Stepper
from rollkeel.train.parts import Box
from rollkeel.train.passes import Passes
from rollkeel.train.saved_parts import INDEX, Held, Parts, Saved
from rollkeel.train.saved_parts import save as save_parts
from rollkeel.train.sharded import Layout, Pieces, tensors_of
from rollkeel.train.state import TENSORS, TREE, decoded

MOMENTS = ("exp_avg", "exp_avg_sq", "rest")
NO_REFERENCE = "checkpoint has no reference weights: it was written with train.kl_coefficient=0 and train.kl_every=0"


@dataclass(frozen=True)
class Trained:
    """What of a trainer is saved."""

    layout: Layout
    model: torch.nn.Module
    stepper: Stepper
    reference: dict[str, torch.Tensor] | None
    """Weights of the reference by parameter name; None without one."""
    base: Mapping[str, Any]
    """What adapters stand beside; empty without."""

    def weights(self, kind: str = "weights") -> dict[str, torch.Tensor]:
        """What lies here of the weights that training changes, or of the `reference`'s."""
        tensors = parameters(self.model) or tensors_of(self.model)
        named = tensors if kind == "weights" else self.reference or {}
        return {name: local(tensor.detach()) for name, tensor in named.items()}

    def held(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """What lies here for longer than a pass, by component of `rollkeel.memory.residency`. Moments come with masters, and both they
        and the reference are read from these very mappings when they are saved."""
        optimizer = list(self.stepper.adamw.state.values())
        reference = [] if self.reference is None else [self.reference]
        return {"weights": [tensors_of(self.model)], "reference model": reference, "moments": optimizer}

    def start_here(self) -> None:
        """Let the reference be the model as it is now."""
        if self.reference is not None:
            _copy(self.weights("reference"), self.weights())

    def state_dict(self) -> dict[str, Any]:
        """As `LocalTrainer.state_dict`."""
        out: dict[str, Any] = {"weights": self.weights(), "optimizer": self.stepper.state_dict()}
        if self.base:
            out["base"] = dict(self.base)
        if self.reference is not None:
            out["reference"] = self.weights("reference")
        return out

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """As `LocalTrainer.load_state_dict`."""
        check_base(state.get("base", {}), self.base)
        _copy(self.weights(), state["weights"])
        lacking = self.stepper.load_state_dict(state["optimizer"])
        if self.reference is not None:
            if "reference" not in state:
                raise BadInput(NO_REFERENCE)
            _copy(self.weights("reference"), state["reference"])
        return lacking


@dataclass(frozen=True)
class Supervised:
    """What supervised training works with on ranks that hold a part each."""

    forward: PolicyForward
    passes: Passes
    stepper: Stepper
    trained: Trained
    add_gradients: Callable[[], None]
    """Over the ranks, behind the passes of a step."""


@torch.no_grad()
def _copy(live: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    _compare(*({name: tuple(tensor.shape) for name, tensor in named.items()} for named in (live, weights)))
    for name, tensor in live.items():
        tensor.copy_(weights[name])


def _compare(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `BadInput` naming the first weight that the other side lacks, or has in another shape."""
    for name in [*ours, *theirs]:
        shapes = ours.get(name), theirs.get(name)
        if shapes[0] != shapes[1]:
            model, checkpoint = (f"shape {list(s)}" if s is not None else "no such weight" for s in shapes)
            raise BadInput(
                f"weight {name}: the model has {model}, the checkpoint {checkpoint}; resume with the same model"
            )


def save_trained(folder: Path, trained: Trained) -> dict[str, dict[str, Any]]:
    """Write weights, moments, update count and reference. Collective. Returns size and SHA-256 of every file by name."""
    layout = trained.layout
    held = dict[str, Held]()
    steps = dict[str, float]()
    for kind in ("weights", "reference"):
        for name, part in trained.weights(kind).items():
            held[f"{kind}/{name}"] = Held(part, layout.boxes(name), layout.shapes[name])
    for name, p in trained.stepper.named:
        state = trained.stepper.adamw.state.get(p, {})
        for key in (key for key in MOMENTS if key in state):
            held[f"{key}/{name}"] = Held(_plain(state, key), layout.boxes(name), layout.shapes[name])
        if state:
            steps[name] = float(state["step"])
    counts = {key: value for key, value in trained.stepper.state_dict().items() if key != "moments"}
    about = {"optimizer": counts, "steps": steps, "base": dict(trained.base)}
    return save_parts(folder, layout.mesh, held, about)


def _plain(state: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """Moments of 8 bits in float32: their scales belong to blocks that another mesh would cut."""
    if "scales" not in state or key == "rest":
        return state[key]
    row = state["scales"][MOMENTS.index(key)]
    return unpack(state[key].view(-1), row).view(state[key].shape)


def load_trained(folder: Path, trained: Trained) -> list[str]:
    """Continue from what `save_trained` wrote on any mesh, or from the state of a run in one process. Collective.

    Returns lines for people: what the state lacks. Raises `BadInput` naming the first tensor that does not fit, `Corrupt` for damage."""
    return take(opened(folder, trained), trained)


def opened(folder: Path, trained: Trained) -> Saved:
    """What `load_trained` reads, checked: it is undamaged, and fits. Collective; raises as that does, and nothing has changed then."""
    mesh = trained.layout.mesh
    saved = _opened(folder, mesh)
    mesh.attempt(lambda: _fits(saved, trained))
    return saved


def take(saved: Saved, trained: Trained) -> list[str]:
    """Continue from what was opened. Collective. Returns lines for people."""
    lacking = trained.layout.mesh.attempt(lambda: _load(saved, trained))
    if not lacking:
        return []
    return [f"the checkpoint has no float32 masters of {len(lacking)} weights: they start from the rounded weights"]


def _opened(folder: Path, mesh: Mesh) -> Saved:
    if (folder / TREE).is_file() and not (folder / INDEX).is_file():
        return mesh.attempt(lambda: OneState(folder))
    return Parts(folder, mesh)


def _fits(saved: Saved, trained: Trained) -> None:
    check_base(saved.about.get("base", {}), trained.base)
    there = {kind: {n: s for k, n, s in _split(saved.shapes) if k == kind} for kind in ("weights", "reference")}
    if trained.reference is not None and not there["reference"]:
        raise BadInput(NO_REFERENCE)
    for kind in ("weights", "reference") if trained.reference is not None else ("weights",):
        _compare({name: trained.layout.shapes[name] for name in trained.weights(kind)}, there[kind])
    known = dict(trained.stepper.named)
    for kind, name, shape in _split(saved.shapes):
        if kind in MOMENTS and name not in known:
            raise BadInput(
                f"optimizer state has parameter {name} which the model lacks or has frozen; resume with the same model"
            )
        if kind in MOMENTS and shape != trained.layout.shapes[name]:
            expected, got = list(trained.layout.shapes[name]), list(shape)
            raise BadInput(f"optimizer state of {name}: the model has shape {expected}, the checkpoint {got}")


def _split(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for key, shape in shapes.items():
        kind, _, name = key.partition("/")
        yield kind, name, shape


@torch.no_grad()
def _load(saved: Saved, trained: Trained) -> list[str]:
    """Names of the low-precision weights whose masters are not there."""
    layout, lacking = trained.layout, list[str]()
    for kind in ("weights", "reference"):
        for name, part in trained.weights(kind).items():
            saved.fill(f"{kind}/{name}", layout.boxes(name), part)
    adamw = trained.stepper.adamw
    trained.stepper.load_state_dict({**saved.about["optimizer"], "moments": {}})
    for name, p in trained.stepper.named:
        if name not in saved.about["steps"]:
            continue
        here = local(p.detach())
        state = {"step": torch.tensor(saved.about["steps"][name], device=here.device)}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(here, dtype=torch.float32)
            saved.fill(f"{key}/{name}", layout.boxes(name), state[key])
        adamw.state[p] = state
        rest = adamw.rest(p)
        if rest is not None and saved.dtypes.get(f"rest/{name}") == rest.dtype:
            saved.fill(f"rest/{name}", layout.boxes(name), rest)
        elif rest is not None:
            lacking.append(name)
    return lacking


class OneState:
    """Implements `Saved` over the state folder of one process, of which it reads what is asked for."""

    def __init__(self, folder: Path) -> None:
        try:
            self._file: Any = safe_open(folder / TENSORS, framework="pt")
            tree = decoded(json.loads((folder / TREE).read_text(encoding="utf-8")), _Names())
            trainer = tree.get("trainer", tree)
            self._about(trainer)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise Corrupt(f"state {folder}: cannot be read ({why})") from None

    def _about(self, trainer: Mapping[str, Any]) -> None:
        optimizer = trainer["optimizer"]
        moments = optimizer["moments"]
        self._stored: dict[str, str] = {}
        for kind in ("weights", "reference"):
            self._stored |= {f"{kind}/{name}": stored for name, stored in trainer.get(kind, {}).items()}
        for name, state in moments.items():
            self._stored |= {f"{key}/{name}": state[key] for key in MOMENTS if key in state}
        self._scales = {name: state["scales"] for name, state in moments.items() if "scales" in state}
        counts = {key: value for key, value in optimizer.items() if key != "moments"}
        steps = {name: float(self._file.get_tensor(state["step"])) for name, state in moments.items()}
        self.about: dict[str, Any] = {"optimizer": counts, "steps": steps, "base": trainer.get("base", {})}
        slices = {key: self._file.get_slice(stored) for key, stored in self._stored.items()}
        self.shapes = {key: tuple[int, ...](stored.get_shape()) for key, stored in slices.items()}
        self.dtypes = {key: DTYPES[stored.get_dtype()] for key, stored in slices.items()}

    def fill(self, name: str, boxes: Sequence[Box], part: torch.Tensor) -> None:
        """Moments of 8 bits are brought into float32, one parameter at a time."""
        kind, _, parameter = name.partition("/")
        stored: Any = self._file.get_slice(self._stored[name]) if self.shapes[name] else None
        if parameter in self._scales and kind in MOMENTS[:2]:
            row = self._file.get_tensor(self._scales[parameter])[MOMENTS.index(kind)]
            stored = unpack(self._file.get_tensor(self._stored[name]).view(-1), row).view(self.shapes[name])
        if stored is None:
            part.copy_(self._file.get_tensor(self._stored[name]))
            return
        for box in boxes:
            part[box.of_part] = stored[box.of_whole].to(part.dtype)


class _Names(dict[str, str]):
    """Stands for the tensors of a state: each is its name."""

    def __missing__(self, name: str) -> Any:
        return name


def save_model(
    folder: Path, policy: Policy, layout: Layout, pieces: Pieces, weights: Iterator[tuple[str, torch.Tensor]]
) -> dict[str, dict[str, Any]]:
    """Write the Hugging Face folder that one process would write. Collective: the first rank writes what all bring together, and knows
    size and SHA-256 of the files with weights, by name.

    `weights`: (checkpoint name, tensor) in the order of `pieces`, whole, one after the other. Raises `BadInput` on all ranks if it cannot
    be written."""
    mesh, failed, written = layout.mesh, None, dict[str, dict[str, Any]]()
    try:
        if mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            save_about(policy, folder)
            dtypes = {name: tensor.dtype for name, tensor in tensors_of(policy.model).items()}
            entries = [Entry(name, dtypes[owner], tuple(piece.shape)) for name, owner, piece in pieces]
            counts = sum(map(math.prod, layout.shapes.values()))
            written = write_weights(folder, entries, map(itemgetter(1), weights), counts)
    except OSError as error:
        failed = BadInput(f"cannot write {folder}: {error.strerror or error}")
    except Exception as error:
        failed = error
    deque(weights, maxlen=0)  # all ranks must bring them together to the last, and none keeps one
    mesh.agree(failed)
    return written
