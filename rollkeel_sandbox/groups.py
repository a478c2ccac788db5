"""Partitions of a front, as groups of its nodes, and the file that describes them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollkeel_sandbox.errors import BadInput, nearest
from rollkeel_sandbox.job import KINDS, Level
from rollkeel_sandbox.metrics import Latencies
from rollkeel_sandbox.nodes import Node
from rollkeel_sandbox.partition import ID


@dataclass(frozen=True, kw_only=True)
class Part:
    """A partition as the file of nodes describes it."""

    name: str
    nodes: tuple[str, ...]
    share: float = 1.0
    kinds: tuple[str, ...] = ()
    minimum: str = "none"


def load_nodes(said: str) -> tuple[list[str], list[Part]]:
    """`URL,URL,…`, or a TOML file. Raises `BadInput`."""
    if said.startswith(("http:", "https:")):
        return list(dict.fromkeys(url.strip().rstrip("/") for url in said.split(",") if url.strip())), []
    try:
        table = tomllib.loads(Path(said).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"--nodes {said}: expected addresses or a TOML file ({error})") from None
    wrong = [key for key in table if key not in ("nodes", "partitions")]
    rows = table.get("partitions", {})
    if wrong or not isinstance(table.get("nodes"), list) or not table["nodes"] or not isinstance(rows, dict):
        raise BadInput(
            f"{said}: expected nodes = [addresses] and tables [partitions.NAME]{', not ' + wrong[0] if wrong else ''}"
        )
    return [str(url).rstrip("/") for url in table["nodes"]], [_part(said, *row, table["nodes"]) for row in rows.items()]


def _part(file: str, name: str, row: Any, nodes: Sequence[str]) -> Part:
    where = f"{file}: partitions.{name}"
    try:
        given: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in {"nodes": nodes, **row}.items()
        }
        given["nodes"] = tuple(str(url).rstrip("/") for url in given["nodes"])
        part = Part(name=name, **given)
        share = 0 < part.share <= 1
    except TypeError:
        raise BadInput(f"{where}: expected nodes, share, kinds, minimum") from None
    if not ID.fullmatch(name) or not share:
        raise BadInput(f"{where}: expected a name of a-z, A-Z, 0-9, '-', '_', '.' and a share above 0, up to 1")
    for asked, known in ((part.nodes, [str(n).rstrip("/") for n in nodes]), (part.kinds, list(KINDS)), ((part.minimum,), [m.name.lower() for m in Level])):  # fmt: skip
        for one in asked:
            if one not in known:
                raise BadInput(f"{where}: {one!r} is unknown{nearest(str(one), known)}")
    return part


@dataclass(eq=False)
class Group:
    """A partition of the front: nodes, and how much of them its jobs may hold."""

    name: str
    nodes: list[Node]
    share: float = 1.0
    """Of the places of its nodes."""
    kinds: tuple[str, ...] = ()
    """Jobs of these kinds that name no partition come here."""
    minimum: Level = Level.NONE
    """Nodes below it are left out."""
    outstanding: int = 0
    taken: int = 0
    refused: int = 0
    latency: Latencies = field(default_factory=Latencies)

    def usable(self) -> Iterable[Node]:
        return (node for node in self.nodes if node.up and Level[node.level.upper()] >= self.minimum)


def together(known: Sequence[Mapping[str, Any]], groups: Iterable[str]) -> dict[str, Any]:
    """Capabilities of several nodes: what all of them hold, what any of them can do."""
    kinds: dict[str, Any] = {}
    for abilities in known:
        kinds |= {n: k for n, k in abilities.get("kinds", {}).items() if n not in kinds or k.get("runs")}
    rows = {row["name"]: row for abilities in known for row in abilities["partitions"]}
    first = next(iter(rows.values()), {})
    return dict(known[0]) | {
        "level": min((a["level"] for a in known), key=lambda name: Level[name.upper()]),
        "minimum": max((a["minimum"] for a in known), key=lambda name: Level[name.upper()]),
        "kinds": kinds,
        "partitions": list(({name: first | {"name": name} for name in groups} | rows).values()),
        "terminals": any(a.get("terminals") for a in known),
    }
