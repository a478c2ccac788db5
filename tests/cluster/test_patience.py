"""A deadline that is too short kills the slow, one that is too long hides the hung. Not covered: real silences (test_cluster_faults.py)."""

from __future__ import annotations

from rollkeel.cluster.patience import ENOUGH, SLACK_S, Patience


def test_the_limit_follows_what_was_measured_and_never_exceeds_the_most() -> None:
    patience = Patience(60.0)
    for n in range(ENOUGH):
        assert patience.limit_s == 60.0, n
        patience.heard(1.5)
    assert patience.limit_s == 2 * 1.5 + SLACK_S
    patience.heard(0.1)
    assert patience.limit_s == 2 * 1.5 + SLACK_S
    patience.heard(20.0)
    assert patience.limit_s == 50.0
    patience.heard(40.0)
    assert patience.limit_s == 60.0
    assert Patience(5.0).limit_s == 5.0
