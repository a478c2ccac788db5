"""The service over HTTP, with an OpenAPI document at `/openapi.json`. Needs the extra `service`.

Every request needs the token (`guard.py`). Errors are one line of JSON: `{"error": …, "code": …}`. Whatever is sent, the answer is no
5xx; 503 says that the service cannot run jobs now, and that this one has surely not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from rollkeel_sandbox import __version__, cases, metrics
from rollkeel_sandbox import schemas as s
from rollkeel_sandbox.codec import decode_job, encode_result
from rollkeel_sandbox.describe import describe
from rollkeel_sandbox.errors import SandboxError
from rollkeel_sandbox.guard import MAX_BODY_BYTES, Guard
from rollkeel_sandbox.job import Job, Refused
from rollkeel_sandbox.kinds import MissingTool
from rollkeel_sandbox.partition import Closing, Full
from rollkeel_sandbox.records import Conflict, State, Unknown, View
from rollkeel_sandbox.service import Service
from rollkeel_sandbox.sessions import Sessions
from rollkeel_sandbox.tokens import error_body

MAX_WAIT_S = 60.0
Id = Annotated[str, Path(pattern=s.ID_PATTERN)]
CODES = {400: "malformed", 404: "unknown", 405: "method", 422: "invalid"}
KINDS_OF_ERRORS = (
    (Conflict, 409, "conflict"),
    (Refused, 403, "refused"),
    (Unknown, 404, "unknown"),
    (MissingTool, 422, "missing_tool"),
)
WHEN = {
    400: "The body is no JSON.",
    401: "No token or a wrong one.",
    403: "The isolation of this machine is below the minimum of this service.",
    404: "Not here, never or no longer.",
    405: "Not with this method.",
    408: "The body did not come in time.",
    409: "The id belongs to another job, or the session is busy.",
    410: "The job was cancelled.",
    413: "The body is too large.",
    422: "What was asked for is not possible, whatever the load.",
    429: "The queue is full, or the job was not started in time: it has not run. See Retry-After.",
    503: "The service cannot run jobs now: it is about to end, or broken.",
}


class Gone(Exception):
    """The client has hung up."""


class Json(JSONResponse):
    """ASCII, so that there is nothing that cannot be encoded."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def answers(*codes: int) -> dict[int | str, dict[str, Any]]:
    """What an endpoint may answer besides success."""
    return {
        code: {"model": s.ErrorOut, "description": WHEN[code]}
        for code in sorted({400, 401, 405, 408, 413, 422, *codes})
    }


TAKES = answers(403, 409, 410, 429, 503)


def build(service: Service, sessions: Sessions, token: str, *, max_bytes: int = MAX_BODY_BYTES) -> Guard:
    """The ASGI application, HTTP and MCP. Ending it is the caller's business, as is the service's end."""
    from rollkeel_sandbox.mcp import build as build_mcp

    tools, tools_app = build_mcp(service, sessions, max_bytes=max_bytes)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with tools.session_manager.run():
            yield

    app = FastAPI(
        title="rollkeel-sandbox",
        version=__version__,
        description="Programs that nobody has read, run behind isolation. Every request needs `Authorization: Bearer TOKEN`.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=life,
        default_response_class=Json,
    )
    _jobs(app, service)
    _runs(app, service)
    _terminals(app, service, sessions)
    _about(app, service, sessions)
    _errors(app)
    _document(app)
    app.router.routes.extend(tools_app.routes)
    return Guard(app, token, max_bytes=max_bytes)


def _jobs(app: FastAPI, service: Service) -> None:
    @app.post("/v1/jobs", status_code=202, response_model=s.ViewOut, responses=TAKES, operation_id="submit")
    async def submit(body: s.RunIn) -> Json:
        """Take a job; it runs though nobody waits for it, and after a restart of the server too."""
        name = service.submit(_job(body, service, body.partition), id=body.id, kept=True, **_placed(body))
        return Json(_view(service.view(name)), 202)

    @app.get("/v1/jobs/{id}", response_model=s.ViewOut, responses=answers(404, 503), operation_id="result")
    async def result(request: Request, id: Id, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> Json:
        """A job and, once it is done, its result. Waits for that up to `wait_s` seconds."""
        return Json(_view((await _all(request, service, [id], wait_s))[0] if wait_s else service.view(id)))

    @app.delete("/v1/jobs/{id}", response_model=s.ViewOut, responses=answers(404), operation_id="cancel")
    async def cancel(id: Id) -> Json:
        """End a job that waits or runs."""
        return Json(_view(service.cancel(id)))


def _runs(app: FastAPI, service: Service) -> None:
    @app.post("/v1/run", response_model=s.ResultOut, responses=TAKES, operation_id="run")
    async def run(request: Request, body: s.RunIn) -> Response:
        """Run a job and wait for its result. A client that hangs up ends it."""
        name = service.submit(_job(body, service, body.partition), id=body.id, kept=False, **_placed(body))
        return _outcome((await _all(request, service, [name]))[0])

    @app.post("/v1/batch", response_model=s.BatchOut, responses=TAKES, operation_id="batch")
    async def batch(request: Request, body: s.BatchIn) -> Json:
        """Run all jobs and wait for all results, in the order of the jobs."""
        jobs = [_job(job, service, body.partition) for job in body.jobs]
        names = service.submit_all(jobs, ids=[job.id for job in body.jobs], kept=False, **_placed(body))
        return Json({"jobs": [_view(view) for view in await _all(request, service, names)]})

    @app.post("/v1/tests", response_model=s.TestsOut, responses=TAKES, operation_id="tests")
    async def tests(request: Request, body: s.TestsIn) -> Response:
        """Run a program once per case and compare what it prints. The program never sees what is expected."""
        listed = [case.case() for case in body.cases]
        jobs = cases.jobs(_job(body, service, body.partition), listed)
        views = await _all(request, service, service.submit_all(jobs, kept=False, **_placed(body)))
        for view in views:
            if view.result is None:
                return _outcome(view)
        results = [view.require() for view in views]
        verdicts = [cases.passed(result, case) for result, case in zip(results, listed, strict=True)]
        rows = [{"passed": v, "result": encode_result(r)} for v, r in zip(verdicts, results, strict=True)]
        return Json({"passed": sum(verdicts), "total": len(verdicts), "cases": rows})


def _terminals(app: FastAPI, service: Service, sessions: Sessions) -> None:
    # Plain functions: they block, and so run in threads.
    @app.post(
        "/v1/terminals",
        status_code=201,
        response_model=s.TerminalOut,
        responses=answers(403, 404, 429, 503),
        operation_id="terminal_open",
    )
    def open_(body: s.TerminalIn) -> Json:
        """A shell of its own, with a file system that is thrown away; closed when it is not used for long."""
        asked = body.limits.model_dump(exclude_none=True) if body.limits else {}
        service.check(decode_job({"source": "", "limits": asked}), body.partition)
        return Json({"id": sessions.open(asked)}, 201)

    @app.post(
        "/v1/terminals/{id}/exec",
        response_model=s.ExchangeOut,
        responses=answers(404, 409, 503),
        operation_id="terminal_exec",
    )
    def exec_(id: Id, body: s.CommandIn) -> Json:
        """Send one command line and wait for its end."""
        result, alive = sessions.exec(id, body.command, body.timeout_s)
        return Json(encode_result(result) | {"alive": alive})

    @app.delete(
        "/v1/terminals/{id}", response_model=s.ClosedOut, responses=answers(404, 409), operation_id="terminal_close"
    )
    def close(id: Id) -> Json:
        """End the shell and everything in it."""
        sessions.close(id)
        return Json({"closed": id})


def _about(app: FastAPI, service: Service, sessions: Sessions) -> None:
    @app.get("/v1/capabilities", responses=answers(), operation_id="capabilities")
    async def capabilities() -> dict[str, Any]:
        """Isolation level and layers, kinds of programs, partitions with their limits."""
        return describe(service, sessions)

    @app.get("/v1/health", responses=answers(503), operation_id="health")
    async def health() -> Json:
        """Whether jobs are taken, and each worker's state. 503 when they are not."""
        found = service.health()
        why = found["fault"] or "the service is about to end"
        return Json(found, 200) if found["ok"] else Json(found | {"error": why, "code": "unhealthy"}, 503)

    @app.get("/v1/metrics", responses=answers(), operation_id="metrics")
    async def figures() -> dict[str, Any]:
        """Queue, counts and latencies by partition."""
        return service.metrics()

    @app.get("/metrics", response_class=PlainTextResponse, responses=answers(), operation_id="prometheus")
    async def prometheus() -> PlainTextResponse:
        """The same for Prometheus."""
        return PlainTextResponse(metrics.text(service.metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")


def _errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, SandboxError)
        return problem(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = CODES.get(error.status_code, "http")
        return _error(error.status_code, str(error.detail), code, headers=dict(error.headers or {}))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error(400, f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}", "malformed")
        where = ".".join(str(part) for part in first["loc"])
        return _error(422, f"{where}: {first['msg']}", "invalid")

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.add_exception_handler(SandboxError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Gone, gone)


def problem(error: SandboxError) -> Response:
    """The answer for an error of this package."""
    if isinstance(error, Full):
        return _error(429, str(error), "full", retry_after_s=error.retry_after_s)
    if isinstance(error, Closing):
        return _error(503, str(error), "closing", retry_after_s=1.0)
    for kind, status, code in KINDS_OF_ERRORS:
        if isinstance(error, kind):
            return _error(status, str(error), code)
    if error.exit_code == 2:
        return _error(422, str(error), "invalid")
    return _error(503, str(error), "broken", retry_after_s=5.0)


def _error(
    status: int, message: str, code: str, *, retry_after_s: float | None = None, headers: dict[str, str] | None = None
) -> Response:
    more: dict[str, Any] = {} if retry_after_s is None else {"retry_after_s": round(retry_after_s, 3)}
    sent = dict(headers or {}) | ({} if retry_after_s is None else {"retry-after": str(math.ceil(retry_after_s))})
    return Response(error_body(message, code, **more), status, headers=sent, media_type="application/json")


def _document(app: FastAPI) -> None:
    """Every operation needs the token, which the guard outside asks for."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = document


async def _all(request: Request, service: Service, ids: list[str], wait_s: float | None = None) -> list[View]:
    """How the jobs ended, or are after `wait_s`. Raises `Gone` when the client hangs up, and lets go of the jobs."""
    futures = [service.watch(id) for id in ids]
    done = asyncio.gather(*map(asyncio.wrap_future, futures))
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({done, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        if gone.done():
            raise Gone
        return [service.view(id) for id in ids]
    finally:
        gone.cancel()
        done.cancel()
        for id, future in zip(ids, futures, strict=True):
            service.unwatch(id, future)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _outcome(view: View) -> Response:
    if view.result is not None:
        return Json(encode_result(view.result))
    if view.state is State.EXPIRED:
        return _error(429, f"sandbox: {view.error}; it has not run", "expired", retry_after_s=1.0)
    if view.state is State.CANCELLED:
        return _error(410, "sandbox: the job was cancelled", "cancelled")
    return _error(503, view.error or "sandbox: the job has no result", "broken", retry_after_s=5.0)


def _view(view: View) -> dict[str, Any]:
    result = None if view.result is None else encode_result(view.result)
    return {"id": view.id, "state": view.state.value, "result": result, "error": view.error}


def _job(body: s.JobIn, service: Service, partition: str | None) -> Job:
    return decode_job(body.model_dump(include=set(s.JobIn.model_fields)), service.defaults(partition))


def _placed(body: s._Placed) -> dict[str, Any]:
    return {"partition": body.partition, "priority": body.priority, "queue_s": body.queue_s}
