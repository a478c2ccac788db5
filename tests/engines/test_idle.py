"""An update on recorded rollouts must not sample by accident: the engine that stands in refuses to.

Not covered: replays (tests/test_replay_command.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from rollkeel.engines.idle import IdleEngine
from rollkeel.errors import EngineFailure
from rollkeel.protocols import CountedEngine, Engine, SteppedEngine
from rollkeel.types import Request, SamplingParams, WeightUpdate


def test_it_is_an_engine_that_refuses_work() -> None:
    engine = IdleEngine()
    assert isinstance(engine, Engine)
    assert not isinstance(engine, SteppedEngine)
    assert not isinstance(engine, CountedEngine)
    engine.submit([])
    assert engine.poll(0.0) == []
    engine.interrupt()
    with pytest.raises(EngineFailure, match="expected none"):
        engine.submit([Request(id=0, prompt_ids=np.array([1]), sampling=SamplingParams())])
    update = WeightUpdate(kind="full", base_version=None, version=3, slices=[], checksum=0)
    with pytest.raises(EngineFailure, match="version 3"):
        engine.update_weights(update)
    engine.close()
