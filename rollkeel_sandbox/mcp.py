"""The service's tools for language models, by the Model Context Protocol: streamable HTTP at `/mcp` behind the service's token, or stdio.

Needs the extra `service`. Bytes that are no UTF-8 come back as `{"base64": …}`, as over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import anyio.to_thread
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from pydantic import Field
from starlette.applications import Starlette

from rollkeel_sandbox import __version__, cases
from rollkeel_sandbox.codec import decode_job, encode_result
from rollkeel_sandbox.describe import describe
from rollkeel_sandbox.errors import SandboxError
from rollkeel_sandbox.guard import MAX_BODY_BYTES
from rollkeel_sandbox.job import KINDS, PRELOADS, Job, Result
from rollkeel_sandbox.records import View
from rollkeel_sandbox.schemas import CaseIn
from rollkeel_sandbox.service import Service
from rollkeel_sandbox.sessions import Sessions

Source = Annotated[str, Field(description="The whole program.")]
Kind = Annotated[str, Field(description=f"One of {', '.join(KINDS)}.")]
Preload = Annotated[str, Field(description=f"Python modules that are there at once: {', '.join(PRELOADS)}.")]
Timeout = Annotated[
    float | None, Field(gt=0, description="Seconds until it is killed; the server's default if left out.")
]
Memory = Annotated[int | None, Field(gt=0, description="MB for all its processes; the server's default if left out.")]
Where = Annotated[str | None, Field(description="Partition; the server's first one if left out.")]


def build(service: Service, sessions: Sessions, *, max_bytes: int = MAX_BODY_BYTES) -> tuple[MCPServer, Starlette]:
    """The server, whose session manager must be run, and the ASGI application that speaks at `/mcp`."""
    server = make(service, sessions)
    # Without sessions, so that a restart of the server is none of its clients' business.
    # Names of hosts are not checked: a page that rebinds a name has no token.
    lax = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        streamable_http_path="/mcp",
        json_response=True,
        stateless_http=True,
        transport_security=lax,
        max_request_body_size=max_bytes,
    )
    return server, app


def make(service: Service, sessions: Sessions) -> MCPServer:
    """The tools alone, for any transport."""
    server = MCPServer("rollkeel-sandbox", version=__version__, log_level="ERROR", instructions=__doc__)

    @server.tool()
    async def run_code(
        source: Source,
        kind: Kind = "python",
        preload: Preload = "code",
        stdin: str = "",
        files: Annotated[
            dict[str, str] | None, Field(description="Relative path to text, written before the start.")
        ] = None,
        args: list[str] | None = None,
        collect: Annotated[list[str] | None, Field(description="Relative paths of files to bring back.")] = None,
        timeout_s: Timeout = None,
        memory_mb: Memory = None,
        partition: Where = None,
    ) -> dict[str, Any]:
        """Run a program in isolation and return how it ended, what it printed and the files asked for."""
        value: dict[str, Any] = {"source": source, "kind": kind, "preload": preload, "stdin": stdin}
        value |= {"files": files or {}, "args": args or [], "collect": collect or []}
        job = _job(service, value, timeout_s, memory_mb, partition)
        return encode_result((await _results(service, [job], partition))[0])

    @server.tool()
    async def run_tests(
        source: Source,
        tests: Annotated[list[CaseIn], Field(min_length=1, description="Standard inputs and what must be printed.")],
        kind: Kind = "python",
        preload: Preload = "code",
        timeout_s: Timeout = None,
        memory_mb: Memory = None,
        partition: Where = None,
    ) -> dict[str, Any]:
        """Run a program once per test, in isolation, and compare what it prints with what is expected."""
        with _told():
            listed = [test.case() for test in tests]
        job = _job(service, {"source": source, "kind": kind, "preload": preload}, timeout_s, memory_mb, partition)
        results = await _results(service, cases.jobs(job, listed), partition)
        verdicts = [cases.passed(result, case) for result, case in zip(results, listed, strict=True)]
        rows = [{"passed": v, "result": encode_result(r)} for v, r in zip(verdicts, results, strict=True)]
        return {"passed": sum(verdicts), "total": len(verdicts), "tests": rows}

    @server.tool()
    async def doctor() -> dict[str, Any]:
        """Isolation level and layers of this machine, kinds of programs, partitions with their limits."""
        return describe(service, sessions)

    if sessions.available:
        _terminals(server, service, sessions)
    return server


def _terminals(server: MCPServer, service: Service, sessions: Sessions) -> None:
    @server.tool()
    async def terminal_open(memory_mb: Memory = None, partition: Where = None) -> dict[str, str]:
        """Open a shell in isolation, with a file system that is thrown away. Returns its id."""
        asked = {} if memory_mb is None else {"memory_mb": memory_mb}
        with _told():
            service.check(decode_job({"source": "", "limits": asked}), partition)
            return {"id": await anyio.to_thread.run_sync(sessions.open, asked)}

    @server.tool()
    async def terminal_exec(id: str, command: str, timeout_s: Annotated[float, Field(gt=0)] = 10.0) -> dict[str, Any]:
        """Send one command line to an open shell and return what it printed and its exit code."""
        with _told():
            result, alive = await anyio.to_thread.run_sync(sessions.exec, id, command, timeout_s)
        return encode_result(result) | {"alive": alive}

    @server.tool()
    async def terminal_close(id: str) -> dict[str, str]:
        """End a shell and everything in it."""
        with _told():
            await anyio.to_thread.run_sync(sessions.close, id)
        return {"closed": id}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What this package refuses is told to the model."""
    try:
        yield
    except SandboxError as error:
        raise ToolError(str(error)) from None


def _job(
    service: Service, value: dict[str, Any], timeout_s: float | None, memory_mb: int | None, partition: str | None
) -> Job:
    limits = {"wall_s": timeout_s, "cpu_s": timeout_s, "memory_mb": memory_mb}
    with _told():
        return decode_job(value | {"limits": limits}, service.defaults(partition))


async def _results(service: Service, jobs: Sequence[Job], partition: str | None) -> list[Result]:
    """All of them; jobs whose caller is gone are ended."""
    with _told():
        names = service.submit_all(jobs, partition=partition, kept=False)
        futures = [service.watch(name) for name in names]
        try:
            views: list[View] = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:
            for name, future in zip(names, futures, strict=True):
                service.unwatch(name, future)
        return [view.require() for view in views]
