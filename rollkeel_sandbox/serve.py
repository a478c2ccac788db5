"""`rollkeel-sandbox serve`: one process that listens, runs jobs, and ends when it is told to, without dropping what it promised."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.job import Level
from rollkeel_sandbox.partition import Partition
from rollkeel_sandbox.service import Service
from rollkeel_sandbox.sessions import Sessions, factory
from rollkeel_sandbox.tokens import load_token

KEEP_ALIVE_S = 75
BACKLOG = 1024
MAX_CONNECTIONS = 4096


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command, checked by it where it says so."""

    host: str = "127.0.0.1"
    port: int = 8787
    token_file: Path | None = None
    workers: int = 2
    partitions: tuple[str, ...] = ()
    """`NAME=WORKERS` or `NAME`; none at all is one named `default`."""
    queue: int = 1000
    minimum: str = "namespaces"
    backend: str = "auto"
    image: Path | None = None
    state: Path | None = None
    """None: a folder of the cache named by the port; nothing is kept with port 0."""
    terminals: int = 8
    max_request_mb: int = 64
    drain_s: float = 10.0
    stdio: bool = False


def partitions(options: Options) -> list[Partition]:
    """Raises `BadInput` for what is not NAME=WORKERS."""
    out = []
    for text in options.partitions or ("default",):
        name, _, count = text.partition("=")
        if count and not (count.isascii() and count.isdigit()):
            raise BadInput(f"--partition {text!r}: expected NAME=WORKERS")
        out.append(Partition(name=name, workers=int(count) if count else options.workers, queue=options.queue))
    return out


def serve(options: Options) -> int:
    """Until a signal. Raises `BadInput` for options that cannot be, an address that is taken, packages that are missing."""
    try:
        import fastapi  # noqa: F401
        import mcp  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise BadInput(f"sandbox serve: needs {error.name}; pip install 'rollkeel-sandbox[service]'") from None

    wanted = partitions(options)
    if options.stdio:
        return _stdio(options, wanted)
    with listen(options.host, options.port) as sock:
        port = sock.getsockname()[1]
        state = options.state or (default_state(port) if options.port else None)
        token, where = load_token(options.token_file, state)
        with _service(options, wanted, state) as service:
            sessions = Sessions(factory(service), most=options.terminals)
            service.gauges["terminals"] = sessions.count
            shown = f"[{options.host}]" if ":" in options.host else options.host
            lines = [
                f"sandbox at http://{shown}:{port} (OpenAPI /openapi.json, MCP /mcp)",
                f"isolation level: {service.level.name.lower()}; below {options.minimum} jobs are refused",
                f"token: {where}",
                f"state: {state or 'none; ids and results end with this process'}",
            ]
            print("\n".join(lines), flush=True)
            _run(options, service, sessions, token, sock)
    return 0


def _service(options: Options, wanted: list[Partition], state: Path | None) -> Service:
    minimum = Level[options.minimum.upper()]
    return Service(wanted, minimum=minimum, backend=options.backend, image=options.image, state=state)


def _run(options: Options, service: Service, sessions: Sessions, token: str, sock: socket.socket) -> None:
    import uvicorn

    from rollkeel_sandbox.api import build
    from rollkeel_sandbox.protocol import Protocol

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            service.drain()
            super().handle_exit(sig, frame)  # type: ignore[arg-type]

    config = uvicorn.Config(
        build(service, sessions, token, max_bytes=options.max_request_mb << 20),
        http=Protocol,
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(options.drain_s)),
        limit_concurrency=MAX_CONNECTIONS,
    )
    allow_descriptors()
    # The server passes a signal on to whoever had it before; that it has ended well is told by the exit code instead.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    since = time.monotonic()
    try:
        Server(config).run(sockets=[sock])
    finally:
        sessions.close_all()
        service.close(max(0.0, options.drain_s - (time.monotonic() - since)) if service.draining else 0.0)


def _stdio(options: Options, wanted: list[Partition]) -> int:
    from rollkeel_sandbox.mcp import make

    with _service(options, wanted, options.state) as service:
        print(f"sandbox: MCP on stdio; isolation level: {service.level.name.lower()}", file=sys.stderr, flush=True)
        sessions = Sessions(factory(service), most=options.terminals)
        try:
            make(service, sessions).run("stdio")
        finally:
            sessions.close_all()
    return 0


def allow_descriptors() -> None:
    """A connection takes one and a running job some: as many as this user may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Raises `BadInput`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"sandbox serve: cannot listen at {host}:{port}: {getattr(error, 'strerror', error)}") from None
    return sock


def default_state(port: int) -> Path:
    root = os.environ.get("ROLLKEEL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "rollkeel") / f"sandbox-{port}"
