"""Kubernetes objects for nodes behind a front, whose pods run on a kernel of their own: gVisor's (runsc) or a virtual machine's (Kata).

As JSON, which `kubectl apply -f -` takes. The token is no part of it: it is read from a secret that has to be there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rollkeel_sandbox.errors import BadInput

RUNTIMES = {"runsc": "runsc", "kata": "kata"}
"""Runtime class → its handler, as containerd's documentation names them."""
NODE_PORT, FRONT_PORT = 8787, 8786
CAPABILITIES = ["SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL"]
"""What the sandbox needs to build cages, inside of the pod's own kernel."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,39}[a-z0-9])?")
_IMAGE = re.compile(r"[\w.:/@-]{1,255}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of the command."""

    image: str
    runtime: str = "runsc"
    name: str = "sandbox"
    nodes: int = 3
    workers: int = 4
    memory_mb: int = 4096
    minimum: str = "namespaces"


def manifest(options: Options) -> dict[str, Any]:
    """Everything, as one list. Raises `BadInput`."""
    if options.runtime not in RUNTIMES:
        raise BadInput(f"--runtime {options.runtime!r}: expected {' or '.join(RUNTIMES)}")
    if not _NAME.fullmatch(options.name):
        raise BadInput(f"--name {options.name[:80]!r}: expected up to 41 of a-z, 0-9, '-', a letter first")
    if not _IMAGE.fullmatch(options.image):
        raise BadInput(
            f"--image {options.image[:80]!r}: expected the name of a container image with rollkeel-sandbox in it"
        )
    name = options.name
    items = [_runtime_class(options), _nodes(options), _service(f"{name}-node", NODE_PORT, headless=True)]
    items += [_front(options), _service(f"{name}-front", FRONT_PORT, headless=False), *_policies(name)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _runtime_class(options: Options) -> dict[str, Any]:
    meta = {"name": f"{options.name}-{options.runtime}"}
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": meta,
        "handler": RUNTIMES[options.runtime],
    }


def _nodes(options: Options) -> dict[str, Any]:
    """A set with stable names, as sessions and ids belong to one node."""
    words = ["serve", "--host", "0.0.0.0", "--port", str(NODE_PORT), "--workers", str(options.workers)]
    words += ["--minimum", options.minimum, "--state", "/state"]
    security = {
        "runAsUser": 0,
        "allowPrivilegeEscalation": True,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
    }
    container = _container(options, words, NODE_PORT, security)
    container["resources"] = _resources(f"{options.workers}", f"{options.memory_mb}Mi")
    folders = {"state": "/state", "tmp": "/tmp"}
    container["volumeMounts"] = [{"name": volume, "mountPath": path} for volume, path in folders.items()]
    pod = _pod(options, "node", container)
    pod["spec"]["volumes"] = [{"name": volume, "emptyDir": {}} for volume in folders]
    pod["spec"]["runtimeClassName"] = f"{options.name}-{options.runtime}"
    spec = {"serviceName": f"{options.name}-node", "replicas": options.nodes, "podManagementPolicy": "Parallel"}
    spec |= {"selector": {"matchLabels": _labels(f"{options.name}-node")}, "template": pod}
    return _object("apps/v1", "StatefulSet", f"{options.name}-node", spec)


def _front(options: Options) -> dict[str, Any]:
    """One, as what it knows of ids and sessions is in its memory."""
    host = f"{options.name}-node"
    urls = ",".join(f"http://{host}-{i}.{host}:{NODE_PORT}" for i in range(options.nodes))
    words = ["front", "--host", "0.0.0.0", "--port", str(FRONT_PORT), "--nodes", urls]
    security = {
        "runAsUser": 65534,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container = _container(options, words, FRONT_PORT, security)
    container["resources"] = _resources("1", "1Gi")
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _labels(f"{options.name}-front")},
    }
    spec |= {"template": _pod(options, "front", container)}
    return _object("apps/v1", "Deployment", f"{options.name}-front", spec)


def _container(options: Options, words: list[str], port: int, security: dict[str, Any]) -> dict[str, Any]:
    probe = {"tcpSocket": {"port": port}, "periodSeconds": 5}
    secret = {"name": f"{options.name}-token", "key": "token"}
    return {
        "name": words[0],
        "image": options.image,
        "command": ["rollkeel-sandbox", *words],
        "env": [{"name": "ROLLKEEL_SANDBOX_TOKEN", "valueFrom": {"secretKeyRef": secret}}],
        "ports": [{"containerPort": port}],
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": 6},
        "securityContext": security | {"seccompProfile": {"type": "RuntimeDefault"}},
    }


def _pod(options: Options, role: str, container: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
    }
    return {"metadata": {"labels": _labels(f"{options.name}-{role}")}, "spec": spec}


def _service(name: str, port: int, *, headless: bool) -> dict[str, Any]:
    """`headless`: a name for each pod, also before it is ready: the front finds out itself."""
    spec: dict[str, Any] = {"selector": _labels(name), "ports": [{"port": port, "targetPort": port}]}
    return _object(
        "v1", "Service", name, spec | ({"clusterIP": "None", "publishNotReadyAddresses": True} if headless else {})
    )


def _policies(name: str) -> list[dict[str, Any]]:
    """Nodes are reached by the front alone and reach nothing; the front is reached by pods that are labelled as clients."""
    node = f"{name}-node"
    front = f"{name}-front"
    dns = [{"port": 53, "protocol": p} for p in ("UDP", "TCP")]
    client = {"podSelector": {"matchLabels": {f"{name}-client": "true"}}}
    to_node = {"podSelector": {"matchLabels": _labels(node)}}
    from_front = {"from": [{"podSelector": {"matchLabels": _labels(front)}}], "ports": [{"port": NODE_PORT}]}
    from_clients = {"from": [client], "ports": [{"port": FRONT_PORT}]}
    outward = [{"to": [to_node], "ports": [{"port": NODE_PORT}]}, {"ports": dns}]
    return [_policy(node, [from_front], []), _policy(front, [from_clients], outward)]


def _policy(name: str, inward: list[dict[str, Any]], outward: list[dict[str, Any]]) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": _labels(name)}, "policyTypes": ["Ingress", "Egress"]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, spec | {"ingress": inward, "egress": outward})


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(name)}, "spec": spec}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name}


def _resources(cpu: str, memory: str) -> dict[str, Any]:
    asked = {"cpu": cpu, "memory": memory}
    return {"requests": asked, "limits": asked}
