"""Rewards → one advantage per rollout. Pure numpy, float64 inside."""

from rollkeel.advantages.estimators import (
    EPSILON,
    ESTIMATORS,
    OVER_BATCH,
    Groups,
    compute,
    find,
    group_metrics,
    one_sided,
    shuffle,
)

__all__ = ["EPSILON", "ESTIMATORS", "OVER_BATCH", "Groups", "compute", "find", "group_metrics", "one_sided", "shuffle"]
