"""Bodies of requests and answers of the HTTP service, as its OpenAPI document shows them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rollkeel_sandbox.cases import Case
from rollkeel_sandbox.codec import decode_bytes
from rollkeel_sandbox.job import KINDS, PRELOADS, Level, Status
from rollkeel_sandbox.partition import MAX_QUEUE_S, PRIORITIES, QUEUE_S
from rollkeel_sandbox.records import State
from rollkeel_sandbox.sessions import MAX_COMMAND_S

MAX_BATCH = 256
ID_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"


class _In(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _one_of(values: tuple[str, ...] | list[str]) -> Any:
    return Field(json_schema_extra={"enum": list(values)})


class Base64(_In):
    """Bytes that are no UTF-8."""

    base64: str


Bytes = str | Base64
Amount = Annotated[int | None, Field(gt=0, le=2**31)]
Seconds = Annotated[float | None, Field(gt=0, le=2**31, allow_inf_nan=False)]


class TerminalLimitsIn(_In):
    """Of the whole session, output of one command. Time is limited by command and by idleness."""

    memory_mb: Amount = None
    processes: Amount = None
    file_mb: Amount = None
    scratch_mb: Amount = None
    output_bytes: Amount = None


class LimitsIn(TerminalLimitsIn):
    """Those that are not named are the partition's."""

    wall_s: Seconds = None
    cpu_s: Seconds = None


class JobIn(_In):
    """One program."""

    source: Bytes
    kind: Annotated[str, _one_of(KINDS)] = "python"
    preload: Annotated[str, _one_of(PRELOADS)] = "code"
    stdin: Bytes = ""
    files: dict[str, Bytes] = Field(default_factory=dict, description="Relative path to content.")
    args: list[str] = Field(default_factory=list)
    collect: list[str] = Field(default_factory=list, description="Relative paths of files to bring back.")
    limits: LimitsIn | None = None


class NamedJobIn(JobIn):
    id: Annotated[str, Field(pattern=ID_PATTERN)] | None = Field(
        default=None, description="Asking again with the same id and job gives the same result, without a second run."
    )


class _Placed(_In):
    partition: str | None = Field(default=None, description="The server's first one if none is named.")
    priority: int = Field(default=0, ge=PRIORITIES[0], le=PRIORITIES[-1], description="Higher first.")
    queue_s: float = Field(
        default=QUEUE_S, gt=0, le=MAX_QUEUE_S, allow_inf_nan=False, description="Seconds until it must have started."
    )


class RunIn(NamedJobIn, _Placed):
    pass


class BatchIn(_Placed):
    """All are taken or none."""

    jobs: list[NamedJobIn] = Field(min_length=1, max_length=MAX_BATCH)


class CaseIn(_In):
    stdin: Bytes = ""
    expected: Bytes = Field(description="What it must print, but for white space at the ends of lines and of the text.")

    def case(self) -> Case:
        """Raises `BadInput` for what is no base64."""
        return Case(**{name: decode_bytes(data) for name, data in self.model_dump().items()})


class TestsIn(JobIn, _Placed):
    """One run of the program per case; `stdin` of the program itself is not used."""

    cases: list[CaseIn] = Field(min_length=1, max_length=MAX_BATCH)


class TerminalIn(_In):
    partition: str | None = Field(default=None, description="Whose ceiling holds.")
    limits: TerminalLimitsIn | None = None


class CommandIn(_In):
    command: str
    timeout_s: float = Field(default=10.0, gt=0, le=MAX_COMMAND_S, allow_inf_nan=False)


class ResultOut(BaseModel):
    """How a program ended."""

    status: Annotated[str, _one_of([s.value for s in Status])]
    exit_code: int | None
    signal: int | None
    stdout: Bytes
    stderr: Bytes
    stdout_truncated: bool
    stderr_truncated: bool
    files: dict[str, Bytes]
    wall_s: float
    cpu_s: float
    peak_memory_mb: float
    level: Annotated[str, _one_of([level.name.lower() for level in Level])]
    isolation: dict[str, str]
    reason: str
    attempts: int


class ViewOut(BaseModel):
    """A job now."""

    id: str
    state: Annotated[str, _one_of([s.value for s in State])]
    result: ResultOut | None
    error: str


class BatchOut(BaseModel):
    jobs: list[ViewOut]


class CaseOut(BaseModel):
    passed: bool
    result: ResultOut


class TestsOut(BaseModel):
    passed: int
    total: int
    cases: list[CaseOut]


class TerminalOut(BaseModel):
    id: str


class ExchangeOut(ResultOut):
    """How a command ended, and whether the session takes further ones."""

    alive: bool


class ClosedOut(BaseModel):
    closed: str


class ErrorOut(BaseModel):
    """Why not: one line, and a word for programs."""

    error: str
    code: str
    retry_after_s: float | None = None
