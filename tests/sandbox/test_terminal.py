"""An agent's shell must behave like one, and must not outlive its limits: what stays between commands, what ends when.

Every session is a real one, as root and as an ordinary user, with namespaces and without. Not covered: escapes, which meet the
same layers as any job's (test_escapes.py), and shells other than those installed here.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from sandbox_driver import Here, There

from rollkeel_sandbox import (
    Level,
    Refused,
    Result,
    Sandbox,
    SessionEnded,
    Status,
    Terminal,
    TerminalLimits,
    probe,
    session,
)
from rollkeel_sandbox import terminal as module
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.plan import NAMESPACES

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
SMALL = TerminalLimits(wall_s=20, cpu_s=20, memory_mb=256, output_bytes=10_000)


@pytest.fixture(params=["namespaces", pytest.param("restricted", marks=pytest.mark.slow)])
def without(request: pytest.FixtureRequest, user: str) -> tuple[str, ...]:
    if request.param == "namespaces":
        return ()
    if probe().landlock_abi < 6:
        pytest.skip("Landlock does not hold well enough on this machine")
    return NAMESPACES if user == "root" else ("user",)


def brief(results: list[Result]) -> list[tuple[str, int | None, bytes]]:
    return [(r.status.value, r.exit_code, r.stdout) for r in results]


def test_state_lasts_from_command_to_command(driver: Here | There, without: tuple[str, ...], user: str) -> None:
    commands = [
        "cat d/a.txt; mkdir new; cd new; x='a  b'; export y=2; f() { echo \"f $1\"; }",
        'basename "$PWD"; echo "$x"; sh -c \'echo $y\'; f 1; echo hey > file',
        "cat file; (exit 7)",
        "sleep 60 & echo background",
        "kill %1 && wait; echo gone >&2",
        "if",
        "cat; printf 'it'\"'\"'s\\0\\377'",
        "echo $x",
    ]
    results = driver.converse([(c, 10.0) for c in commands], SMALL, {"d/a.txt": b"first\n"}, without)
    assert brief(results)[:5] == [
        ("ok", 0, b"first\n"),
        ("ok", 0, b"new\na  b\n2\nf 1\n"),
        ("error", 7, b"hey\n"),
        ("ok", 0, b"background\n"),
        ("ok", 0, b""),
    ]
    assert results[4].stderr.endswith(b"gone\n")
    assert results[5].status is Status.ERROR
    assert b"syntax error" in results[5].stderr.lower()
    assert brief(results)[6:] == [("ok", 0, b"it's\0\xff"), ("ok", 0, b"a b\n")]
    assert results[0].stderr == b""  # no complaints about a terminal that is none
    # Root's own Python may lie where other users have no way: then nothing holds without namespaces.
    alone = probe().plan(without).level if user == "root" else Level.RESTRICTED
    assert {r.level for r in results} <= ({alone} if without else {Level.NAMESPACES, Level.FULL})


def test_a_command_that_takes_too_long_is_killed_and_the_session_goes_on(
    driver: Here | There, without: tuple[str, ...]
) -> None:
    commands = [
        ("sleep 60 & x=5", 5.0),
        ("sleep 30; echo after", 0.6),
        ("while :; do :; done", 0.6),
        ("(trap '' INT; sh -c 'trap \"\" INT TERM; sleep 31' & sleep 32)", 0.6),
        ("echo $x; kill -0 %1 && echo still", 5.0),
        ("trap '' INT; while :; do :; done", 0.2),
        ('echo "[$x]"; ls', 5.0),
    ]
    results = driver.converse(commands, SMALL, {"a": b""}, without)
    for i in (1, 2, 3, 5):
        assert (results[i].status, results[i].exit_code, results[i].stdout) == (Status.TIMEOUT, None, b""), i
        assert results[i].wall_s < commands[i][1] + 3
    assert brief(results)[4] == ("ok", 0, b"5\nstill\n")  # what ran before in the background was not meant
    assert "there is a new one" in results[5].reason  # this one could only be ended with its shell
    assert brief(results)[6] == ("ok", 0, b"[]\na\n")


def test_a_command_that_ends_as_its_time_does_leaves_nothing_in_the_output(driver: Here | There) -> None:
    raced = [("sleep 0.05", 0.05 + 0.0002 * i) for i in range(30)]
    first, *results, last = driver.converse([("x=5", 5.0), *raced, ("echo $x", 5.0)], SMALL, {}, ())
    assert {result.status for result in results} <= {Status.OK, Status.TIMEOUT}
    assert {result.stdout for result in results} == {b""}
    assert (first.status, last.status) == (Status.OK, Status.OK)
    assert last.stdout == b"5\n" or any(result.reason for result in results)


def test_output_is_cut_and_the_command_goes_on(driver: Here | There) -> None:
    commands = [("yes | head -c 200000; yes | head -c 30000 >&2; x=1", 5.0), ("echo $x", 5.0), ("yes", 0.2)]
    cut, after, endless = driver.converse(commands, SMALL, {}, ())
    assert (cut.status, len(cut.stdout)) == (Status.OK, 10_000)
    assert 9_000 < len(cut.stderr) <= 10_000  # less what the shell complained about
    assert (cut.stdout_truncated, cut.stderr_truncated) == (True, True)
    assert (after.stdout, after.stdout_truncated) == (b"1\n", False)
    assert (endless.status, len(endless.stdout)) == (Status.TIMEOUT, 10_000)


def test_plain_sh_does_where_there_is_no_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHELL", session.SHELL.replace(b"command -v bash", b"false"))
    with Sandbox(workers=1, warm=False) as sandbox, Terminal(sandbox, SMALL) as terminal:
        assert terminal.run("cd /tmp; x=1; echo $0").stdout == b"sh\n"
        assert terminal.run("sleep 9; echo after", 0.6).status is Status.TIMEOUT
        assert terminal.run("while :; do :; done", 0.6).status is Status.TIMEOUT
        result = terminal.run("pwd; echo $x")
        assert (result.stdout, result.stderr) == (b"/tmp\n1\n", b"")


def test_a_shell_that_ends_is_replaced(driver: Here | There) -> None:
    ended, after = driver.converse([("touch kept; x=1; exit 3", 5.0), ('echo "[$x]"; ls', 5.0)], SMALL, {}, ())
    assert (ended.status, ended.exit_code) == (Status.ERROR, 3)
    assert "there is a new one" in ended.reason
    assert after.stdout == b"[]\nkept\n"


LIMITS = {
    "cpu": ("while :; do :; done", {"cpu_s": 0.2}, Status.CPU, "used 0.2 s of CPU"),
    "memory": ("x=$(head -c 200000000 /dev/zero | tr '\\0' a)", {"memory_mb": 32}, Status.MEMORY, "more than 32 MB"),
    "wall": ("sleep 9", {"wall_s": 0.2}, Status.TIMEOUT, "open for 0.2 s"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_the_session_ends_it(limit: str) -> None:
    command, fields, status, reason = LIMITS[limit]
    limits = TerminalLimits(**({"wall_s": 10, "cpu_s": 10, "memory_mb": 256} | fields))
    with Sandbox(workers=1, warm=False) as sandbox, Terminal(sandbox, limits) as terminal:
        result = terminal.run(command, 8.0)
        assert result.status is status
        assert f"the session ended: it {'was' if limit == 'wall' else 'used'}" in result.reason
        assert reason in result.reason
        with pytest.raises(SessionEnded, match=reason):
            terminal.run("echo")


def test_processes_are_limited(driver: Here | There) -> None:
    limits = TerminalLimits(wall_s=20, cpu_s=10, memory_mb=256, processes=12)
    bomb = "b() { b | b & }; b"
    first, second = driver.converse([(bomb, 0.5), ("echo here", 3.0)], limits, {}, ())
    assert first.status in (Status.OK, Status.ERROR, Status.TIMEOUT)
    assert second.wall_s < 5


def inside(mark: str) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("end", ["close", "idle", "limit", "sandbox"])
def test_nothing_outlives_the_session(end: str) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    with Sandbox(workers=1, warm=False) as sandbox:
        limits = TerminalLimits(wall_s=1.0 if end == "limit" else 30, idle_s=0.3 if end == "idle" else 30)
        terminal = Terminal(sandbox, limits)
        assert terminal.run(f"setsid sh -c 'sleep 300; : {mark}' & sleep 0.1").status is Status.OK
        assert inside(mark)
        if end == "close":
            terminal.close()
        elif end == "sandbox":
            sandbox.close()
        else:
            time.sleep(1.0 if end == "limit" else 0.6)
        for _ in range(100):
            if not inside(mark):
                break
            time.sleep(0.02)
        assert inside(mark) == []
        if end != "close":
            last = terminal.run("echo")
            assert last.status in (Status.TIMEOUT, Status.KILLED)
        assert not terminal.alive
        with pytest.raises(SessionEnded):
            terminal.run("echo")
        terminal.close()


def test_a_session_leaves_no_files_and_gives_its_cage_back() -> None:
    with Sandbox(workers=1, warm=False) as sandbox:
        with Terminal(sandbox) as terminal:
            terminal.run("touch mine")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with Terminal(sandbox) as terminal:
                assert terminal.run("ls -a").stdout == b".\n..\n"
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_lost_cage_is_reported() -> None:
    with Sandbox(workers=1, warm=False) as sandbox, Terminal(sandbox) as terminal:
        terminal.run("true")
        thread = threading.Timer(0.2, lambda: os.kill(sandbox.server_pids()["code"], signal.SIGKILL))
        thread.start()
        result = terminal.run("sleep 5")
        thread.join()
        assert (result.status, terminal.alive) == (Status.KILLED, False)
        assert "the cage died" in result.reason


def test_forged_messages_harm_only_the_session_itself() -> None:
    forged = "echo shell 1 >&4; echo done x 0 >&4; head -c 100000 /dev/zero >&4; echo shell $PPID >&4"
    with Sandbox(workers=1, warm=False) as sandbox:
        with Terminal(sandbox, SMALL) as terminal:
            # The descriptor is closed for commands; what gets at it through the shell's own does no harm.
            assert terminal.run(forged).status is Status.ERROR
            terminal.run(
                "for f in /proc/$$/fd/*; do { echo shell 1; echo done x 0; echo ended; } > $f; done 2>/dev/null", 1.0
            )
        with Terminal(sandbox, SMALL) as terminal:
            assert terminal.run("echo fine").stdout == b"fine\n"


@pytest.mark.parametrize(
    ("command", "timeout", "said"),
    [
        ("a\0b", 1.0, "NUL"),
        ("\ud800", 1.0, "surrogate"),
        ("x" * (1 << 20) + "y", 1.0, "1048576"),
        ("echo", 0.0, "timeout"),
    ],
)
def test_bad_commands_get_one_line(command: str, timeout: float, said: str, shared: Terminal) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        shared.run(command, timeout)
    assert "\n" not in str(caught.value)


def test_a_large_command_arrives_whole(shared: Terminal) -> None:
    assert shared.run(f"x={'a' * 900_000}; echo ${{#x}}").stdout == b"900000\n"


@pytest.fixture(scope="module")
def shared():
    with Sandbox(workers=1, warm=False) as sandbox, Terminal(sandbox) as terminal:
        yield terminal


def test_it_is_refused_below_the_minimum() -> None:
    with Sandbox(workers=1, minimum=Level.FULL, without=("seccomp",)) as sandbox:
        with pytest.raises(Refused):
            Terminal(sandbox)
        with Terminal(sandbox, untrusted=False) as terminal:
            assert terminal.run("echo trusted").stdout == b"trusted\n"


def test_bad_limits_get_one_line() -> None:
    with pytest.raises(BadInput, match="sandbox limit idle_s: expected a number"):
        TerminalLimits(idle_s="long")  # type: ignore[arg-type]
