"""Forward, backward, step: blind to the algorithm. Log-probs that never hold `[T, V]`, SFT, checkpoints."""

from __future__ import annotations

from rollkeel.named_twice import callable_as_in_api

callable_as_in_api(__name__)
