"""`Sandbox`: programs in, results out. Its jobs run in warm cages forked by a fork server; see `cage.py` for one of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from rollkeel_sandbox import cgroup, enclosure, kinds, tree
from rollkeel_sandbox.boxes import Box, Boxes
from rollkeel_sandbox.client import Broken, CageFailure, ForkServer, Slot, Unbuilt
from rollkeel_sandbox.enclosure import Enclosure
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.identity import UidBlock
from rollkeel_sandbox.job import Closes, Job, Level, Refused, Result, Status
from rollkeel_sandbox.plan import OWN, Plan
from rollkeel_sandbox.probing import probe

ATTEMPTS = 2
MAX_LOST = 64
"""Uids of lost cages, after which their server is replaced to get them back."""
MAX_UNBUILT = 16
"""Cages in a row that may die before they have their job: the spare ones of a server that was killed."""


class Handle:
    """Ends, from another thread, a job that `Sandbox.run` waits for: `run` then returns `killed` with the reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slot: Slot | Box | None = None
        self.reason = ""

    def end(self, reason: str, *, hung: bool = False) -> None:
        """Does not wait. `hung`: it should have ended long ago; if it still waits for its cage, the fork server is at fault."""
        with self._lock:
            self.reason = reason
            if self._slot:
                self._slot.interrupt()
                if hung and isinstance(self._slot, Slot) and not self._slot.built:
                    self._slot.server.condemn()

    def hold(self, slot: Slot | Box | None) -> None:
        """The cage that the job is in now."""
        with self._lock:
            self._slot = slot
            if slot and self.reason:
                slot.interrupt()


class Sandbox(Closes):
    """Runs jobs, at most `workers` at a time; `run` may be called from any number of threads.

    `minimum` is the level below which untrusted jobs are refused. `without` leaves layers out, to measure them and to
    show what they are for; it lowers the level as a missing layer would. `backend`: `native` builds its own cages,
    `bubblewrap` and `gvisor` have those programs build one for each job; `auto` is native, or the one with the highest level
    where native gives less than `namespaces`. `attempts`: how often a job is run that loses its cage.
    `image`: an OCI layout, or a tar of `docker save`, whose files jobs see instead of the machine's; for the native backend's private root.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        minimum: Level = Level.NAMESPACES,
        without: Sequence[str] = (),
        warm: bool = True,
        backend: str = "auto",
        attempts: int = ATTEMPTS,
        image: Path | None = None,
    ) -> None:
        if workers < 1:
            raise BadInput(f"sandbox: expected at least one worker, got {workers}")
        self.plan = choose_plan(backend, tuple(without))
        self.level = self.plan.level
        self._image = _unpacked(image, self.plan) if image else None
        self.minimum = minimum
        self._warm = warm
        self._attempts = attempts
        self._workers = workers
        self._permits = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._servers: dict[str, ForkServer | Boxes] = {}
        self._spare: dict[str, list[Slot | Box]] = {}
        self._uids = UidBlock() if self.plan.identity == OWN else None
        self._lost: dict[ForkServer | Boxes, list[int]] = {}
        self._closed = False
        # Without mounts jobs work in folders of the host: all in one, so that none is left behind.
        self._base = "" if "mount" in self.plan.namespaces else tempfile.mkdtemp(prefix="rollkeel-")
        if self._base:
            os.chmod(self._base, 0o711)
        self._group = cgroup.make() if isinstance(self.plan, Plan) and self.plan.cgroup else ""

    def run(self, job: Job, handle: Handle | None = None) -> Result:
        """Run one job and wait for its end. Raises `CageFailure` when no cage can be built and `MissingTool`
        when this machine cannot run such programs; never for what a program does."""
        if job.untrusted and self.level < self.minimum:
            return Result(status=Status.REFUSED, level=self.level, reason=self._why_refused(), attempts=0)
        self.require_tools(job.kind)
        handle = handle or Handle()
        with self._permits:
            attempt = 1
            unbuilt = 0
            reason = ""
            while attempt <= self._attempts and not handle.reason:
                slot = None
                try:
                    slot = self._take(job.preload)
                    header, blobs = self._held(slot, job, handle)
                except (Broken, CageFailure) as error:
                    reason = str(error)
                    self._discard(slot, job.preload)
                    if not handle.reason:
                        with self._lock:
                            self._drop_spares(job.preload)
                    if isinstance(error, Unbuilt) and unbuilt < MAX_UNBUILT:
                        unbuilt += 1
                        continue
                    if attempt == self._attempts and isinstance(error, CageFailure):
                        raise
                    attempt += 1
                    continue
                except BaseException:
                    self._discard(slot, job.preload)
                    raise
                self._finish(slot)
                return self._result(header, blobs, slot.uid, attempt)
        attempts = min(attempt, self._attempts)
        reason = handle.reason or (reason if attempts == 1 else f"{reason}, {attempts} times")
        return Result(status=Status.KILLED, level=self.level, reason=reason, attempts=attempts)

    def _held(self, slot: Slot | Box, job: Job, handle: Handle) -> tuple[dict, list[bytes]]:
        handle.hold(slot)
        try:
            return slot.run(job, lambda: self._refill(job.preload))
        finally:
            handle.hold(None)

    def require(self) -> None:
        """Raise `Refused` if untrusted jobs would be."""
        if self.level < self.minimum:
            raise Refused(self._why_refused())

    def require_tools(self, kind: str) -> None:
        """Raise `MissingTool` when programs of this kind cannot be run, here or in the image."""
        if self._image:
            from rollkeel_sandbox import images  # few have one

            images.require(self._image, kind)
        else:
            kinds.require(kind)

    def close(self) -> None:
        """End the fork servers and everything that still runs in them."""
        with self._lock:
            self._closed = True
            for slot in (slot for slots in self._spare.values() for slot in slots):
                slot.close()
            self._spare.clear()
            for server in self._servers.values():
                server.kill()
            self._servers.clear()
            if self._uids:
                self._uids.close()
            if self._base:
                tree.remove(self._base)
            if self._group:
                cgroup.remove(self._group)

    def server_pids(self) -> dict[str, int]:
        """Preload → process id of the launcher of its fork server, for those that were needed so far."""
        with self._lock:
            return {name: server.pid for name, server in self._servers.items()}

    def _why_refused(self) -> str:
        return (
            f"sandbox: untrusted work needs isolation level {self.minimum.name.lower()}, this machine gives"
            f" {self.level.name.lower()}; see rollkeel-sandbox doctor"
        )

    def _take(self, preload: str) -> Slot | Box:
        with self._lock:
            if self._closed:
                raise BadInput("sandbox: it is closed; open a new one")
            spare = self._spare.get(preload, [])
            while spare and not spare[-1].server.alive():
                self._let_go(spare.pop())  # no process has had a job in it
            return spare.pop() if spare else self._order(preload)

    def _order(self, preload: str) -> Slot | Box:
        """A cage from a server that lives; the lock is held."""
        for _ in range(ATTEMPTS):
            server = self._servers.get(preload)
            if server is None or not server.alive():
                if server is not None:
                    self._replace(server, preload)
                server = self._servers[preload] = self._start_server(preload)
            uid = self._uids.take() if self._uids else os.getuid()
            try:
                return server.order(uid)
            except Broken:
                if self._uids:
                    self._uids.release(uid)  # no process has had it
                server.kill()
        raise Broken("the fork server dies as soon as it is started")

    def _start_server(self, preload: str) -> ForkServer | Boxes:
        if isinstance(self.plan, Enclosure):
            return Boxes(self.plan.backend, own_uids=self.plan.identity == OWN)
        return ForkServer(self.plan, preload, self._base, self._group, str(self._image or ""))

    def _replace(self, server: ForkServer | Boxes, preload: str) -> None:
        """End a server; uids of cages that were lost come back if all their processes are surely dead."""
        server.kill()
        self._drop_spares(preload)
        if server.surely_dead and self._uids:
            for uid in self._lost.pop(server, []):
                self._uids.release(uid)

    def _let_go(self, slot: Slot | Box) -> None:
        """A cage whose processes are known to be dead, or that never had a job."""
        slot.close()
        if self._uids:
            self._uids.release(slot.uid)

    def _refill(self, preload: str) -> None:
        """While a job runs the next cage is built, up to one for each worker."""
        with self._lock:
            spare = self._spare.setdefault(preload, [])
            if self._warm and not self._closed and len(spare) < self._workers:
                with contextlib.suppress(Broken):  # the next job finds out, and has its own attempts
                    spare.append(self._order(preload))

    def _finish(self, slot: Slot | Box) -> None:
        """The supervisor has reaped all of the job before it answered: its uid may be used again."""
        with self._lock:
            self._let_go(slot)

    def _discard(self, slot: Slot | Box | None, preload: str) -> None:
        """Nothing is known about this cage's processes: its uid is not used again before its server is surely dead."""
        if slot is None:
            return
        with self._lock:
            slot.close()
            self._drop_spares(preload)  # of the same server, which may be dying: not for the next attempt
            if slot.server.surely_dead and self._uids:
                self._uids.release(slot.uid)
                return
            lost = self._lost.setdefault(slot.server, [])
            lost.append(slot.uid)
            if len(lost) > MAX_LOST and slot.server is self._servers.get(preload):
                self._replace(slot.server, preload)

    def _drop_spares(self, preload: str) -> None:
        """A cage died, perhaps with its server, whose spare cages may last a moment longer: no job is to fall to one death twice.

        An order for a new cage shows whether the server lives: its end of the control socket closes before its cages die. Lock held.
        """
        for slot in self._spare.pop(preload, []):
            self._let_go(slot)

    def _result(self, header: dict, blobs: list[bytes], uid: int, attempt: int) -> Result:
        stdout, stderr, *contents = blobs
        files = dict(zip(header.pop("files"), contents, strict=True))
        status = Status(header.pop("status"))
        return Result(
            **header,
            status=status,
            stdout=stdout,
            stderr=stderr,
            files=files,
            level=self.level,
            isolation=self.plan.isolation(uid),
            attempts=attempt,
        )


def choose_plan(backend: str, without: tuple[str, ...]) -> Plan | Enclosure:
    """What jobs get. Leaving layers out is for the native backend alone."""
    enclosure.check(backend)
    if backend in enclosure.PROGRAMS:
        if without:
            raise BadInput(f"sandbox: without={without}: layers can be left out with backend native only")
        found = enclosure.probe(backend)
        if found.level is Level.NONE:
            raise Refused(f"sandbox: backend {backend} cannot be used here: {found.why_not}")
        return found
    plan = probe().plan(without)
    if backend == "native" or without or plan.level >= Level.NAMESPACES:
        return plan
    return max([plan, *map(enclosure.probe, enclosure.PROGRAMS)], key=lambda p: p.level)


def _unpacked(image: Path, plan: Plan | Enclosure) -> Path:
    if isinstance(plan, Enclosure) or "mount" not in plan.namespaces:
        raise Refused(
            "sandbox: an image needs the native backend's private root, which cannot be had here; see rollkeel-sandbox doctor"
        )
    from rollkeel_sandbox import images

    return images.unpack(image)
