"""A filter with one wrong jump lets everything through and looks the same from outside. A small interpreter of BPF runs the
assembled program here over every call number and the arguments that matter; struct bytes are compared with the kernel's headers.

Not covered: that the kernel runs them the same way (test_escapes.py shows it for x86-64; the aarch64 filter is only read here).
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel_sandbox import Level, Limits, bpf, group, landlock, libc, rlimits, root, seccomp, server, syscalls
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.plan import LAYERS, NAMESPACES, PYTHON, Finding, Plan, choose

NOTHING = bpf.errno_action(0)
EPERM, ENOSYS, EAFNOSUPPORT = (bpf.errno_action(getattr(errno, n)) for n in ("EPERM", "ENOSYS", "EAFNOSUPPORT"))
MACHINES = ("x86_64", "aarch64")


def interpret(code: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel's machine would return for one call: accumulator, forward jumps, 32-bit loads."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(a & (2**64 - 1) for a in (*arguments, *[0] * 6)[:6]))
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator, at = 0, 0
    while True:
        operation, true, false, operand = program[at]
        at += 1
        if operation == 0x20:
            assert operand % 4 == 0
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x06:
            return operand
        else:
            test = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            at += true if test[operation] else false


def filter_of(machine: str, plan: Plan | None = None):
    code = bpf.encode(seccomp.program(machine, plan))
    arch = seccomp.AUDIT_ARCH[machine]
    column = libc.MACHINES[machine]

    def decide(call: str | int, *arguments: int, arch: int = arch) -> int:
        number = syscalls.NUMBERS[call][column] if isinstance(call, str) else call
        return interpret(code, number, arch, arguments)

    return decide


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_gets_what_the_tables_say(machine: str) -> None:
    decide, column = filter_of(machine), libc.MACHINES[machine]
    expected = {}
    for names, action in ((syscalls.ALLOWED, bpf.ALLOW), (syscalls.FORBIDDEN, EPERM), (syscalls.ABSENT, ENOSYS)):
        expected |= {syscalls.NUMBERS[n][column]: action for n in names if syscalls.NUMBERS[n][column] >= 0}
    conditional = {syscalls.NUMBERS[n][column] for n in syscalls.CONDITIONAL}
    for number in range(700):
        if number not in conditional:
            assert decide(number) == expected.get(number, ENOSYS), number
    assert decide(2**31) == decide(2**32 - 1) == (bpf.KILL if machine == "x86_64" else ENOSYS)


CASES = [
    ("socket", (socket.AF_UNIX,), bpf.ALLOW),
    ("socket", (socket.AF_INET,), EAFNOSUPPORT),
    ("socket", (socket.AF_INET6,), EAFNOSUPPORT),
    ("socket", (16,), EAFNOSUPPORT),
    ("socket", (17,), EAFNOSUPPORT),
    ("socket", (0,), EAFNOSUPPORT),
    ("socket", (socket.AF_UNIX | 1 << 32,), bpf.ALLOW),  # the kernel takes an int: it sees AF_UNIX too
    ("socket", (socket.AF_INET | 1 << 32,), EAFNOSUPPORT),
    ("socketpair", (socket.AF_UNIX,), bpf.ALLOW),
    ("socketpair", (30,), EAFNOSUPPORT),
    ("clone", (17,), bpf.ALLOW),
    ("clone", (0x3D0F00,), bpf.ALLOW),
    ("clone", (0x10000000 | 17,), EPERM),
    ("clone", (0x20000 | 0x3D0F00,), EPERM),
    ("clone", (0x40000000,), EPERM),
    ("clone", (0x2000000,), EPERM),
    ("ioctl", (0, 0x5401), bpf.ALLOW),
    ("ioctl", (0, 0x5412), EPERM),
    ("ioctl", (0, 0x541C), EPERM),
    ("ioctl", (0, 0x5412 | 1 << 32), EPERM),
    ("personality", (0xFFFFFFFF,), bpf.ALLOW),
    ("personality", (0,), bpf.ALLOW),
    ("personality", (0x0040000,), EPERM),
    ("prlimit64", (0, 7), bpf.ALLOW),
    ("prlimit64", (1, 7), EPERM),
    ("prlimit64", (1 << 32, 7), bpf.ALLOW),  # the kernel takes an int: 0
    ("prlimit64", (0, resource.RLIMIT_CORE, 0, 1), bpf.ALLOW),  # to ask is harmless
    ("prlimit64", (0, resource.RLIMIT_CORE, 1, 0), NOTHING),
    ("prlimit64", (0, resource.RLIMIT_CORE, 1 << 32, 0), NOTHING),  # a pointer whose lower half is zero
    ("setrlimit", (resource.RLIMIT_CORE,), NOTHING),
    ("setrlimit", (resource.RLIMIT_NOFILE,), bpf.ALLOW),
    ("mmap", (0, 1, 3, 0x21), EPERM),
    ("mmap", (0, 1, 3, 0x22), bpf.ALLOW),
    ("mmap", (0, 1, 3, 0x01), bpf.ALLOW),
    ("mmap", (0, 1, 3, 0x8021), EPERM),
    ("madvise", (0, 1, 4), bpf.ALLOW),
    ("madvise", (0, 1, 21), NOTHING),
    ("prctl", (15,), bpf.ALLOW),
    ("prctl", (22, 2), EPERM),
    ("setsockopt", (3, 1, 26), EPERM),
    ("setsockopt", (3, 1, 2), bpf.ALLOW),
    ("setsid", (), bpf.ALLOW),
    ("fchmod", (), bpf.ALLOW),
    ("kill", (7, 9), bpf.ALLOW),
    ("clone3", (0, 88), ENOSYS),
    ("memfd_create", (), ENOSYS),
    ("unshare", (0x10000000,), EPERM),
    ("io_uring_setup", (4,), EPERM),
    ("ptrace", (), EPERM),
    ("mount", (), EPERM),
    ("read", (0,), bpf.ALLOW),
    ("execve", (), bpf.ALLOW),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("call", "arguments", "action"), CASES)
def test_arguments_decide(machine: str, call: str, arguments: tuple[int, ...], action: int) -> None:
    assert filter_of(machine)(call, *arguments) == action


AMONG_OTHERS = [
    ("socket", (socket.AF_UNIX,), EAFNOSUPPORT, EAFNOSUPPORT),
    ("socketpair", (socket.AF_UNIX, socket.SOCK_STREAM), bpf.ALLOW, bpf.ALLOW),
    ("socketpair", (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), bpf.ALLOW, bpf.ALLOW),
    ("socketpair", (socket.AF_UNIX, socket.SOCK_DGRAM), EAFNOSUPPORT, EAFNOSUPPORT),
    ("socketpair", (socket.AF_INET, socket.SOCK_STREAM), EAFNOSUPPORT, EAFNOSUPPORT),
    ("fchmodat", (), bpf.ALLOW, NOTHING),
    ("utimensat", (), bpf.ALLOW, NOTHING),
    ("setpriority", (0, 0, 5), bpf.ALLOW, bpf.ALLOW),
    ("setpriority", (0, 7, 5), bpf.ALLOW, EPERM),
    ("setpriority", (2, 0, 5), bpf.ALLOW, EPERM),
    ("sched_setaffinity", (0, 8), bpf.ALLOW, bpf.ALLOW),
    ("sched_setaffinity", (7, 8), bpf.ALLOW, EPERM),
    ("unshare", (), EPERM, EPERM),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("call", "arguments", "own", "shared"), AMONG_OTHERS)
def test_more_is_refused_among_the_hosts_processes(
    machine: str, call: str, arguments: tuple[int, ...], own: int, shared: int
) -> None:
    for identity, action in (("own", own), ("shared", shared)):
        plan = Plan(identity=identity, namespaces=frozenset(), landlock=7)
        assert filter_of(machine, plan)(call, *arguments) == action
    apart = Plan(identity="mapped", namespaces=frozenset(NAMESPACES))
    assert seccomp.program(machine, apart) == seccomp.program(machine)


@pytest.mark.parametrize(
    ("abi", "identity", "action"), [(7, "shared", bpf.ALLOW), (5, "shared", EPERM), (5, "own", bpf.ALLOW)]
)
def test_signals_are_refused_where_landlock_lets_them_out(abi: int, identity: str, action: int) -> None:
    decide = filter_of("x86_64", Plan(identity=identity, namespaces=frozenset(), landlock=abi))
    for call in ("kill", "tgkill", "pidfd_send_signal"):
        assert decide(call, 7, 9) == action
    assert decide("fcntl", 3, 8, 7) == decide("ioctl", 3, 0x8901) == action
    assert decide("fcntl", 3, 3) == bpf.ALLOW


def test_foreign_calls_kill() -> None:
    on_x86, on_arm = filter_of("x86_64"), filter_of("aarch64")
    for arch in (0x40000003, 0xC00000B7, 0x40000028, 0):  # i386, aarch64, arm, nonsense
        assert on_x86("read", arch=arch) == bpf.KILL
    assert on_x86(0x40000000) == on_x86(0x40000000 + 1) == bpf.KILL  # x32
    for arch in (0x40000028, 0xC000003E):
        assert on_arm("read", arch=arch) == bpf.KILL


rules = st.dictionaries(
    st.integers(0, 600),
    st.sampled_from(
        [
            bpf.ALLOW,
            EPERM,
            bpf.NoBits(argument=1, bits=6, otherwise=EPERM),
            bpf.NoneOf(argument=2, values=(1, 5), otherwise=EPERM),
            bpf.NotAllBits(argument=1, bits=6, otherwise=EPERM),
            bpf.When(
                argument=0,
                value=3,
                then=bpf.Null(argument=1, otherwise=ENOSYS),
                otherwise=bpf.Equals(argument=2, values=(4, 5), otherwise=EPERM),
            ),
        ]
    ),
)


@given(rules, st.integers(0, 700), st.integers(0, 9))
def test_any_table_assembles_to_itself(table: dict[int, bpf.Rule], number: int, value: int) -> None:
    code = bpf.encode(bpf.assemble(7, table, default=ENOSYS))
    rule = table.get(number, ENOSYS)
    if isinstance(rule, bpf.NoBits):
        expected = EPERM if value & 6 else bpf.ALLOW
    elif isinstance(rule, bpf.NoneOf):
        expected = EPERM if value in (1, 5) else bpf.ALLOW
    elif isinstance(rule, bpf.NotAllBits):
        expected = EPERM if value & 6 == 6 else bpf.ALLOW
    elif isinstance(rule, bpf.When):
        expected = ENOSYS if value == 3 else bpf.ALLOW if value in (4, 5) else EPERM
    else:
        expected = rule
    assert interpret(code, number, 7, (value, value, value)) == expected
    assert interpret(code, number, 8) == bpf.KILL


def test_the_call_table_has_no_double_numbers_and_no_overlap() -> None:
    for column in (0, 1):
        numbers = [n[column] for n in syscalls.NUMBERS.values() if n[column] >= 0]
        assert len(numbers) == len(set(numbers))
    sets = (syscalls.ALLOWED, syscalls.CONDITIONAL, syscalls.FORBIDDEN, syscalls.ABSENT)
    assert sum(map(len, sets)) == len(frozenset().union(*sets))
    assert frozenset().union(*sets) <= set(syscalls.NUMBERS)
    assert set(seccomp.conditions()) == syscalls.CONDITIONAL
    known = {"read": (0, 63), "openat": (257, 56), "clone": (56, 220), "ptrace": (101, 117), "mount": (165, 40)}
    assert {n: syscalls.NUMBERS[n] for n in known} == known


@pytest.mark.parametrize(
    ("abi", "attr"),
    [
        (1, struct.pack("=Q", 0x1FFF)),
        (2, struct.pack("=Q", 0x3FFF)),
        (3, struct.pack("=Q", 0x7FFF)),
        (4, struct.pack("=QQ", 0x7FFF, 3)),
        (5, struct.pack("=QQ", 0xFFFF, 3)),
        (6, struct.pack("=QQQ", 0xFFFF, 3, 3)),
        (7, struct.pack("=QQQ", 0xFFFF, 3, 3)),
    ],
)
def test_landlock_forbids_all_that_an_abi_can(abi: int, attr: bytes) -> None:
    assert landlock.handled(abi).encode() == attr


def test_landlock_rules_in_bytes() -> None:
    assert landlock.rights(("execute", "read_file", "read_dir"), 1) == 0b1101
    assert landlock.rights(("refer", "truncate", "read_file"), 1) == 0b100  # ABI 1 knows neither
    assert landlock.path_rule(0b1101, 9) == b"\x0d\0\0\0\0\0\0\0\x09\0\0\0"
    rules = dict(root.rules(("/usr",), private=True))
    assert set(rules["/usr"]) == {"execute", "read_file", "read_dir"}
    assert not {"make_char", "make_block"} & {name for names in (*rules.values(), *root.JOB_FOLDERS) for name in names}
    assert not {"/", "/dev/zero"} & set(dict(root.rules(("/usr",), private=False)))
    prepared = landlock.prepare([("/dev/null", landlock.DEVICE), ("/gone", landlock.READ)], 7, 100, root.JOB_FOLDERS)
    (encoded,) = prepared.encoded
    allowed, descriptor = struct.unpack("=Qi", encoded)
    assert allowed == landlock.rights(("read_file", "write_file", "ioctl_dev"), 7)
    assert descriptor >= 100
    assert os.stat("/dev/null").st_rdev == os.fstat(descriptor).st_rdev
    os.close(descriptor)


def test_rlimits_by_hand() -> None:
    limits = Limits(cpu_s=1.2, memory_mb=100, processes=7, file_mb=3)
    planned = rlimits.plan(limits, base_bytes=1000)
    assert planned["AS"] == (1000 + 200 * 2**20,) * 2
    assert planned["CPU"] == (2, 3)
    assert planned["FSIZE"] == (3 * 2**20,) * 2
    assert planned["NPROC"] == (7, 7)
    assert planned["MEMLOCK"] == planned["MSGQUEUE"] == (0, 0)
    assert planned["CORE"] == (1, 1)  # 0 is not enough where dumps go to a program
    assert all(hasattr(resource, f"RLIMIT_{name}") for name in planned)


ALL = [Finding(layer=layer, holds=True, how="") for layer in (*LAYERS, PYTHON)]


@pytest.mark.parametrize(
    ("root_user", "missing", "without", "level", "identity"),
    [
        (True, (), (), Level.FULL, "own"),
        (False, (), (), Level.NAMESPACES, "mapped"),
        (True, ("user",), (), Level.RESTRICTED, "shared"),
        (False, ("user",), (), Level.RESTRICTED, "shared"),
        (False, ("mount",), (), Level.RESTRICTED, "shared"),
        (True, ("net",), (), Level.RESTRICTED, "own"),
        (False, NAMESPACES, (), Level.RESTRICTED, "shared"),
        (False, (*NAMESPACES, "landlock"), (), Level.NONE, "shared"),
        (True, (PYTHON,), (), Level.FULL, "own"),
        (True, (PYTHON, "net"), (), Level.NONE, "own"),  # a right program that imports anything would be called wrong
        (False, (PYTHON, *NAMESPACES), (), Level.RESTRICTED, "shared"),
        (True, ("landlock",), (), Level.FULL, "own"),
        (True, ("seccomp",), (), Level.NONE, "own"),
        (True, ("rlimits",), (), Level.NONE, "own"),
        (True, (), ("seccomp",), Level.NONE, "own"),
        (True, (), ("watch",), Level.NONE, "own"),
        (True, (), ("pid",), Level.RESTRICTED, "own"),
        (True, (), ("landlock",), Level.FULL, "own"),
        (False, (), ("user",), Level.RESTRICTED, "shared"),
        (False, (), ("net",), Level.RESTRICTED, "mapped"),
    ],
)
def test_levels(
    root_user: bool, missing: tuple[str, ...], without: tuple[str, ...], level: Level, identity: str
) -> None:
    found = [f for f in ALL if f.layer not in missing]
    plan = choose(found, root=root_user, landlock_abi=7, without=without)
    assert (plan.level, plan.identity) == (level, identity)
    assert Plan.from_json(plan.to_json()) == plan
    assert not set(plan.isolation(1)) & {*missing, *without}


def test_an_unknown_layer_gets_one_line() -> None:
    with pytest.raises(BadInput, match="unknown layer 'secomp'; did you mean seccomp"):
        choose(ALL, root=True, landlock_abi=7, without=("secomp",))


def test_the_tree_binds_each_path_once_and_keeps_links(tmp_path) -> None:
    for name in ("usr", "usr/lib", "opt"):
        (tmp_path / name).mkdir()
    (tmp_path / "lib").symlink_to("usr/lib")
    links, binds = root.links_and_binds([str(tmp_path / n) for n in ("lib", "usr/lib", "usr", "opt", "gone")])
    assert links[str(tmp_path / "lib")] == "usr/lib"
    assert [b.source for b in binds if not b.device] == [str(tmp_path / "opt"), str(tmp_path / "usr")]


def test_a_link_inside_a_bound_folder_is_left_alone(tmp_path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib64").symlink_to("lib")
    links, _ = root.links_and_binds([str(tmp_path / n) for n in ("usr/lib64", "usr")])
    assert str(tmp_path / "usr/lib64") not in links


def test_of_a_prefix_only_the_installation_is_shown(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A virtual environment may have been made in the folder of a project, beside what a job must not see.
    for name in ("bin", "lib", "answers"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert f"{tmp_path}/lib" in root.interpreter_paths()
    assert not [p for p in root.interpreter_paths() if f"{tmp_path}/answers".startswith(p)]


@pytest.mark.parametrize(("abi", "level"), [(2, Level.NONE), (3, Level.RESTRICTED)])
def test_landlock_that_lets_files_be_emptied_is_no_wall(abi: int, level: Level) -> None:
    found = [f for f in ALL if f.layer not in NAMESPACES]
    assert choose(found, root=False, landlock_abi=abi).level is level
    assert choose(ALL, root=False, landlock_abi=abi).level is Level.NAMESPACES


def stat_line(
    pid: int, state: str, cpu: tuple[int, int, int, int], threads: int = 1, name: str = "x) R 1 (\n"
) -> bytes:
    fields = [state, 1, *[0] * 9, *cpu, 20, 0, threads, 0, 77, *[0] * 30]
    return f"{pid} ({name}) {' '.join(map(str, fields))}\n".encode()


def test_a_line_of_stat_by_hand() -> None:
    tick = group.TICK
    process = group.parse_stat(5, stat_line(5, "S", (tick, tick, 3 * tick, 0)))
    assert process == group.Process(5, 1, 77, 2.0, 3.0, headless=False)
    assert group.parse_stat(5, stat_line(5, "Z", (0, 0, 0, 0), threads=3)).headless
    gone = group.parse_stat(5, stat_line(5, "Z", (0, 0, 0, 0)))
    assert (gone.ended, gone.headless) == (True, False)


def test_cpu_of_children_nobody_waited_for_is_counted_once() -> None:
    def at(pid: int, own: float, waited: float = 0.0, started: int = 1) -> group.Process:
        return group.Process(pid, 1, started, own, waited)

    ledger = group.Ledger()
    assert ledger.cpu_s([at(1, 0.1), at(2, 1.0)]) == pytest.approx(1.1)
    assert ledger.cpu_s([at(1, 0.1)]) == pytest.approx(1.1)  # its parent ignored it
    assert ledger.cpu_s([at(1, 0.1), at(2, 0.5, started=9)]) == pytest.approx(1.6)  # the number came again
    assert ledger.cpu_s([at(1, 0.1, waited=2.0)]) == pytest.approx(2.1)  # the parent knew of more than was seen
    assert ledger.seen_s == pytest.approx(2.1)


def test_installed_beside_other_packages_a_job_can_still_import_them() -> None:
    assert server.without_own(["/site", "/std", "/site"], "/site") == ["/std", "/site"]
    assert server.without_own(["/checkout", "/std", "/site"], "/checkout") == ["/std", "/site"]


def test_what_is_bound_below_tmp_keeps_its_place() -> None:
    """A checkout in `/tmp` has its Python there: the link that `/tmp` is otherwise would take its place."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        links, binds = root.links_and_binds(["/usr", folder])
        assert folder in {b.target for b in binds}
        assert "/tmp" not in links
        assert "/dev/fd" in links
    assert root.links_and_binds(["/usr"])[0]["/tmp"] == root.SCRATCH + "/tmp"
