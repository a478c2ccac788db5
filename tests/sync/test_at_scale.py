"""What `rollkeel simulate-sync` prints is the plan of the model it names, and arithmetic that can be done by hand.

Does not cover whether real links behave as assumed: nothing here has run on several machines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollkeel.errors import BadInput
from rollkeel.memory.shapes import shape_of
from rollkeel.rollout.scenario import read_scenario
from rollkeel.sync.at_scale import SyncScenario, engine_layout, lines, predict, trainer_layout
from tests.sync.test_weight_plan import assert_exact

TINY: dict[str, Any] = {
    "width": 8,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head": 2,
    "mlp": 12,
    "dense_layers": 1,
    "experts": 4,
    "expert_mlp": 6,
    "vocab": 20,
}
QWEN3_30B = {
    "width": 2048,
    "layers": 48,
    "heads": 32,
    "kv_heads": 4,
    "mlp": 6144,
    "dense_layers": 0,
    "experts": 128,
    "expert_mlp": 768,
    "shared": 0,
    "vocab": 151936,
}
MESHES: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"shard": 4, "expert": 1}, {"count": 2, "data": 1, "tensor": 2, "expert": 2}),
    ({"shard": 2, "expert": 2}, {"count": 3, "data": 2, "tensor": 2, "expert": 2}),
    ({"shard": 3, "expert": 4, "tensor": 2}, {"count": 1, "data": 1, "tensor": 4, "expert": 1}),
    ({"shard": 1, "expert": 2, "tensor": 4, "replicate": 2}, {"count": 2, "data": 4, "tensor": 1, "expert": 4}),
]


def scenario(
    trainer: dict[str, int], engines: dict[str, int], model: dict[str, Any] = TINY, **more: Any
) -> SyncScenario:
    return SyncScenario(model=model, trainer=trainer, engines=engines, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize(("trainer", "engines"), MESHES)
def test_every_engine_gets_its_model(trainer: dict[str, int], engines: dict[str, int], colocated: bool) -> None:
    asked = scenario(trainer, engines, colocated=colocated, links={"host_ranks": 2})
    assert_exact(trainer_layout(asked), engine_layout(asked), {})


def test_parameters_are_the_models() -> None:
    asked = scenario({"shard": 4, "expert": 4}, {"count": 1, "data": 1, "tensor": 4, "expert": 4}, QWEN3_30B)
    assert predict(asked)["parameters"] == shape_of("Qwen/Qwen3-30B-A3B", {}).parameters


def test_seconds_are_bytes_over_links_and_messages() -> None:
    dense = {**TINY, "experts": 0, "tied": True}
    links = {"network_gb_s": 1e-6, "local_gb_s": 1e-5, "message_us": 1e6, "host_ranks": 1, "buffer_mb": 1e-4}
    alone, two = {"shard": 1, "expert": 1}, {"count": 2, "data": 1, "tensor": 1, "expert": 1}
    apart = predict(scenario(alone, two, dense, links=links))
    model = apart["parameters"] * 2
    messages = -(-model // 104)  # of 1e-4 MiB
    assert apart["bytes"] == apart["bytes_between_hosts"] == 2 * model
    assert apart["receiver_s"] == pytest.approx(model / 1e3 + messages)
    assert apart["seconds"] == apart["sender_s"] == pytest.approx(2 * model / 1e3 + 2 * messages)
    beside = predict(scenario(alone, two, dense, links=links, colocated=True))
    assert beside["bytes_between_hosts"] == model
    assert beside["sender_s"] == pytest.approx(model / 1e3 + model / 1e4 + 2 * messages)
    delta = predict(scenario(alone, two, dense, links=links, delta_share=0.5))
    assert delta["receiver_s"] == pytest.approx(model / 2e3 + -(-model // 2 // 104))
    assert delta["bytes"] == model


def test_the_lines_say_what_was_assumed() -> None:
    asked = scenario(*MESHES[0])
    said = "\n".join(lines(asked, predict(asked)))
    for words in ("40 GB/s a rank between hosts", "no congestion", "none twice", "full weights"):
        assert words in said


def test_a_mesh_that_does_not_divide_is_told() -> None:
    for trainer, engines, told in (
        ({"expert": 3}, MESHES[0][1], "trainer.expert=3: expected a divisor of model.experts=4; set another number"),
        (
            {"expert": 1, "tensor": 3},
            MESHES[0][1],
            "trainer.tensor=3: expected a divisor of model.heads=4; set another number",
        ),
        (
            MESHES[0][0],
            {"data": 1, "tensor": 2, "expert": 4},
            "engines.expert=4: expected a divisor of engines.data × engines.tensor=2",
        ),
    ):
        with pytest.raises(BadInput) as error:
            predict(scenario(trainer, engines))
        assert str(error.value).startswith(told)


def test_the_scenario_of_a_trillion_parameters() -> None:
    asked = read_scenario(SyncScenario, "sync_1t")
    families = engine_layout(asked).families
    total = sum(len(f.names) * int(np.prod(f.shape)) for f in families)
    assert 0.99e12 < total < 1.01e12
    assert len(trainer_layout(asked).hosts) == 4096
    assert len(engine_layout(asked).hosts) == 2048
