"""A front that loses a job, or gives a caller two results for one, poisons the rewards of a run and nobody sees it.

Nodes are processes that are really killed and frozen; most are stubs whose jobs cost nothing (benchmarks/sandbox_stub.py), since what is
tested is what becomes of jobs. Not covered: other machines, networks that lose packets, TLS.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from front_host import Front, Stub
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from service_host import TOKEN, Server
from test_service_http import fuzz, use

from rollkeel_sandbox import Job, Level, Limits, Status, probe
from rollkeel_sandbox.circuit import Circuit, State
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.groups import load_nodes
from rollkeel_sandbox.remote import RemoteSandbox


class Cluster:
    def __init__(self, folder: Path, *words: str, count: int = 3, front: tuple[str, ...] = ()) -> None:
        self.nodes = [Stub(folder, number, *words) for number in range(count)]
        self.front = Front(folder, ",".join(node.url for node in self.nodes), *front)

    def close(self) -> None:
        self.front.close()
        for node in self.nodes:
            node.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, "--delay", "0.003")
    yield made
    made.close()


def harm(node: Stub, rng: random.Random) -> str:
    """Kill or freeze a node for a while; returns when it is back."""
    if rng.random() < 0.5:
        node.kill()
        time.sleep(rng.uniform(0, 0.5))
        node.start()
        return "killed"
    node.freeze()
    time.sleep(rng.uniform(0.1, 2.5))
    node.thaw()
    return "frozen"


def jobs_while_nodes_are_harmed(cluster: Cluster, count: int, callers: int = 16) -> Counter[str]:
    """One right result for every job, no run beyond two; what happened to the nodes."""
    over, events, rng = threading.Event(), Counter[str](), random.Random(count)

    def villain() -> None:
        while not over.is_set():
            events[harm(rng.choice(cluster.nodes), rng)] += 1
            cluster.front.up(3)

    def one(number: int) -> bytes:
        result = remote.run(Job(source=b"", stdin=b"%d" % number), id=f"job-{number}")
        assert result.status is Status.OK, result
        return result.stdout

    thread = threading.Thread(target=villain)
    thread.start()
    try:
        with RemoteSandbox(cluster.front.url, TOKEN) as remote, ThreadPoolExecutor(callers) as pool:
            first = list(pool.map(one, range(count)))
            while sum(events.values()) < 4:
                first += list(pool.map(one, range(len(first), len(first) + 500)))
            over.set()
            thread.join()
            again = list(pool.map(one, range(len(first) - 1000, len(first))))
    finally:
        over.set()
        thread.join()
    assert [text.split()[0] for text in first] == [b"%d" % number for number in range(len(first))]
    assert len(set(first)) == len(first), "two jobs have the result of one run"
    assert sum(a != b for a, b in zip(first[-1000:], again, strict=True)) == 0, "an id got a second result"
    runs = Counter(id for node in cluster.nodes for id in node.runs())
    assert set(runs) >= {f"job-{number}" for number in range(count)}
    assert max(runs[f"job-{number}"] for number in range(len(first) - 1000)) <= 2
    return events


class TestJobs:
    def test_three_thousand_jobs_while_nodes_are_killed_and_frozen(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, "--delay", "0.01")
        try:
            events = jobs_while_nodes_are_harmed(cluster, 3000)
            figures = cluster.front.ask("GET", "/v1/metrics")[1]
        finally:
            cluster.close()
        assert sum(events.values()) >= 4
        assert figures["reissued"] > 0
        assert figures["killed"] == 0
        assert sum(node["isolated"] for node in figures["nodes"].values()) > 0

    @pytest.mark.slow
    def test_fifty_thousand_jobs_while_nodes_are_killed_and_frozen(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, "--delay", "0.003")
        try:
            assert sum(jobs_while_nodes_are_harmed(cluster, 50_000).values()) >= 8
        finally:
            cluster.close()

    def test_the_least_loaded_node_gets_the_job(self, cluster: Cluster) -> None:
        cluster.nodes[0].freeze()  # what it has stays with it
        with ThreadPoolExecutor(30) as pool:
            asked = [
                pool.submit(cluster.front.ask, "POST", "/v1/run", {"source": "", "id": f"a{i}"}) for i in range(60)
            ]
            assert {future.result()[0] for future in asked} == {200}
        cluster.nodes[0].thaw()
        sent = [len(node.runs()) for node in cluster.nodes]
        assert sent[0] < 30 < min(sent[1:]) + 15

    def test_a_job_that_nobody_waits_for_goes_to_another_node(self, cluster: Cluster) -> None:
        status, taken = cluster.front.ask("POST", "/v1/jobs", {"source": "", "id": "kept"})
        assert (status, taken["state"]) == (202, "queued")
        first = next(node for node in cluster.nodes if "kept" in node.runs())
        first.kill()
        cluster.front.until(lambda figures: figures["reissued"] == 1)
        others = [node for node in cluster.nodes if node is not first]
        assert sum("kept" in node.runs() for node in others) == 1
        next(node for node in others if "kept" in node.runs()).kill()
        cluster.front.up(1)
        view = cluster.front.ask("GET", "/v1/jobs/kept")[1]
        assert (view["state"], view["result"]["status"]) == ("done", "killed")
        assert view["result"]["reason"] == "its node was lost, 2 times"
        assert sum("kept" in node.runs() for node in cluster.nodes) == 2

    def test_full_nodes_and_no_nodes_are_told_apart(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, "--delay", "1", "--workers", "1", "--queue", "1", count=2)
        try:
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(cluster.front.ask, "POST", "/v1/run", {"source": ""}) for _ in range(8)]
                answers = [future.result() for future in asked]
            assert Counter(status for status, _ in answers) == {200: 4, 429: 4}
            full = next(answer for status, answer in answers if status == 429)
            assert full["code"] == "full"
            assert full["retry_after_s"] > 0
            for node in cluster.nodes:
                node.kill()
            cluster.front.up(0)
            status, answer = cluster.front.ask("POST", "/v1/run", {"source": ""})
            assert (status, answer["code"]) == (503, "unavailable")
            assert cluster.front.ask("GET", "/v1/health")[0] == 503
        finally:
            cluster.close()


class TestSessions:
    def test_they_stay_with_their_node_and_are_lost_once(self, cluster: Cluster) -> None:
        front = cluster.front
        ids = [front.ask("POST", "/v1/terminals", {})[1]["id"] for _ in range(6)]
        where = {id: front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "x"})[1]["stdout"] for id in ids}
        assert len(set(where.values())) == 3
        for _ in range(3):
            for id in ids:
                assert front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "x"})[1]["stdout"] == where[id]
        cluster.nodes[0].kill()
        cluster.front.up(2)
        gone = [id for id in ids if where[id] == f"{cluster.nodes[0].process.pid}\n"]
        for id in gone:
            status, answer = front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "x"})
            assert (status, answer["code"]) == (410, "session_lost")
            assert front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "x"})[0] == 404
        assert len(gone) == 2
        kept = next(id for id in ids if id not in gone)
        assert front.ask("POST", f"/v1/terminals/{kept}/exec", {"command": "x"})[0] == 200


class TestPartitions:
    @pytest.fixture
    def divided(self, tmp_path: Path) -> Iterator[tuple[Front, list[Stub]]]:
        nodes = [Stub(tmp_path, number, "--delay", "0.5", "--workers", "2", "--queue", "2") for number in range(2)]
        file = tmp_path / "nodes.toml"
        file.write_text(
            f'nodes = {json.dumps([node.url for node in nodes])}\n[partitions.jvm]\nnodes = ["{nodes[0].url}"]\n'
            'kinds = ["java"]\n[partitions.guest]\nshare = 0.25\n[partitions.secure]\nminimum = "full"\n'
        )
        front = Front(tmp_path, str(file))
        yield front, nodes
        front.close()
        for node in nodes:
            node.close()

    def test_by_name_by_kind_by_level_and_by_share(self, divided: tuple[Front, list[Stub]]) -> None:
        front, nodes = divided
        for i in range(2):
            assert front.ask("POST", "/v1/run", {"source": "", "kind": "java", "id": f"java-{i}"})[0] == 200
            assert front.ask("POST", "/v1/run", {"source": "", "partition": "jvm", "id": f"jvm-{i}"})[0] == 200
        assert sorted(nodes[0].runs()) == ["java-0", "java-1", "jvm-0", "jvm-1"]
        assert nodes[1].runs() == []
        assert front.ask("POST", "/v1/run", {"source": "", "partition": "secure"})[1]["code"] == "unavailable"
        status, answer = front.ask("POST", "/v1/run", {"source": "", "partition": "gest"})
        assert (status, "did you mean guest?" in answer["error"]) == (422, True)
        with ThreadPoolExecutor(8) as pool:
            guest = {"source": "", "partition": "guest"}
            answers = list(pool.map(lambda _: front.ask("POST", "/v1/run", guest)[0], range(8)))
        assert Counter(answers) == {200: 2, 429: 6}  # a quarter of eight places

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "expected nodes"),
            ("nodes = [", "expected addresses or a TOML file"),
            ("nodes = ['http://a:1']\nnods = 1", "not nods"),
            ("nodes = ['http://a:1']\n[partitions.x]\nshare = 2", "a share above 0"),
            ("nodes = ['http://a:1']\n[partitions.x]\nkinds = ['jav']", "did you mean java?"),
            ("nodes = ['http://a:1']\n[partitions.x]\nnodes = ['http://b:1']", "'http://b:1' is unknown"),
            ("nodes = ['http://a:1']\n[partitions.x]\nshares = 1", "expected nodes, share, kinds, minimum"),
            ("nodes = ['http://a:1']\n[partitions]\nx = 1", "expected nodes, share, kinds, minimum"),
            ("nodes = ['http://a:1']\n[partitions.x]\nminimum = 5", "5 is unknown"),
        ],
    )
    def test_a_file_that_cannot_be_gets_one_line(self, text: str, said: str, tmp_path: Path) -> None:
        file = tmp_path / "nodes.toml"
        file.write_text(text)
        with pytest.raises(BadInput, match=said.replace("?", r"\?").replace("[", r"\[")):
            load_nodes(str(file))


def test_a_circuit_opens_on_misses_and_closes_on_proof() -> None:
    circuit = Circuit(1.0)
    circuit.answered(0.01)
    assert circuit.state is State.HALF_OPEN
    circuit.proved()
    assert (circuit.state, circuit.deadline_s, circuit.pause_s) == (State.CLOSED, 1.0, 1.0)
    assert not circuit.missed()
    assert (circuit.deadline_s, circuit.pause_s) == (2.0, 0.0)  # again at once, with more patience
    circuit.answered(0.01)
    assert not circuit.missed()
    assert circuit.missed()
    assert (circuit.state, circuit.isolated) == (State.OPEN, 1)
    assert [circuit.missed() for _ in range(9)] == [False] * 9
    assert circuit.pause_s == 15.0
    circuit.answered(0.01)
    assert circuit.state is State.HALF_OPEN
    circuit.missed()
    assert circuit.state is State.OPEN
    circuit.answered(0.01)
    circuit.proved()
    assert circuit.missed(gone=True)
    assert circuit.isolated == 2


def test_deadlines_follow_the_measured_times() -> None:
    slow, steady = Circuit(0.1), Circuit(0.1)
    for i in range(200):
        slow.answered(0.5 + 0.2 * (i % 2))
        steady.answered(0.5)
    assert 0.9 < slow.deadline_s < 1.2
    assert 0.5 < steady.deadline_s < 0.55


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Over two nodes that run jobs."""
    if probe().plan().level < Level.NAMESPACES:
        pytest.skip("namespaces do not hold here")
    folders = [tmp_path_factory.mktemp("node") for _ in range(2)]
    servers = [Server(folder, "--workers", "1", "--max-request-mb", "1") for folder in folders]
    front = Front(folders[0], ",".join(server.url for server in servers), "--max-request-mb", "1")
    yield front
    front.close()
    for server in servers:
        server.close()


def test_it_is_a_serve_to_its_clients(real: Front) -> None:
    front = real
    with RemoteSandbox(front.url, TOKEN) as remote:
        assert remote.level == probe().plan().level
        remote.require()
        result = remote.run(Job(source=b"print(input()[::-1])", stdin=b"abc"))
        assert (result.status, result.stdout) == (Status.OK, b"cba\n")
        with pytest.raises(BadInput, match="over the 600"):
            remote.run(Job(source=b"", limits=Limits(wall_s=700)))
    with RemoteSandbox(front.url, "wrong" * 5) as remote, pytest.raises(BadInput, match="this server's token"):
        remote.run(Job(source=b""))
    assert front.ask("POST", "/v1/jobs", {"source": "print(6 * 7)", "id": "later"})[0] == 202
    assert front.ask("GET", "/v1/jobs/later?wait_s=20")[1]["result"]["stdout"] == "42\n"
    batch = {"jobs": [{"source": f"print({i})"} for i in range(4)]}
    assert [v["result"]["stdout"] for v in front.ask("POST", "/v1/batch", batch)[1]["jobs"]] == [
        "0\n",
        "1\n",
        "2\n",
        "3\n",
    ]
    cases = {"source": "print(2 * int(input()))", "cases": [{"stdin": "2", "expected": "4"}]}
    assert front.ask("POST", "/v1/tests", cases)[1]["passed"] == 1
    id = front.ask("POST", "/v1/terminals", {})[1]["id"]
    assert front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "cd /tmp; x=5"})[0] == 200
    assert front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "pwd; echo $x"})[1]["stdout"] == "/tmp\n5\n"
    assert front.ask("DELETE", f"/v1/terminals/{id}") == (200, {"closed": id})
    assert front.ask("POST", f"/v1/terminals/{id}/exec", {"command": "x"})[0] == 404
    assert front.ask("GET", "/openapi.json")[1]["info"]["title"] == "rollkeel-sandbox"
    text = front.ask("GET", "/metrics")[1]
    assert text.count("rollkeel_sandbox_front_node_up{") == 2
    assert 'rollkeel_sandbox_front_answers_total{status="200"}' in text


def test_a_batch_that_names_an_id_twice_is_answered_as_its_node_answers(real: Front) -> None:
    once = {"source": "print(1)", "id": "twin"}
    refused = {"jobs": [once, once, {"source": "", "limits": {"scratch_mb": 0.5}}]}
    assert real.ask("POST", "/v1/batch", refused)[0] == 422
    status, told = real.ask("POST", "/v1/batch", {"jobs": [once, once]})
    assert status == 422 or len(told["jobs"]) == 2


def test_its_tools_for_models_are_those_of_its_nodes(real: Front) -> None:
    async def session() -> None:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30) as http,
            Client(streamable_http_client(f"{real.url}/mcp", http_client=http)) as client,
        ):
            await use(client)

    for _ in range(4):  # sessions are opened on either node
        asyncio.run(session())


@pytest.mark.parametrize("requests", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_its_nodes_document_allows_or_forbids_does_not_break_it(real: Front, requests: int) -> None:
    seen = fuzz(real, requests)
    assert sum(seen.values()) >= requests
    assert all(status < 500 for status in seen)
    assert {200, 400, 404, 405, 422} <= seen.keys()
    assert sum(node["isolated"] for node in real.ask("GET", "/v1/metrics")[1]["nodes"].values()) == 0


def test_a_signal_lets_running_jobs_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, "--delay", "0.7", count=1)
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(cluster.front.ask, "POST", "/v1/run", {"source": ""})
            cluster.front.until(lambda figures: figures["partitions"]["default"]["outstanding"] == 1)
            cluster.front.process.terminate()
            assert answer.result()[0] == 200
        assert cluster.front.process.wait(timeout=30) == 0
    finally:
        cluster.close()
