"""`rollkeel analyze`: from a model or a run to two sides, their tokens and the comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel.analyzer.capture import Capture, Tokens, load_capture, spread, trim
from rollkeel.analyzer.compare import Analysis, compare, compare_logprobs
from rollkeel.analyzer.module_reference import ModuleReference
from rollkeel.analyzer.reference import Reference
from rollkeel.analyzer.sides import EngineSide, Progress, TrainerSide, engine_forward, tell
from rollkeel.config import Config
from rollkeel.engines.keeper import client_library
from rollkeel.engines.vllm import VllmBackend
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.loop.assemble import answers, device_of, opened, policy_of, sampling_params
from rollkeel.models.forward import supports
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES
from rollkeel.recipe import from_tree, merge
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.record.runfolder import CONFIG, RunFolder, rollout_files
from rollkeel.train import checkpoint
from rollkeel.types import FloatArray, Rollout

SUFFIX = ".safetensors"
MEMORY = 2 * 2**30
"""Most bytes that one side keeps; fewer tokens are taken of a model that would need more."""
SERVER_S = 120.0
"""Longest wait for an inference server's answer."""
KINDS = ("trainer", "engine", "prefill")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for."""

    target: str
    """Run folder, model folder, id or preset."""
    overrides: Sequence[str] = ()
    """`a.b=c` on the run's config, or on the default recipe for a model."""
    against: str | None = None
    """Another model, recorded tensors, or the address of an inference server."""
    sides: str | None = None
    """`trainer,engine:bf16`: two of `KINDS` with a mode for engines, or files of recorded tensors."""
    dtype: str | None = None
    """Mode of engines that name none; None is the run's, bf16 for a model."""
    tokens: Path | None = None
    """Rollouts (parquet) or a run folder whose tokens are used."""
    prompts: int = 4
    """Prompts sampled where nothing else says which tokens."""
    sequences: int = 8
    limit: int = 2048
    """Most sequences, and most tokens in all of them."""


def analyze(asked: Asked, progress: Progress | None = None) -> Analysis:
    """Capture both sides and compare them. Raises `BadInput` for anything that cannot be compared."""
    if asked.dtype is not None and asked.dtype not in MODES:
        raise BadInput(f"--dtype {asked.dtype}: expected one of {', '.join(MODES)}")
    config = subject(asked)
    policy = policy_of(config)
    policy.model.eval()
    is_server = asked.against is not None and asked.against.startswith(("http://", "https://"))
    specs = _specs(asked, is_server)
    recorded = {spec: load_capture(spec) for spec in specs if spec.endswith(SUFFIX)}
    if recorded:
        tokens = next(iter(recorded.values())).tokens
    else:
        room = min(asked.limit, max(2, MEMORY // _bytes_per_token(policy.model.config.get_text_config())))
        tokens = trim(tokens_for(asked, config, policy, progress), sequences=asked.sequences, limit=room)
    if int(tokens.ids.max()) >= policy.vocab_size:
        raise BadInput(
            f"analyze: token {int(tokens.ids.max())} is outside the model's vocabulary of {policy.vocab_size}; these tokens"
            " are of another model"
        )
    if is_server:
        return _against_server(asked, policy, tokens, specs[0], config, progress)
    other = policy
    if asked.against is not None and not asked.against.endswith(SUFFIX):
        other = load_policy(_model(config, asked.against), device_of(config))
        other.model.eval()
        _same_architecture(policy, other, asked)
    captures: list[Capture] = []
    for spec, one in zip(specs, (policy, other), strict=True):
        captures.append(recorded.get(spec) or _capture(spec, one, config, asked, tokens, progress))
    a, b = _distinct(captures, asked)
    tell(progress, "judging operations")
    text = policy.model.config.get_text_config()
    if not supports(text):
        return compare(a, b, ModuleReference(policy.model), progress)
    return compare(a, b, Reference(text, checkpoint_views(policy.model)), progress)


def _bytes_per_token(text: Any) -> int:
    """What one side keeps of a token, about."""
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 4 * text.num_hidden_layers * (6 * text.hidden_size + (4 * heads + 4 * kv_heads) * width)


def subject(asked: Asked) -> Config:
    """The config of a run folder with its newest weights as the model, or the default recipe with this model."""
    folder = Path(asked.target)
    if (folder / CONFIG).is_file() and not (folder / "config.json").is_file():
        tree = RunFolder.open(folder, lock=False).config.model_dump(mode="json")
        tree["model"] |= {"path": str(_weights(folder)), "overrides": {}}
    else:
        tree = {"model": {"path": asked.target}, "engine": {"dtype": "bf16"}}
    return from_tree(merge(tree, asked.overrides))


def _weights(folder: Path) -> Path:
    """The final model of a run, else that of its newest sound checkpoint."""
    if (folder / "model").is_dir():
        return folder / "model"
    saved = checkpoint.latest(folder / "checkpoints")
    if saved is None or not saved.model.is_dir():
        raise BadInput(
            f"run folder {folder}: expected a model or a checkpoint, found none; let it run to its first one"
        )
    return saved.model


def _model(config: Config, path: str) -> Any:
    """The model section for other weights of the same kind; `path`: model, or run folder."""
    folder = Path(path)
    is_run = (folder / CONFIG).is_file() and not (folder / "config.json").is_file()
    return config.model.model_copy(update={"path": str(_weights(folder)) if is_run else path})


def _same_architecture(one: Policy, other: Policy, asked: Asked) -> None:
    shapes = [{n: t.shape for n, t in checkpoint_views(p.model).items()} for p in (one, other)]
    if shapes[0] != shapes[1]:
        name = next(n for n in (*shapes[0], *shapes[1]) if shapes[0].get(n) != shapes[1].get(n))
        raise BadInput(
            f"--against {asked.against}: expected weights of the same names and shapes as {asked.target}, {name} differs"
        )


def _specs(asked: Asked, is_server: bool) -> list[str]:
    """Two sides in words."""
    specs = [s.strip() for s in asked.sides.split(",")] if asked.sides else []
    for spec in specs:
        kind, _, mode = spec.partition(":")
        if not spec.endswith(SUFFIX) and (
            kind not in KINDS or (mode and mode not in MODES) or (kind == KINDS[0] and mode)
        ):
            raise BadInput(
                f"--sides {spec}: expected trainer, engine or prefill (with a dtype: engine:int4), or a file {SUFFIX}"
            )
    if asked.against is None:
        specs = specs or ["trainer", "engine"]
    elif is_server:
        specs = [*(specs[:1] or ["trainer"]), "server"]
    elif asked.against.endswith(SUFFIX):
        specs = [*(specs[:1] or ["trainer"]), asked.against]
    else:
        specs = (specs or ["trainer"]) * (1 if len(specs) == 2 else 2)
    if len(specs) != 2:
        raise BadInput(f"--sides {asked.sides}: expected two sides, separated by a comma, got {len(specs)}")
    return specs


def _capture(
    spec: str, policy: Policy, config: Config, asked: Asked, tokens: Tokens, progress: Progress | None
) -> Capture:
    kind, _, mode = spec.partition(":")
    if kind == "trainer":
        return TrainerSide(policy.model, parity=config.run.parity).capture(tokens, progress=progress)
    mode = mode or asked.dtype or config.engine.dtype
    hf_config, device = policy.model.config, device_of(config)
    weights = checkpoint_views(policy.model).items()
    forward = engine_forward(hf_config, weights, mode, device, parity=config.engine.forward == "parity")
    side = EngineSide(forward, hf_config, mode, prefill=kind == "prefill")
    return side.capture(tokens, progress=progress)


def _distinct(captures: Sequence[Capture], asked: Asked) -> tuple[Capture, Capture]:
    """Two sides whose names tell them apart."""
    a, b = captures
    files = [c.facts.get("step") for c in captures]
    if any(files):
        a, b = (
            c if s is None else replace(c, name=f"{c.name} of step {s}") for c, s in zip(captures, files, strict=True)
        )
    if a.name == b.name:
        names = (asked.target, asked.against or "again")
        a, b = (replace(c, name=f"{c.name} of {n}") for c, n in zip((a, b), names, strict=True))
    return a, b


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokens_for(asked: Asked, config: Config, policy: Policy, progress: Progress | None) -> Tokens:
    """Tokens of the rollouts that are named, of the run's last step, or freshly sampled ones."""
    folder = Path(asked.target)
    if asked.tokens is not None:
        return _recorded_tokens(asked.tokens)
    if (folder / CONFIG).is_file() and rollout_files(folder):
        return _recorded_tokens(folder)
    tell(progress, f"sampling {asked.prompts} prompts")
    sampled = _sample(asked.prompts, config, policy)
    return _tokens(sampled, f"{asked.target}: sampling")


def _recorded_tokens(path: Path) -> Tokens:
    if not path.exists():
        raise BadInput(f"--tokens {path}: no such file or folder; expected rollouts (parquet) or a run folder")
    files = rollout_files(path) if path.is_dir() else [(0, path)]
    if not files:
        raise BadInput(f"--tokens {path}: expected a run folder with rollouts, found none")
    rollouts = to_rollouts(read_step(files[-1][1]))
    # One of each group first: they show more prompts.
    return _tokens(sorted(rollouts, key=lambda r: (r.member, r.id)), str(files[-1][1]))


def _tokens(rollouts: Sequence[Rollout], source: str) -> Tokens:
    useful = [r for r in rollouts if len(r.span) and len(r.prompt.token_ids)]
    if not useful:
        raise BadInput(f"{source}: expected rollouts with a response, found none")
    ids = tuple(np.concatenate([r.prompt.token_ids, r.span.token_ids]) for r in useful)
    return Tokens(ids, tuple(len(r.prompt.token_ids) for r in useful))


def _sample(count: int, config: Config, policy: Policy) -> list[Rollout]:
    settings = config.engine.model_copy(
        update={"kind": "local", "processes": 0, "slots": max(2, count), "dtype": "fp32"}
    )
    with opened(config.model_copy(update={"engine": settings}), policy) as engine:
        return answers(config, policy, engine, sampling_params(config, ()), count, 1)


# -- inference servers -------------------------------------------------------------------------------------------------


def _against_server(
    asked: Asked, policy: Policy, tokens: Tokens, spec: str, config: Config, progress: Progress | None
) -> Analysis:
    """Log-probs of a running server, which serves weights that nobody here has proven."""
    assert asked.against is not None
    a = _capture(spec, policy, config, asked, tokens, progress)
    tell(progress, f"vllm at {asked.against}: scoring")
    scores = asyncio.run(_scores(asked, tokens))
    response, mode = tokens.response, asked.dtype or config.engine.dtype
    names = (a.name, f"vllm {asked.against}")
    coarser = mode if mode != "fp32" else a.mode
    return compare_logprobs(names, a.served_logprobs[response], spread(tokens, scores)[response], coarser)


async def _scores(asked: Asked, tokens: Tokens) -> list[FloatArray]:
    client, backend = client_library(), VllmBackend()
    async with client.AsyncClient(base_url=str(asked.against).rstrip("/"), timeout=SERVER_S, trust_env=False) as http:
        try:
            return [await backend.score(http, ids.tolist()) for ids in tokens.sequences]
        except client.HTTPError as error:
            raise EngineFailure(
                f"vllm at {asked.against}: no answer ({type(error).__name__}); start it or name another address"
            ) from None
