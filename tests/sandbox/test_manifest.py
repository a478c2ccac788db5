"""A manifest with a field that does not exist is taken by some clusters and means nothing: a job then runs without its wall.

Held against the published schema where `kubernetes-validate` is installed, and against what must be there always. Not covered: a cluster, on
which none of it has been run; whether gVisor or Kata let the sandbox build its cages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.manifest import CAPABILITIES, Options, manifest

POD = {"automountServiceAccountToken": bool, "enableServiceLinks": bool, "terminationGracePeriodSeconds": int, "containers": list,
       "volumes": list, "runtimeClassName": str}  # fmt: skip
CONTAINER = {"name": str, "image": str, "command": list, "env": list, "ports": list, "readinessProbe": dict, "livenessProbe": dict,
             "securityContext": dict, "resources": dict, "volumeMounts": list}  # fmt: skip
SECURITY = {"runAsUser": int, "runAsNonRoot": bool, "allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool,
            "capabilities": dict, "seccompProfile": dict}  # fmt: skip
SPECS = {
    "StatefulSet": {
        "serviceName": str,
        "replicas": int,
        "podManagementPolicy": str,
        "selector": dict,
        "template": dict,
    },
    "Deployment": {"replicas": int, "strategy": dict, "selector": dict, "template": dict},
    "Service": {"selector": dict, "ports": list, "clusterIP": str, "publishNotReadyAddresses": bool},
    "NetworkPolicy": {"podSelector": dict, "policyTypes": list, "ingress": list, "egress": list},
}
VERSIONS = {"RuntimeClass": "node.k8s.io/v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1", "Service": "v1",
            "NetworkPolicy": "networking.k8s.io/v1"}  # fmt: skip


def check(value: dict[str, Any], known: dict[str, type], where: str) -> None:
    for name, part in value.items():
        assert name in known, f"{where}.{name} does not exist"
        assert type(part) is known[name], f"{where}.{name}: {part!r}"


def check_object(item: dict[str, Any]) -> None:
    kind = item["kind"]
    assert item["apiVersion"] == VERSIONS[kind]
    check(item, {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict, "handler": str}, kind)
    check(item.get("spec", {}), SPECS.get(kind, {}), kind)
    if "template" in item.get("spec", {}):
        template = item["spec"]["template"]
        assert template["metadata"]["labels"] == item["spec"]["selector"]["matchLabels"]
        check(template["spec"], POD, kind)
        for container in template["spec"]["containers"]:
            check(container, CONTAINER, kind)
            check(container["securityContext"], SECURITY, kind)
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted == {volume["name"] for volume in template["spec"].get("volumes", [])}


def by_kind(listed: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    for item in listed["items"]:
        out.setdefault(item["kind"], []).append(item)
    return out


@pytest.mark.parametrize("runtime", ["runsc", "kata"])
def test_every_field_exists_and_every_name_is_that_of_something(runtime: str) -> None:
    made = manifest(Options(image="registry.example/sandbox:1", runtime=runtime, nodes=2))
    for item in made["items"]:
        check_object(item)
    kinds = by_kind(made)
    assert {kind: len(items) for kind, items in kinds.items()} == dict(zip(VERSIONS, (1, 1, 1, 2, 2), strict=True))
    (runtimes,), (nodes,), (front,) = kinds["RuntimeClass"], kinds["StatefulSet"], kinds["Deployment"]
    pod = nodes["spec"]["template"]["spec"]
    assert (runtimes["handler"], pod["runtimeClassName"]) == (runtime, runtimes["metadata"]["name"])
    headless = next(s for s in kinds["Service"] if s["spec"].get("clusterIP") == "None")
    assert nodes["spec"]["serviceName"] == headless["metadata"]["name"]
    words = front["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[-1] == "http://sandbox-node-0.sandbox-node:8787,http://sandbox-node-1.sandbox-node:8787"
    labels = {tuple(s["spec"]["selector"].items()) for s in kinds["Service"]}
    assert labels == {tuple(o["spec"]["selector"]["matchLabels"].items()) for o in (nodes, front)}


def test_nodes_reach_nothing_and_the_front_has_no_privileges() -> None:
    kinds = by_kind(manifest(Options(image="sandbox:1")))
    node = next(p for p in kinds["NetworkPolicy"] if p["metadata"]["name"] == "sandbox-node")
    assert node["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert node["spec"]["egress"] == []
    assert [list(rule["from"][0]["podSelector"]["matchLabels"].values()) for rule in node["spec"]["ingress"]] == [
        ["sandbox-front"]
    ]
    front = kinds["Deployment"][0]["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert (front["capabilities"], front["allowPrivilegeEscalation"]) == ({"drop": ["ALL"]}, False)
    inside = kinds["StatefulSet"][0]["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert inside["capabilities"] == {"drop": ["ALL"], "add": CAPABILITIES}
    assert "privileged" not in inside
    assert "token" not in json.dumps(kinds["StatefulSet"][0]["spec"]["template"]["spec"]["containers"][0]["command"])


def test_the_published_schema() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for runtime in ("runsc", "kata"):
        for item in manifest(Options(image="sandbox:1", runtime=runtime))["items"]:
            schemas.validate(item, "1.32", strict=True)


def test_the_check_sees_a_field_that_does_not_exist() -> None:
    (front,) = by_kind(manifest(Options(image="sandbox:1")))["Deployment"]
    front["spec"]["template"]["spec"]["runtimeClass"] = "runsc"
    with pytest.raises(AssertionError, match="runtimeClass does not exist"):
        check_object(front)


def test_what_cannot_be_gets_one_line() -> None:
    for wrong, said in (
        ({"runtime": "runc"}, "expected runsc or kata"),
        ({"name": "A b"}, "a letter first"),
        ({"image": "a b"}, "name of a container image"),
    ):
        with pytest.raises(BadInput, match=said):
            manifest(Options(**{"image": "sandbox:1", **wrong}))


def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "rollkeel_sandbox", "manifest", "--image", "sandbox:1", "--runtime"]
    done = subprocess.run([*command, "kata"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["kind"] == "List"
    done = subprocess.run([*command, "runc"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
