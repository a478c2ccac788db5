"""`judge`: a Python program of the task decides over the response, in the sandbox. For problems with many right answers, above all where
the response must be evaluated.

It defines `judge(text, given)`, is called with the response (up to `</think>` unread) and the option `given`, and returns true, false, a
finite number, or one of these and a line of detail. A judge that raises, exceeds its limits or returns anything else gives no verdict:
the response's fault (0, undecided) if the judge has one on the gold answer, else the judge's. What it lets the response do in its
process, the response may do to its verdict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rollkeel.rewards.answers import spoken
from rollkeel.rewards.sandboxed import Run, fault_of
from rollkeel.rewards.workers import NoVerdict
from rollkeel.tasks.base import excerpt
from rollkeel.types import Rollout

VERDICT = "verdict.json"
_DRIVER = rb"""
import json
asked = json.load(open("asked.json", encoding="utf-8"))
names = {"__name__": "judge"}
exec(compile(open("judge.py", encoding="utf-8").read(), "judge.py", "exec"), names)
said = names["judge"](asked["text"], asked["given"])
with open("verdict.json", "w", encoding="utf-8") as out:
    json.dump(said, out)
"""


class JudgeOptions(BaseModel):
    """Options of the grader `judge`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    judge: str = Field(min_length=1)
    given: Any = None
    """JSON, the judge's second argument."""
    preload: str = "code"
    limits: Mapping[str, Any] = Field(default_factory=dict)
    """Of `rollkeel_sandbox.Limits`."""


def grade(run: Run, rollout: Rollout) -> tuple[float, str]:
    """Reward and detail. Raises `NoVerdict` with the judge's last line, and whatever `run` raises."""
    from rollkeel_sandbox.job import Job, Limits

    options = JudgeOptions(**rollout.prompt.grader.options)
    text = spoken(rollout.text)
    if text is None:
        return 0.0, "no answer: the response ends within a thought"
    asked = json.dumps({"text": text, "given": options.given}).encode()
    files = {"judge.py": options.judge.encode(), "asked.json": asked}
    about: dict[str, Any] = {"preload": options.preload, "limits": Limits(**options.limits)}
    result = run(Job(source=_DRIVER, files=files, collect=(VERDICT,), **about))
    if fault := fault_of(result):
        raise NoVerdict(f"the judge failed: {fault}")
    return _verdict(result.files.get(VERDICT, b""))


def _verdict(written: bytes) -> tuple[float, str]:
    try:
        verdict = json.loads(written)
    except (ValueError, RecursionError):
        raise NoVerdict(f"the judge left no verdict: {excerpt(written.decode('utf-8', 'replace'))!r}") from None
    explained = isinstance(verdict, list) and len(verdict) == 2 and isinstance(verdict[1], str)
    reward, detail = verdict if explained else (verdict, "")
    if not isinstance(reward, bool | int | float) or not abs(reward) <= sys.float_info.max:
        raise NoVerdict(f"expected true, false or a finite number from the judge, got {excerpt(repr(verdict))}")
    return float(reward), excerpt(detail, 200)
