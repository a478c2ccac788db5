"""Objectives: pure functions on flat `[T]` tensors, composed into one form, and named recipes of it.

`objective = rollkeel.objectives.kpop(phi=0.1)`; `objective.prepare(batch)` and `objective.loss(tokens)` in the trainer,
`objective(tokens)` for the metrics. `compose` puts your own together, `register` names it.
"""

from rollkeel.objectives.compose import compose
from rollkeel.objectives.objective import Objective, ObjectiveOutput
from rollkeel.objectives.recipes import dapo, dr_grpo, gmpo, grpo, gspo, icepop, kpop, mis, tis
from rollkeel.objectives.recipes_field import cispo, gpg, ipo, luspo, opsm, sapo, topr, trm, vespo
from rollkeel.objectives.recipes_rollout import (
    dppo_binary_kl,
    dppo_binary_tv,
    dppo_topk_kl,
    dppo_topk_tv,
    grpo_clip_higher,
    mask_negative,
    minirl,
    minirl_tis,
    pg_is,
    pg_tis,
    relax_clip,
)
from rollkeel.objectives.recipes_trajectory import ac_mis_po, fixed_at_final_bound, m2po, mis_po, random_rejection
from rollkeel.objectives.registry import RECIPES, build, register

__all__ = [
    "RECIPES",
    "Objective",
    "ObjectiveOutput",
    "ac_mis_po",
    "build",
    "cispo",
    "compose",
    "dapo",
    "dppo_binary_kl",
    "dppo_binary_tv",
    "dppo_topk_kl",
    "dppo_topk_tv",
    "dr_grpo",
    "fixed_at_final_bound",
    "gmpo",
    "gpg",
    "grpo",
    "grpo_clip_higher",
    "gspo",
    "icepop",
    "ipo",
    "kpop",
    "luspo",
    "m2po",
    "mask_negative",
    "minirl",
    "minirl_tis",
    "mis",
    "mis_po",
    "opsm",
    "pg_is",
    "pg_tis",
    "random_rejection",
    "register",
    "relax_clip",
    "sapo",
    "tis",
    "topr",
    "trm",
    "vespo",
]
