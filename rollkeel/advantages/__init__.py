"""Rewards → one advantage per rollout. Pure numpy, float64 inside."""

from rollkeel.advantages.estimators import EPSILON, ESTIMATORS, compute, group_metrics, one_sided, shuffle

__all__ = ["EPSILON", "ESTIMATORS", "compute", "group_metrics", "one_sided", "shuffle"]
