"""The service as its users see it: another process, behind HTTP and MCP, that may be restarted under them at any time.

One server for the module, and one that is killed. Not covered: TLS, which a proxy in front has to bring; clients on other machines.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
import schemathesis
from front_host import Front
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service_host import REPOSITORY, TOKEN, Server, children, ends

from rollkeel_sandbox import Job, Level, Limits, Status, probe
from rollkeel_sandbox.errors import BadInput, RunStopped
from rollkeel_sandbox.remote import RemoteSandbox

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
NONCE = Job(source=b"import os; print(os.urandom(8).hex(), input())", stdin=b"?")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(
        tmp_path_factory.mktemp("server"), "--partition", "train=2", "--partition", "eval=1", "--max-request-mb", "1"
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[RemoteSandbox]:
    with RemoteSandbox(server.url, TOKEN, patience_s=20) as made:
        yield made


def test_it_says_where_it_is_how_well_it_holds_and_where_the_token_is(server: Server) -> None:
    level = probe().plan().level.name.lower()
    assert server.said == [
        f"sandbox at {server.url} (OpenAPI /openapi.json, MCP /mcp)",
        f"isolation level: {level}; below namespaces jobs are refused",
        f"token: in {server.folder / 'token'}",
        f"state: {server.state}",
    ]


def test_nothing_answers_without_the_token(server: Server) -> None:
    _, document = server.ask("GET", "/openapi.json")
    paths = [(m.upper(), p.replace("{id}", "x")) for p, item in document["paths"].items() for m in item]
    assert len(paths) >= 13
    for method, path in [*paths, ("GET", "/openapi.json"), ("POST", "/mcp"), ("GET", "/nowhere")]:
        for headers in (
            {},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer"},
            {"Authorization": f"Bearer {TOKEN} {TOKEN}"},
        ):
            status, said, text = server.raw(method, path, None, headers)
            assert (status, said["www-authenticate"], json.loads(text)["code"]) == (401, "Bearer", "unauthorized")


def test_a_job_runs_as_it_would_here(server: Server, remote: RemoteSandbox) -> None:
    source = b"import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read()[::-1] + open('in', 'rb').read())\nopen('out', 'wb').write(b'\\xff')"
    job = Job(source=source, stdin=b"\x00\xfe", files={"in": b"\xff\n"}, collect=("out",))
    result = remote.run(job)
    assert (result.status, result.stdout, dict(result.files)) == (Status.OK, b"\xfe\x00\xff\n", {"out": b"\xff"})
    assert (result.level, result.attempts) == (probe().plan().level, 1)
    assert "seccomp" in result.isolation
    over = remote.run(Job(source=b"import time; time.sleep(9)", limits=Limits(wall_s=0.3)))
    assert over.status is Status.TIMEOUT
    remote.require()
    assert remote.level == probe().plan().level


def test_jobs_that_are_asked_for_later(server: Server) -> None:
    status, taken = server.ask("POST", "/v1/jobs", {"source": "print(6 * 7)", "id": "later", "partition": "eval"})
    assert (status, taken["id"]) == (202, "later")
    status, view = server.ask("GET", "/v1/jobs/later?wait_s=10")
    assert (status, view["state"], view["result"]["stdout"]) == (200, "done", "42\n")
    assert server.ask("POST", "/v1/jobs", {"source": "print(6 * 7)", "id": "later", "partition": "eval"})[1] == view
    status, answer = server.ask("POST", "/v1/jobs", {"source": "print(1)", "id": "later"})
    assert (status, answer["code"]) == (409, "conflict")
    assert server.ask("GET", "/v1/jobs/never")[0] == 404
    long = {"source": "import time; time.sleep(60)", "limits": {"wall_s": 60}, "id": "long", "partition": "eval"}
    server.ask("POST", "/v1/jobs", long)
    assert server.ask("GET", "/v1/jobs/long?wait_s=0.05")[1]["state"] in ("queued", "running")
    assert server.ask("DELETE", "/v1/jobs/long")[1]["state"] == "cancelled"
    assert server.ask("GET", "/v1/jobs/long")[1]["state"] == "cancelled"


def test_batches_and_tests(server: Server) -> None:
    jobs = [{"source": f"print({i})"} for i in range(5)] + [{"source": "raise SystemExit(3)"}]
    status, answer = server.ask("POST", "/v1/batch", {"jobs": jobs})
    assert status == 200
    assert [v["result"]["stdout"] for v in answer["jobs"]] == ["0\n", "1\n", "2\n", "3\n", "4\n", ""]
    assert answer["jobs"][5]["result"]["exit_code"] == 3
    cases = [{"stdin": "2\n3", "expected": "5"}, {"stdin": "1\n1", "expected": "3"}, {"stdin": "x", "expected": ""}]
    source = "a = int(input())\nprint(a + int(input()), ' ')\nprint()"
    status, answer = server.ask("POST", "/v1/tests", {"source": source, "cases": cases})
    assert (status, answer["passed"], answer["total"]) == (200, 1, 3)
    assert [case["passed"] for case in answer["cases"]] == [True, False, False]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"source": ', 400, "no JSON"),
        (b"\xff", 400, ""),
        (b"[" * 100_000, 400, ""),
        (b'{"source": 5}', 422, "body.source"),
        (b'{"source": "1", "sauce": 1}', 422, "body.sauce"),
        (b'{"source": {"base64": "?"}}', 422, "valid base64"),
        (b'{"source": "\\ud800"}', 422, "UTF-8"),
        (b'{"source": "1", "kind": "\\ud800"}', 422, "kind"),
        (b'{"source": "1", "partition": "evil"}', 422, "did you mean eval?"),
        (b'{"source": "1", "limits": {"wall_s": 1e9}}', 422, "over the 600"),
        (b'{"source": "1", "limits": {"wall_s": NaN}}', 422, "body.limits.wall_s"),
        (b'{"source": "1", "files": {"../x": ""}}', 422, "without '..'"),
        (b'{"source": "1", "priority": ' + b"9" * 5000 + b"}", 400, ""),
        (b'{"source": "' + b"x" * (1 << 20) + b'"}', 413, "over 1048576 bytes"),
    ],
)
def test_what_is_wrong_gets_one_line(server: Server, body: bytes, status: int, said: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    got, _, text = server.raw("POST", "/v1/run", body, headers)
    assert got == status
    assert text.count(b"\n") == 0
    assert said in json.loads(text)["error"]


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    chunks = (b" " * (1 << 16) for _ in range(100))
    connection.request("POST", "/v1/run", chunks, {"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 413
    connection.close()


def test_a_client_that_hangs_up_ends_its_job(server: Server) -> None:
    before = server.until(lambda m: m["partitions"]["eval"]["running"] == 0)["partitions"]["eval"]["ended"]["cancelled"]
    body = json.dumps({"source": "import time; time.sleep(50)", "limits": {"wall_s": 50}, "partition": "eval"}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = f"POST /v1/run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        server.until(lambda m: m["partitions"]["eval"]["running"] == 1)
    server.until(lambda m: m["partitions"]["eval"]["ended"]["cancelled"] == before + 1)
    assert server.ask("POST", "/v1/run", {"source": "print(1)", "partition": "eval"})[1]["stdout"] == "1\n"


def test_terminal_sessions(server: Server) -> None:
    status, opened = server.ask("POST", "/v1/terminals", {"limits": {"memory_mb": 256}})
    assert status == 201
    path = f"/v1/terminals/{opened['id']}"
    assert server.ask("POST", f"{path}/exec", {"command": "x=41; echo $((x + 1)) > f"})[1]["status"] == "ok"
    status, done = server.ask("POST", f"{path}/exec", {"command": "cat f; echo $x; false"})
    assert (status, done["stdout"], done["status"], done["exit_code"], done["alive"]) == (
        200,
        "42\n41\n",
        "error",
        1,
        True,
    )
    status, done = server.ask("POST", f"{path}/exec", {"command": "sleep 9", "timeout_s": 0.3})
    assert (status, done["status"]) == (200, "timeout")
    assert server.ask("GET", "/v1/metrics")[1]["terminals"] == 1
    assert server.ask("DELETE", path) == (200, {"closed": opened["id"]})
    assert server.ask("POST", f"{path}/exec", {"command": "ls"})[0] == 404
    assert server.ask("POST", "/v1/terminals", {"limits": {"memory_mb": 1 << 20}})[0] == 422


def test_about(server: Server) -> None:
    _, found = server.ask("GET", "/v1/capabilities")
    assert [p["name"] for p in found["partitions"]] == ["train", "eval"]
    assert found["layers"]["seccomp"]["holds"]
    status, health = server.ask("GET", "/v1/health")
    assert (status, health["ok"], len(health["workers"])) == (200, True, 3)
    _, headers, text = server.raw("GET", "/metrics", None, {"Authorization": f"Bearer {TOKEN}"})
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'rollkeel_sandbox_workers{partition="eval"} 1\n' in text


def fuzz(server: Server | Front, requests: int) -> Counter[int]:
    """Requests made from the server's own OpenAPI document, right ones and wrong ones; how often each status came.

    Each comes three times: as made, with half of its body, and with another method; the latter two only must not break anything.
    """
    _, document = server.ask("GET", "/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    seen: Counter[int] = Counter()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    wanted = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    wrong = [
        schema[path][method.upper()].as_strategy(generation_mode=GenerationMode.NEGATIVE)
        for path, item in document["paths"].items()
        for method in item
        if method == "post" or "{id}" in path
    ]

    @given(case=st.one_of(*[schema.as_strategy()] * len(wrong), *wrong))
    @settings(
        max_examples=-(-requests // 3),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: schemathesis.Case) -> None:
        response = case.call(base_url=server.url, headers=headers, timeout=60)
        seen[response.status_code] += 1
        case.validate_response(response, checks=wanted, headers=headers)
        sent = response.request
        body = sent.body.encode() if isinstance(sent.body, str) else sent.body or b'{"'
        kind = headers | {"Content-Type": sent.headers.get("Content-Type", "application/json")}
        for method, data in (
            (sent.method or "GET", body[: len(body) // 2]),
            ("PATCH" if len(body) % 2 else "POST", body),
        ):
            status, _, text = server.raw(method, sent.path_url, data, kind)
            seen[status] += 1
            assert status < 400 or {"error", "code"} <= json.loads(text).keys()
            opened = [json.loads(text)["id"]] if status == 201 else []
            opened += [response.json()["id"]] if response.status_code == 201 else []
            for name in opened:  # the second time they are gone already
                server.ask("DELETE", f"/v1/terminals/{name}")

    one()
    return seen


def test_nothing_that_its_own_document_allows_or_forbids_breaks_it(server: Server) -> None:
    seen = fuzz(server, 300)
    assert sum(seen.values()) == 300
    assert all(status < 500 for status in seen)
    assert seen[200] + seen[202] >= 20
    assert {400, 404, 405, 422} <= seen.keys()
    assert server.ask("GET", "/v1/health")[1]["ok"]


async def use(client: Client) -> None:
    tools = {tool.name for tool in (await client.list_tools()).tools}
    assert tools == {"run_code", "run_tests", "doctor", "terminal_open", "terminal_exec", "terminal_close"}
    done = await client.call_tool("run_code", {"source": "print(input()[::-1])", "stdin": "abc", "timeout_s": 5})
    assert (done.structured_content["status"], done.structured_content["stdout"]) == ("ok", "cba\n")
    tests = [{"stdin": "2", "expected": "4"}, {"stdin": "3", "expected": "7"}]
    done = await client.call_tool("run_tests", {"source": "print(2 * int(input()))", "tests": tests})
    assert (done.structured_content["passed"], done.structured_content["total"]) == (1, 2)
    wrong = await client.call_tool("run_code", {"source": "1", "kind": "pyhton"})
    assert wrong.is_error
    assert "did you mean python?" in wrong.content[0].text
    opened = await client.call_tool("terminal_open", {})
    name = opened.structured_content["id"]
    done = await client.call_tool("terminal_exec", {"id": name, "command": "cd /tmp; pwd"})
    assert (done.structured_content["stdout"], done.structured_content["alive"]) == ("/tmp\n", True)
    assert not (await client.call_tool("terminal_close", {"id": name})).is_error
    assert (await client.call_tool("terminal_exec", {"id": name, "command": "ls"})).is_error
    found = await client.call_tool("doctor", {})
    assert found.structured_content["level"] == probe().plan().level.name.lower()


def test_mcp_over_http_by_the_official_client(server: Server) -> None:
    statuses: list[int] = []

    async def note(response: httpx2.Response) -> None:
        statuses.append(response.status_code)

    async def session(token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30, event_hooks={"response": [note]}) as http,
            Client(streamable_http_client(f"{server.url}/mcp", http_client=http)) as client,
        ):
            await use(client)

    asyncio.run(session(TOKEN))
    assert set(statuses) <= {200, 202}
    for token in (None, "wrong"):
        statuses.clear()
        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            asyncio.run(session(token))
        assert set(statuses) == {401}


def test_mcp_over_stdio_by_the_official_client() -> None:
    async def session() -> None:
        environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
        words = ["-m", "rollkeel_sandbox", "serve", "--stdio", "--workers", "1"]
        async with Client(StdioServerParameters(command=sys.executable, args=words, env=environment)) as client:
            await use(client)

    asyncio.run(session())


def test_a_wrong_address_or_token_is_told_in_one_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with RemoteSandbox(server.url, "wrong" * 5) as remote, pytest.raises(BadInput, match="this server's token"):
        remote.run(NONCE)
    with RemoteSandbox(server.url, TOKEN, partition="nope") as remote, pytest.raises(BadInput, match="unknown"):
        remote.run(NONCE)
    monkeypatch.delenv("ROLLKEEL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(BadInput, match="wants its token"):
        RemoteSandbox(server.url)
    with pytest.raises(BadInput, match="expected an address"):
        RemoteSandbox("127.0.0.1:8787", TOKEN)
    with (
        RemoteSandbox("http://127.0.0.1:9", TOKEN, patience_s=0.1) as remote,
        pytest.raises(RunStopped, match="no server"),
    ):
        remote.run(NONCE)


def fork_servers(server: Server) -> list[int]:
    return [pid for launcher in server.launchers() for pid in (*children(launcher), launcher)]


def jobs_while(folder: Path, victim: str, count: int, kills: int, preloads: tuple[str, ...]) -> None:
    """`count` jobs from 8 threads through one address while `victim` is killed: each gets one result, and got only that one."""
    server = Server(folder, "--workers", "2")
    source = b"import os, time; time.sleep(0.01); print(os.urandom(8).hex(), input())"
    jobs = [Job(source=source, stdin=str(i).encode(), preload=preloads[i % len(preloads)]) for i in range(count)]
    try:
        with RemoteSandbox(server.url, TOKEN, patience_s=60) as remote, ThreadPoolExecutor(8) as pool:
            for preload in preloads:
                assert remote.run(Job(source=b"", preload=preload)).status is Status.OK
            futures = [pool.submit(remote.run, job, id=f"job-{i}") for i, job in enumerate(jobs)]
            for kill in range(1, kills + 1):
                while sum(f.done() for f in futures) < kill * count // (kills + 1):
                    time.sleep(0.005)
                if victim == "server":
                    server.kill()
                    server.start()
                else:
                    targets = fork_servers(server)
                    for pid in targets if victim == "all fork servers" else targets[:2]:
                        os.kill(pid, signal.SIGKILL)
            results = [future.result(timeout=120) for future in futures]
            again = list(pool.map(lambda i: remote.run(jobs[i], id=f"job-{i}"), range(count)))
        assert [r.status for r in results] == [Status.OK] * count
        assert [r.stdout.split()[1] for r in results] == [b"%d" % i for i in range(count)]
        assert again == results, "an id got a second result"
        rows = server.ledger()
        assert ends([row for row in rows if row["id"].startswith("job-")]) == {f"job-{i}": 1 for i in range(count)}
        written = {row["id"]: row["result"]["stdout"] for row in rows if row["event"] == "done"}
        assert all(written[f"job-{i}"].encode() == r.stdout for i, r in enumerate(results))
        starts = Counter(row["id"] for row in rows if row["event"] == "start")
        assert sum(starts[f"job-{i}"] > 1 for i in range(count)) <= 2 * kills * len(preloads), (
            "more ran again than were at work"
        )
    finally:
        server.close()


def test_sixty_jobs_while_the_server_is_killed(tmp_path: Path) -> None:
    jobs_while(tmp_path, "server", 60, 1, ("code",))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["server", "one fork server", "all fork servers"])
def test_a_thousand_jobs_while_something_is_killed(tmp_path: Path, victim: str) -> None:
    jobs_while(tmp_path, victim, 1000, 5, ("code", "math"))


@pytest.mark.slow
def test_thirty_thousand_requests_made_from_its_own_document(server: Server) -> None:
    seen = fuzz(server, 30_000)  # every third exactly as the document says
    assert sum(seen.values()) >= 30_000
    assert all(status < 500 for status in seen)
    assert server.ask("GET", "/v1/health")[1]["ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_lets_running_jobs_end_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    server = Server(tmp_path, "--workers", "1")
    try:
        with ThreadPoolExecutor(1) as pool:
            source = {"source": "import time; time.sleep(0.7); print('done')"}
            answer = pool.submit(server.ask, "POST", "/v1/run", source)
            server.until(lambda m: m["partitions"]["default"]["running"] == 1)
            pids = [server.pid, *fork_servers(server)]
            assert server.end(number) == 0
            assert answer.result()[1]["stdout"] == "done\n"
        until = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < until, "something stayed behind"
            time.sleep(0.01)
    finally:
        server.close()
