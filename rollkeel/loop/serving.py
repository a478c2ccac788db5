"""The policy of a config and the engine that serves it: in this process, or on the actors of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rollkeel.config import Config
from rollkeel.loop.assemble import opened, policy_of
from rollkeel.loop.machines import Helpers
from rollkeel.models.loading import Policy
from rollkeel.protocols import Engine


class Served(NamedTuple):
    """An engine that has proven what it serves."""

    engine: Engine
    helpers: Helpers | None
    """Who grades and plays, if not this process."""
    checksum: int | None
    """Of the weights, where this process does not have them."""


def served_policy(config: Config) -> Policy:
    """That of `model.path`; over a cluster its weights lie on actors."""
    if not config.clustered:
        return policy_of(config)
    from rollkeel.cluster.check import check_cluster
    from rollkeel.cluster.skeleton import skeleton

    check_cluster(config)
    return skeleton(config.model)


@contextmanager
def serving(config: Config, policy: Policy) -> Iterator[Served]:
    """The config's engine, which serves the policy."""
    if not config.clustered:
        with opened(config, policy) as engine:
            yield Served(engine, None, None)
        return
    from rollkeel.cluster import stage

    with stage.served(config) as served:
        yield served
