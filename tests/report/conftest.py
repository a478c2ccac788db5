"""Here charts are what is tested."""

import pytest


@pytest.fixture(autouse=True)
def charts_are_drawn(drawn: None) -> None:
    return
