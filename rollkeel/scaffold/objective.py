"""An objective: a mask that drops tokens, a weight for the gap between the engines, and a surrogate with its clip."""

from rollkeel.objectives import Objective, masks, surrogates
from rollkeel.objectives.terms import DECOUPLED
from rollkeel.objectives.weights import Weight


def example(*, delta: float = 0.1, clip: float = 0.2) -> Objective:
    """Drops tokens whose two probabilities differ by more than `delta`; weighs the others by the square root of old / rollout.

    Options are those of `objective.`: `objective.delta=0.05`.
    """
    return Objective(
        name="example",
        anchor=DECOUPLED,
        surrogate=surrogates.ppo_clip(clip, clip),
        masks=(masks.divergence("gap", kind="binary_tv", delta=delta, directional=False),),
        weight=Weight("half", lambda terms: (0.5 * terms.log_correction).exp(), corrects_gap=True),
        parameters={"delta": delta, "clip": clip},
    )
