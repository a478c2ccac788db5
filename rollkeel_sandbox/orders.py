"""Where the front sends a request, and what becomes of it when its node is full, lost or frozen.

A job may be lost with its node, or with its connection to it: then it is sent to one other node, and after a second loss its result is
`killed`. So nodes begin with a job at most twice, and whoever asked gets one answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollkeel_sandbox.codec import encode_result
from rollkeel_sandbox.groups import Group
from rollkeel_sandbox.http1 import Message
from rollkeel_sandbox.job import Result, Status
from rollkeel_sandbox.nodes import JSON_HEADER, Clock, Exchange, Node
from rollkeel_sandbox.partition import CEILING, QUEUE_S
from rollkeel_sandbox.tokens import error_body

MAX_LOSSES = 2
RETRY_S, SLACK_S = 0.5, 60.0
"""How long a node that said that it is full is left alone at most; what a node may take beyond a job's own limits."""
JSON = b"application/json"


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: bytes = JSON
    retry_after_s: float | None = None


def refusal(status: int, message: str, code: str, retry_after_s: float | None = None) -> Answer:
    more = {} if retry_after_s is None else {"retry_after_s": round(retry_after_s, 3)}
    return Answer(status, error_body(message, code, **more), JSON, retry_after_s)


@dataclass(eq=False)
class Entry:
    """What is known about a job, by its id if it has one."""

    body: bytes = b""
    kept: bool = False
    """It was taken without anybody waiting for it: its loss is the front's business."""
    node: Node | None = None
    life: int = 0
    """Of the node, when it got the job."""
    lost: set[tuple[Node, int]] = field(default_factory=set)
    result: bytes = b""
    until: float = 0.0

    @property
    def here(self) -> bool:
        """Its node has it still."""
        return self.node is not None and self.life == self.node.life and (self.node, self.life) not in self.lost

    @property
    def killed(self) -> bool:
        return len(self.lost) >= MAX_LOSSES


@dataclass(eq=False)
class Figures:
    """Counts since the start."""

    answers: dict[int, int] = field(default_factory=dict)
    reissued: int = 0
    killed: int = 0
    lost_sessions: int = 0


class Order:
    """One request on its way (`weight`: jobs in it, 0 for a session): `start`, then `reply` is called once, unless it is dropped before."""

    def __init__(
        self,
        group: Group,
        figures: Figures,
        clock: Clock,
        reply: Callable[[Answer], None],
        *,
        method: str = "POST",
        target: str,
        body: bytes,
        weight: int,
        allowed_s: float,
        entry: Entry,
        headers: bytes = JSON_HEADER,
    ) -> None:
        self.group = group
        self.entry = entry
        self.target = target
        self._figures = figures
        self._clock = clock
        self._reply = reply
        self._method = method
        self._body = body
        self._headers = headers
        self._weight, self._allowed_s = weight, allowed_s
        self._tried: set[Node] = set()
        self._exchange: Exchange | None = None
        self._refused: Answer | None = None
        self._began, self._life = clock.now, 0
        self._open = True
        group.outstanding += weight
        group.taken += weight

    def start(self) -> None:
        """To the node that has the job, or to the least loaded."""
        entry = self.entry
        if entry.killed:
            self._finish(Answer(200, killed(entry)))
            return
        node = entry.node if entry.here and entry.node not in self._tried else self._choose()
        if node is None:
            self._finish(self._nobody())
            return
        self._figures.reissued += bool(entry.lost)
        entry.node, entry.life = node, node.life
        self._life = node.life
        known = not self.group.name or self.group.name in node.partitions
        body = self._body if known else without_partition(self._body)
        self._exchange = node.ask(
            self._method,
            self.target,
            body,
            self._done,
            allowed_s=self._allowed_s,
            weight=self._weight,
            headers=self._headers,
        )

    def drop(self) -> None:
        """Nobody waits any more."""
        if self._open:
            self._close()
            if self._exchange:
                self._exchange.drop()

    def _close(self) -> None:
        self._open = False
        self.group.outstanding -= self._weight

    def _choose(self) -> Node | None:
        group = self.group
        best = None
        least = None
        if group.share < 1:
            places = sum(node.room for node in group.usable())
            if group.outstanding > max(self._weight, group.share * places):
                return None
        for node in group.usable():
            taking = node.taking and node.full_until <= self._clock.now and node not in self._tried
            if taking and node.outstanding + self._weight <= max(node.room, self._weight):
                rank = (node.suspect, node.load if self._weight else len(node.sessions), node.sent)
                if least is None or rank < least:
                    best, least = node, rank
        return best

    def _nobody(self) -> Answer:
        if self._refused:
            return self._refused
        self.group.refused += self._weight
        if any(self.group.usable()):
            said = f"sandbox: all nodes of partition {self.group.name or 'default'} are full; try again later"
            return refusal(429, said, "full", RETRY_S)
        return refusal(503, "sandbox: no node can take it now; try again later", "unavailable", 1.0)

    def _done(self, exchange: Exchange, answer: Message | None) -> None:
        node, entry = exchange.node, self.entry
        self._exchange = None
        if answer is None:
            self._tried.add(node)
            if exchange.sent:
                entry.lost.add((node, self._life))
            self.start()
            return
        status, word = int(answer.head.first[1]), ""
        got = Answer(status, answer.body, answer.head.headers.get(b"content-type", JSON), _retry_after(answer))
        if status in (429, 503):
            word = code(answer.body)
        if word in ("full", "closing", "broken"):
            self._tried.add(node)
            self._refused = got
            if word == "full" and self._weight:
                node.full_until = self._clock.now + min(got.retry_after_s or RETRY_S, RETRY_S)
            elif word != "full":
                node.suspect = True
            if word == "broken":
                entry.lost.add((node, self._life))
            if word != "broken" or not entry.killed:
                self.start()
                return
        self._finish(got)

    def _finish(self, answer: Answer) -> None:
        self._close()
        if answer.status < 300:
            self.group.latency.add(self._clock.now - self._began)
            self._figures.killed += self.entry.killed
        self._reply(answer)


def killed(entry: Entry) -> bytes:
    """The result of a job that was lost too often."""
    reason = f"its node was lost, {len(entry.lost)} times"
    return json.dumps(encode_result(Result(status=Status.KILLED, reason=reason, attempts=len(entry.lost)))).encode()


def code(body: bytes) -> str:
    """The word for programs in a refusal."""
    try:
        return str(json.loads(body)["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def view(id: str, state: str, result: bytes = b"null") -> Answer:
    """A job, as `serve` shows it."""
    text = b'{"id": "%s", "state": "%s", "result": %s, "error": ""}' % (id.encode(), state.encode(), result)
    return Answer(200, text)


def _retry_after(answer: Message) -> float | None:
    said = answer.head.headers.get(b"retry-after", b"")
    return float(said) if said.isdigit() else None


def without_partition(body: bytes) -> bytes:
    """For a node that does not know the front's name of it."""
    asked = json.loads(body)
    holder = asked.get("params", {}).get("arguments", {}) if "params" in asked else asked
    return body if holder.pop("partition", None) is None else json.dumps(asked).encode()


def placeless(asked: dict[str, Any]) -> dict[str, Any]:
    """What an id stands for: the job without how it is queued."""
    return {name: value for name, value in asked.items() if name not in ("id", "priority", "queue_s")}


def same(body: bytes, asked: dict[str, Any]) -> bool:
    return placeless(json.loads(body)) == placeless(asked)


def _number(value: Any, most: float) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return min(max(0.0, float(value)), most) if known and abs(value) < 1e9 else most


def allowed(asked: dict[str, Any]) -> float:
    """Seconds that a node may take at most, for jobs that wait in its queue and are run twice."""
    limits = asked.get("limits")
    wall_s = _number(limits.get("wall_s", 10.0) if isinstance(limits, dict) else 10.0, CEILING.wall_s)
    wall_s = CEILING.wall_s if "jobs" in asked else wall_s
    return _number(asked.get("queue_s", QUEUE_S), 86400.0) + 2 * (wall_s + SLACK_S)


def allowed_command(body: bytes) -> float:
    try:
        asked = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        asked = {}
    return _number(asked.get("timeout_s", 10.0), 600.0) + SLACK_S if isinstance(asked, dict) else SLACK_S
