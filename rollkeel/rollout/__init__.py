"""From prompts to complete rollouts, over any engine."""

from __future__ import annotations

from rollkeel.named_twice import callable_as_in_api

callable_as_in_api(__name__)
