"""`rollkeel-sandbox front`: one address for many nodes. What `serve` answers, this answers, from the node that it finds best."""

from __future__ import annotations

import asyncio
import hmac
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rollkeel_sandbox import metrics
from rollkeel_sandbox.errors import nearest
from rollkeel_sandbox.groups import Group, Part, together
from rollkeel_sandbox.http1 import Head, Message
from rollkeel_sandbox.job import Level
from rollkeel_sandbox.nodes import JSON_HEADER, TICK_S, Clock, Exchange, Node
from rollkeel_sandbox.orders import Answer, Entry, Figures, Order, allowed, allowed_command, killed, refusal, same, view
from rollkeel_sandbox.partition import ID

KEEP_S, MAX_KEPT, MAX_KEPT_BYTES = 900.0, 200_000, 256 << 20
"""Seconds for which a job is known after it should have ended, and how many and how large."""
MAX_WAIT_S, OPEN_S = 60.0, 60.0
UNKNOWN = refusal(404, "sandbox: nothing is there", "unknown")
METHOD = refusal(405, "sandbox: not with this method", "method")
UNAUTHORIZED = refusal(
    401, "expected the header 'Authorization: Bearer TOKEN' with this server's token", "unauthorized"
)
LOST = refusal(410, "sandbox: the session is lost with its node; open another one", "session_lost")
SESSION = refusal(404, "sandbox: no such terminal session; it never was open or is closed", "unknown")
TAKES = ("/v1/run", "/v1/jobs", "/v1/batch", "/v1/tests")
Reply = Callable[[Answer], None]
Drop = Callable[[], object]
"""What to call when the client has hung up."""


class Front:
    """All of it but the clients' connections. `handle` answers a request; to be used within one event loop."""

    def __init__(
        self, urls: Sequence[str], parts: Sequence[Part], token: str, node_token: str, *, every_s: float = 1.0
    ) -> None:
        self.clock, self.figures = Clock(), Figures()
        self._token = token.encode()
        by_url = {url: Node(url, node_token, self.clock, every_s, self._lost) for url in urls}
        self.nodes = list(by_url.values())
        self._everyone = Group("", self.nodes)
        self.groups = {
            part.name: Group(
                part.name, [by_url[u] for u in part.nodes], part.share, part.kinds, Level[part.minimum.upper()]
            )
            for part in parts
        }
        self._found: dict[str, Group] = {}
        """Partitions that nodes have and the file does not name."""
        self._entries: dict[str, Entry] = {}
        self._held = 0
        self._homeless: list[tuple[str, Entry]] = []
        self._sessions: dict[str, tuple[Node, int]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Returns when each node was asked once."""
        loop = asyncio.get_running_loop()
        self.clock.tick(loop.time())
        self._tasks = [loop.create_task(self._tick()), *(loop.create_task(node.watch()) for node in self.nodes)]
        until = loop.time() + OPEN_S
        while loop.time() < until and any(
            n.circuit.state == "half_open" or (not n.circuit.misses and not n.up) for n in self.nodes
        ):
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for node in self.nodes:
            node.close()

    def allows(self, head: Head) -> bool:
        """The token is right."""
        scheme, _, token = head.headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)

    def handle(self, request: Message, reply: Reply) -> Drop | None:
        """`reply` is called once, perhaps before this returns."""

        def counted(answer: Answer) -> None:
            self.figures.answers[answer.status] = self.figures.answers.get(answer.status, 0) + 1
            reply(answer)

        method, target = request.head.first[0].decode(), request.head.first[1].decode()
        path = target.partition("?")[0]
        if not self.allows(request.head):
            counted(UNAUTHORIZED)
        elif path in TAKES or path == "/v1/terminals":
            return self._take(path, request, counted) if method == "POST" else counted(METHOD)
        elif path == "/mcp":
            return self._tool(request, counted) if method == "POST" else counted(METHOD)
        elif path.startswith("/v1/jobs/"):
            return self._named(method, target, path[9:], counted) if method in ("GET", "DELETE") else counted(METHOD)
        elif path.startswith("/v1/terminals/"):
            id, _, verb = path[14:].partition("/")
            if (method, verb) in (("POST", "exec"), ("DELETE", "")):
                return self._session(method, target, id, request.body, counted)
            counted(METHOD if verb in ("", "exec") else UNKNOWN)
        elif path in ("/v1/health", "/v1/capabilities", "/v1/metrics", "/metrics", "/openapi.json"):
            return self._about(path, counted) if method == "GET" else counted(METHOD)
        else:
            counted(UNKNOWN)
        return None

    def _take(self, path: str, request: Message, reply: Reply) -> Drop | None:
        """Jobs, and what is placed like them."""
        try:
            asked = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            return reply(refusal(400, f"the body is no JSON: {error}", "malformed"))
        if not isinstance(asked, dict):
            return reply(refusal(422, "body: expected an object", "invalid"))
        group = self._group(asked)
        if isinstance(group, Answer):
            return reply(group)
        body = request.body
        kept = path == "/v1/jobs"
        weight = 0 if path == "/v1/terminals" else 1
        for many in ("jobs", "cases"):
            weight = max(weight, len(asked[many])) if isinstance(asked.get(many), list) else weight
        if kept and asked.get("id") is None:
            asked["id"] = uuid.uuid4().hex
            body = json.dumps(asked).encode()
        id = asked.get("id")
        entry = Entry()
        ids = []
        if path in ("/v1/run", "/v1/jobs") and isinstance(id, str) and ID.fullmatch(id):
            entry, ids = self._entries.get(id) or entry, [id]
            if entry.body and (entry.result or not entry.here) and not same(entry.body, asked):
                return reply(refusal(409, f"sandbox: id {id} belongs to another job; choose a new one", "conflict"))
            if entry.result:
                return reply(view(id, "done", entry.result) if kept else Answer(200, entry.result))
        elif path == "/v1/batch" and isinstance(asked.get("jobs"), list):
            named = [job.get("id") for job in asked["jobs"] if isinstance(job, dict)]
            ids = list(dict.fromkeys(name for name in named if isinstance(name, str) and ID.fullmatch(name)))
        fresh = bool(ids) and ids[0] not in self._entries
        allowed_s = OPEN_S if kept or not weight else allowed(asked)
        order = Order(
            group, self.figures, self.clock, lambda answer: self._took(path, ids, fresh, entry, answer, reply),
            target=path, body=body, weight=weight, allowed_s=allowed_s, entry=entry,
        )  # fmt: skip
        if fresh:
            entry.body, entry.until = body, self.clock.now + allowed(asked) + KEEP_S
            for name in ids:
                self._held += len(body) if self._entries.setdefault(name, entry) is entry else 0
        order.start()
        return None if kept else order.drop

    def _took(self, path: str, ids: list[str], fresh: bool, entry: Entry, answer: Answer, reply: Reply) -> None:
        if answer.status == 200 and path == "/v1/run":
            entry.result = answer.body if ids else b""
            self._held += len(entry.result)
        elif answer.status == 200 and path == "/v1/jobs":  # it was lost too often
            answer = view(ids[0], "done", answer.body)
        elif answer.status == 201 and entry.node:
            self._opened(json.loads(answer.body).get("id"), entry.node)
        entry.kept = entry.kept or answer.status == 202
        if answer.status >= 300 and fresh and not entry.lost:  # not taken
            for name in [name for name in ids if self._entries.get(name) is entry]:
                self._held -= len(self._entries.pop(name).body)
        reply(answer)

    def _group(self, asked: dict[str, Any]) -> Group | Answer:
        """By name, else by the kind of program."""
        name, kind = asked.get("partition"), asked.get("kind", "python")
        if not isinstance(name, str):
            return next((g for g in self.groups.values() if kind in g.kinds), self._everyone)
        if name in self.groups:
            return self.groups[name]
        nodes = [node for node in self.nodes if name in node.partitions]
        if not nodes and any(node.up for node in self.nodes):
            known = sorted({*self.groups, *(p for node in self.nodes for p in node.partitions)})
            said = f"sandbox: partition {name[:80]!r} is unknown{nearest(name[:80], known)}"
            return refusal(422, said, "invalid")
        group = self._found.setdefault(name, Group(name, [])) if nodes else self._everyone
        group.nodes = nodes or self.nodes
        return group

    def _named(self, method: str, target: str, id: str, reply: Reply) -> Drop | None:
        """A job that was taken before."""
        if not ID.fullmatch(id):
            return reply(refusal(422, "path.id: expected up to 64 of a-z, A-Z, 0-9, '-', '_', '.'", "invalid"))
        entry = self._entries.get(id)
        if entry is None:
            return self._search(method, target, [node for node in self.nodes if node.up], reply)
        if entry.here and entry.node:
            exchange = entry.node.ask(
                method,
                target,
                b"",
                lambda _, got: self._seen(id, entry, method, got, reply),
                allowed_s=MAX_WAIT_S + OPEN_S,
            )
            return exchange.drop
        if method == "DELETE" and not (entry.result or entry.killed):
            entry.kept = False
            self._held -= len(self._entries.pop(id).body)
            return reply(view(id, "cancelled"))
        if entry.result or entry.killed:
            return reply(view(id, "done", entry.result or killed(entry)))
        return reply(view(id, "queued"))

    def _seen(self, id: str, entry: Entry, method: str, got: Message | None, reply: Reply) -> None:
        """The node's answer about a job; its result is kept here too, as the node may die."""
        if got is None:
            return reply(view(id, "queued"))
        answer = _passed(got)
        if answer.status == 200 and not entry.result:
            said = json.loads(answer.body)
            if said.get("state") == "done":
                entry.result = json.dumps(said["result"]).encode()
                self._held += len(entry.result)
            elif said.get("state") != "queued" and said.get("state") != "running":
                entry.kept = False
        reply(answer)

    def _search(self, method: str, target: str, nodes: list[Node], reply: Reply) -> Drop | None:
        """A job of before this front's start: the first node that knows it."""
        if not nodes:
            return reply(UNKNOWN)
        node, rest = nodes[0], nodes[1:]

        def done(_: Exchange, got: Message | None) -> None:
            if got is None or got.head.first[1] == b"404":
                self._search(method, target, rest, reply)
            else:
                reply(_passed(got))

        exchange = node.ask(method, target, b"", done, allowed_s=MAX_WAIT_S + OPEN_S)
        return exchange.drop

    def _opened(self, id: Any, node: Node) -> None:
        if isinstance(id, str):
            self._sessions[id] = (node, node.life)
            node.sessions.add(id)

    def _session(
        self, method: str, target: str, id: str, body: bytes, reply: Reply, headers: bytes = JSON_HEADER
    ) -> Drop | None:
        """Always to the node that has it; what was typed is never typed a second time."""
        node, life = self._sessions.get(id, (None, 0))
        if node is None:
            return reply(SESSION)

        def lost(answer: Answer = LOST) -> None:
            if self._sessions.pop(id, None):
                self.figures.lost_sessions += 1
            reply(answer)

        def done(exchange: Exchange, got: Message | None) -> None:
            if got is None:
                return lost()
            answer = _passed(got)
            ended = answer.status == 404 or (answer.status == 200 and json.loads(answer.body).get("alive") is False)
            if ended or (method == "DELETE" and answer.status == 200):
                self._sessions.pop(id, None)
                node.sessions.discard(id)
            reply(answer)

        if life != node.life:
            return lost()
        exchange = node.ask(method, target, body, done, allowed_s=allowed_command(body), headers=headers)
        return exchange.drop

    def _tool(self, request: Message, reply: Reply) -> Drop | None:
        """MCP: passed on, tools for a session to its node."""
        wanted = (b"accept", b"content-type", b"mcp-protocol-version", b"mcp-method", b"mcp-name")
        rows = [(n, v) for n, v in request.head.headers.items() if n in wanted or n.startswith(b"mcp-")]
        headers = b"".join(b"%s: %s\r\n" % row for row in rows)
        try:
            asked = json.loads(request.body)
            tool, given = asked["params"]["name"], asked["params"].get("arguments", {})
            session = given.get("id") if tool in ("terminal_exec", "terminal_close") else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            tool = ""
            given = {}
            session = None
        if session in self._sessions:
            return self._session("POST", "/mcp", session, request.body, reply, headers)
        group = self._group({"partition": given.get("partition")} if isinstance(given, dict) else {})
        if isinstance(group, Answer):
            return reply(group)
        entry = Entry()

        def done(answer: Answer) -> None:
            if tool == "terminal_open" and answer.status == 200 and entry.node:
                self._opened(
                    (json.loads(answer.body).get("result", {}).get("structuredContent") or {}).get("id"), entry.node
                )
            reply(answer)

        order = Order(
            group, self.figures, self.clock, done, target="/mcp", body=request.body,
            weight=1, allowed_s=allowed({"jobs": []}), entry=entry, headers=headers,
        )  # fmt: skip
        order.start()
        return order.drop

    def _about(self, path: str, reply: Reply) -> Drop | None:
        up = [node for node in self.nodes if node.up]
        if path == "/metrics":
            return reply(
                Answer(200, metrics.front_text(self.report()).encode(), b"text/plain; version=0.0.4; charset=utf-8")
            )
        if path == "/v1/metrics":
            return reply(Answer(200, json.dumps(self.report()).encode()))
        if path == "/v1/health":
            said = {"ok": bool(up), "nodes": self.report()["nodes"]}
            if not up:
                said |= {"error": "sandbox: no node is in use", "code": "unhealthy"}
            return reply(Answer(200 if up else 503, json.dumps(said).encode()))
        if not up:
            return reply(refusal(503, "sandbox: no node can answer now; try again later", "unavailable", 1.0))
        if path == "/v1/capabilities":
            return reply(Answer(200, json.dumps(together([node.abilities for node in up], self.groups)).encode()))
        exchange = up[0].ask("GET", path, b"", lambda _, got: reply(_passed(got) if got else UNKNOWN), allowed_s=OPEN_S)
        return exchange.drop

    def report(self) -> dict[str, Any]:
        """Figures by partition and by node."""
        groups = {"default": self._everyone} | self._found | self.groups
        parts = {
            name: {"outstanding": g.outstanding, "taken": g.taken, "refused": g.refused, "latency": g.latency.summary()}
            for name, g in groups.items()
        }
        nodes = {
            n.url: {
                "state": n.circuit.state.value, "up": int(n.up), "outstanding": n.outstanding, "foreign": n.foreign,
                "workers": n.workers, "sent": n.sent, "failed": n.failed, "isolated": n.circuit.isolated,
                "deadline_seconds": round(n.circuit.deadline_s, 3),
            }
            for n in self.nodes
        }  # fmt: skip
        counts = {"answers": self.figures.answers, "reissued": self.figures.reissued, "killed": self.figures.killed}
        more = {
            "terminals": len(self._sessions),
            "lost_sessions": self.figures.lost_sessions,
            "known": len(self._entries),
        }
        return {"partitions": parts, "nodes": nodes} | counts | more

    def _lost(self, node: Node) -> None:
        """What a node had is gone; jobs that nobody waits for are given to another."""
        for id, entry in self._entries.items():
            if entry.node is node and entry.kept and not entry.result and not entry.killed:
                entry.lost.add((node, entry.life))
                self._homeless.append((id, entry))

    def _settle(self) -> None:
        waiting, self._homeless = self._homeless, []
        for id, entry in waiting:
            if entry.here or entry.killed or entry.result or not entry.kept:
                continue
            asked = json.loads(entry.body)
            group = self._group(asked)

            def placed(answer: Answer, id: str = id, entry: Entry = entry) -> None:
                if answer.status >= 300 and not entry.killed:
                    entry.node = None
                    self._homeless.append((id, entry))

            if isinstance(group, Group):
                Order(
                    group, self.figures, self.clock, placed, target="/v1/jobs", body=entry.body, weight=1, allowed_s=OPEN_S, entry=entry,
                ).start()  # fmt: skip

    def _forget(self) -> None:
        while self._entries:
            id, entry = next(iter(self._entries.items()))
            if entry.until > self.clock.now and len(self._entries) <= MAX_KEPT and self._held <= MAX_KEPT_BYTES:
                return
            del self._entries[id]
            self._held -= len(entry.body) + len(entry.result)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self.clock.tick(loop.time())
            for node in self.nodes:
                node.tick()
            self._settle()
            self._forget()


def _passed(got: Message) -> Answer:
    return Answer(int(got.head.first[1]), got.body, got.head.headers.get(b"content-type", b"application/json"))
