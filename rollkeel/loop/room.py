"""What a run leaves of a GPU to its engine."""

from __future__ import annotations

from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.engines.same_device import options_of
from rollkeel.memory.plan import beside, beside_cache
from rollkeel.models.loading import Policy


def beside_engine(config: Config, policy: Policy) -> int | None:
    """Bytes of a GPU that training holds while a server samples there, or the run beside KV; None where no engine needs to know."""
    if plugins.is_own(config.engine.kind):
        return None
    fields = policy.model.config.get_text_config().to_dict()
    if config.engine.kind == "local":
        return beside_cache(config, fields)
    return None if "gpu_memory_utilization" in options_of(config.engine) else beside(config, fields)
