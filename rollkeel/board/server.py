"""The board's web server: files of the page, and JSON. Nothing is written, and no path comes from a request."""

from __future__ import annotations

import ipaddress
import json
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rollkeel.board.doctor import Doctor
from rollkeel.board.runs import Run, Runs, curves, differing, metrics_of
from rollkeel.board.tokens import SORTS, Place, Tokens
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.report.run_files import read_run
from rollkeel.report.standalone import STYLE
from rollkeel.report.verdict import of_metrics

_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = {f"/{file.name}": (_TYPES[file.suffix], file) for file in sorted(_PAGE.iterdir()) if file.suffix in _TYPES}
"""Everything that is served from the disk as it is."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOK_S = 2.0
"""Seconds between two looks for new run folders, at least."""
MOST_TOKENS, MOST_ROLLOUTS, MOST_POINTS = 5000, 500, 5000


class Asked:
    """The query of a request. Its readers raise `BadInput` for a value that is missing or of another kind."""

    def __init__(self, query: str) -> None:
        self._pairs = parse_qsl(query, keep_blank_values=True)
        self._values = dict(self._pairs)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name, default)
        if value is None:
            raise BadInput(f"{name}: expected a value, got none")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        text = self.text(name, None if default is None else str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise BadInput(f"{name}: expected a number, got {text[:40]!r}")
        return value

    def count(self, name: str, default: int | None = None, most: int = 2**62) -> int:
        value = self.number(name, default)
        if not 0 <= value <= most:
            raise BadInput(f"{name}: expected a number from 0 to {most}, got {value:g}")
        return int(value)


class Board:
    """Answers of the board, each a JSON value."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises `BadInput` for a folder that is not there."""
        self.runs = Runs(roots)
        self.runs.look()
        self.doctor = Doctor()
        self._tokens: dict[int, Tokens] = {}
        self._began = time.time_ns()
        self.answers: Mapping[str, Callable[[Asked], Any]] = {
            "/api/runs": self._list,
            "/api/metrics": lambda asked: metrics_of(self._of(asked)),
            "/api/curves": self._curves,
            "/api/settings": lambda asked: differing(self._of(asked)),
            "/api/verdict": self._verdict,
            "/api/steps": lambda asked: self._tokens_of(asked).steps(),
            "/api/rollouts": self._rollouts,
            "/api/tokens": self._page,
        }

    def _of(self, asked: Asked) -> list[Run]:
        return [self.runs.get(int(n) if n.isdecimal() else -1) for n in asked.all("run")]

    def _list(self, asked: Asked) -> Any:
        for run in self._of(asked):
            self.doctor.ask(run)
        each = []
        for run in self.runs.look(LOOK_S):
            known = self.doctor.known(run)
            each.append(
                {**run.summary(), "doctor": known.get("healthy") if known.get("state") == "said" else "unknown"}
            )
        return {"board": self._began, "where": ", ".join(map(str, self.runs.roots)), "runs": each}

    def _curves(self, asked: Asked) -> Any:
        points = max(asked.count("points", 600, MOST_POINTS), 8)
        return curves(
            self._of(asked), asked.all("key"), points, asked.number("from", -math.inf), asked.number("to", math.inf)
        )

    def _verdict(self, asked: Asked) -> Any:
        run = self.runs.get(asked.count("run"))
        words, problems = [], list[str]()
        try:
            if problem := run.leads_out():
                raise BadInput(problem)
            files = read_run(run.path)
            words = [vars(word) for word in (of_metrics(files) if files.rows else [])]
            problems = files.problems[:20]
        except RollkeelError as error:
            problems.append(str(error))
        return {"words": words, "problems": problems, "doctor": self.doctor.ask(run)}

    def _tokens_of(self, asked: Asked) -> Tokens:
        run = self.runs.get(asked.count("run"))
        return self._tokens.setdefault(run.number, Tokens(run.path))

    def _rollouts(self, asked: Asked) -> Any:
        sort = asked.text("sort", "order")
        if sort not in SORTS:
            raise BadInput(f"sort: expected {', '.join(SORTS)}, got {sort[:40]!r}")
        first, count = asked.count("first", 0), asked.count("count", 100, MOST_ROLLOUTS)
        return self._tokens_of(asked).rollouts(asked.count("step"), sort, first, count)

    def _page(self, asked: Asked) -> Any:
        tokens, step = self._tokens_of(asked), asked.count("step")
        row = asked.count("row", 0)
        if asked.text("id", ""):
            row = tokens.file(step).row_of(asked.count("id"))
        count = max(asked.count("count", 1000, MOST_TOKENS), 1)
        start = Place(step, row, asked.count("token", 0))
        if asked.text("before", ""):
            start = tokens.before(start, count) or start
        return tokens.page(start, count)


def allowed(host: str | None, named: str) -> bool:
    """Whether a request's Host is this machine as an address, as `localhost`, or as it was `named`.

    Another name that leads here is another site's, which would read the runs through its visitor's browser (DNS rebinding).
    """
    name = urlsplit(f"//{host or ''}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", named.lower())
    return True


def handler(board: Board, named: str) -> type[BaseHTTPRequestHandler]:
    """Of the requests to `board`, which listens at `named`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "rollkeel", ""
        timeout = 60

        def do_GET(self) -> None:
            status, kind, body = self._answer()
            self.send_response(status)
            for name, value in {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Length": len(body),
                **HEADERS,
            }.items():
                self.send_header(name, str(value))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str, bytes]:
            url = urlsplit(self.path)
            try:
                if not allowed(self.headers.get("Host"), named):
                    raise PermissionError("this name is not the board's: open it by its address, or as localhost")
                if url.path == "/style.css":
                    return 200, "text/css", STYLE.encode()
                if found := FILES.get("/index.html" if url.path == "/" else url.path):
                    return 200, found[0], found[1].read_bytes()
                if answer := board.answers.get(url.path):
                    text = json.dumps(answer(Asked(url.query)), allow_nan=False, separators=(",", ":"))
                    return 200, "application/json", text.encode("utf-8", "replace")
                return 404, "application/json", _error("no such page")
            except PermissionError as error:
                return 403, "application/json", _error(error)
            except RollkeelError as error:
                return (400 if isinstance(error, BadInput) else 422), "application/json", _error(error)
            except Exception as error:  # of one request: the board goes on
                print(f"rollkeel board: {url.path}: {type(error).__name__}: {error}", file=sys.stderr)
                return 500, "application/json", _error(f"{type(error).__name__}: {error}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _error(reason: object) -> bytes:
    return json.dumps({"error": " ".join(str(reason).split())[:500]}).encode()


class Server(ThreadingHTTPServer):
    """Listens; a browser that goes away in the middle of an answer is no error."""

    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer would look its own name up, which may ask another machine

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def listen(board: Board, host: str, port: int) -> Server:
    """The server, bound. Raises `BadInput`, one line, where the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        kind = type("Server", (Server,), {"address_family": family})
        return kind((host, port), handler(board, host))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"board: cannot listen at {host} port {port}: {reason}; choose another with --port") from None


def serve(roots: Sequence[Path], host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    board = Board(roots)
    try:
        with listen(board, host, port) as server:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            shown = f"[{host}]" if ":" in host else host
            count = len(board.runs.look(LOOK_S))
            print(
                f"board http://{shown}:{server.server_address[1]}/ of {count} run{'' if count == 1 else 's'}; Ctrl-C ends it",
                flush=True,
            )
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        board.doctor.close()
