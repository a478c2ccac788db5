"""KV of prompts that several requests share: computed once, kept while requests of that prompt are in the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from rollkeel.engines.kv import BlockPool
from rollkeel.models.compiled import Job


@dataclass(frozen=True)
class Copy:
    """A shared prompt's last, half-filled block. Each of its sequences has its own copy."""

    source: int
    target: int
    instead: Job
    """Prefill that comes to the same."""


def ordered(prompts: list[Job], copies: list[Copy], tails: list[Job]) -> tuple[list[Job], list[Copy]]:
    """Prefills in an order in which one pass over all of them finds what each needs, and the copies that are left to do first."""
    new = {block for blocks, _, _ in prompts for block in blocks}
    again = [copy.instead for copy in copies if copy.source in new]
    return [*prompts, *again, *tails], [copy for copy in copies if copy.source not in new]


@dataclass
class Placed:
    """Blocks of a sequence that starts with a prompt."""

    blocks: list[int]
    computed: int
    """Tokens whose KV nobody has to compute for this sequence alone."""
    job: Job | None = None
    """Prefill of the shared prompt that must run first."""
    copy: Copy | None = None
    """What it copies after that."""


@dataclass
class _Entry:
    blocks: list[int]
    tokens: int
    """All of the prompt but its last one."""


@final
class SharedPrompts:
    """Who uses which prompt, and the blocks of the shared ones."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self._pool = pool
        self._size = block_size
        self._enabled = enabled
        self._entries: dict[bytes, _Entry] = {}
        self._users: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._users)

    def enter(self, ids: np.ndarray) -> None:
        """A request of this prompt is in the engine."""
        key = ids.tobytes()
        self._users[key] = self._users.get(key, 0) + 1

    def leave(self, ids: np.ndarray) -> None:
        """A request of this prompt has left; with the last one the blocks are free."""
        key = ids.tobytes()
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            if key in self._entries:
                self._pool.release(self._entries.pop(key).blocks)

    def place(self, ids: np.ndarray) -> Placed:
        """Blocks of the prompt for one more sequence; empty where nothing is shared."""
        key = ids.tobytes()
        if not (self._enabled and len(ids) > 1 and (key in self._entries or self._users[key] > 1)):
            return Placed([], 0)
        job = None
        if key not in self._entries:
            blocks = [self._pool.take() for _ in range(-(-(len(ids) - 1) // self._size))]
            self._entries[key] = _Entry(blocks, len(ids) - 1)
            job = (blocks, ids[:-1], 0)
        entry = self._entries[key]
        whole = entry.tokens // self._size
        self._pool.share(entry.blocks[:whole])
        placed = Placed(list(entry.blocks[:whole]), entry.tokens, job)
        if entry.tokens % self._size:
            placed.blocks.append(self._pool.take())
            start = whole * self._size
            placed.copy = Copy(entry.blocks[whole], placed.blocks[-1], (placed.blocks, ids[start:-1], start))
        return placed

    def evict(self, used: Iterable[np.ndarray] = ()) -> None:
        """Forget the KV of all prompts but the `used` ones; who holds their blocks keeps them."""
        keep = {ids.tobytes() for ids in used}
        for key in [k for k in self._entries if k not in keep]:
            self._pool.release(self._entries.pop(key).blocks)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._users.clear()
