"""Programs that try to get out, one row each: what they do, and which layers stop them.

A program prints ESCAPED when it has achieved its effect, not when a call merely returned; where something on the host can
tell, that decides as well (`canary`). `stopped_by` are the layers that each stop it alone or in part: with all of them
switched off the same program must succeed, or the row proves nothing. Words in @at@ signs are filled in from the host.
"""

from __future__ import annotations

import textwrap
import zlib
from dataclasses import dataclass, field

from rollkeel_sandbox import Limits

PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NUMBERS = @numbers@
def call(name, *a):
    r = libc.syscall(ctypes.c_long(NUMBERS[name]), *[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    if r < 0:
        raise OSError(ctypes.get_errno(), name)
    return r
def escaped(evidence=""):
    print("ESCAPED", evidence, flush=True)
"""
FILES = ("mount", "landlock")
PROCESSES = ("pid", "mount", "landlock", "user", "capabilities")
ROOT = ("seccomp", "capabilities", "user", "landlock")
"""What keeps a job of a root server from acting as root."""


@dataclass(frozen=True)
class Escape:
    name: str
    source: str
    stopped_by: tuple[str, ...]
    canary: str | None = None
    """What on the host sees the effect: the name of a check in `Host`."""
    limits: Limits = field(default_factory=lambda: Limits(wall_s=5, cpu_s=5, memory_mb=256))
    ordinary: bool = True
    """An ordinary user's job can achieve it as well when nothing stops it."""
    files: dict[str, bytes] = field(default_factory=dict)
    ordinary_stopped_by: tuple[str, ...] | None = None
    """Where it differs: for an ordinary user, `user` is the user namespace, which gives capabilities before it takes them."""

    def layers(self, user: str) -> tuple[str, ...]:
        if user == "ordinary" and self.ordinary_stopped_by is not None:
            return self.ordinary_stopped_by
        return self.stopped_by

    def program(self, words: dict[str, str]) -> bytes:
        text = PRELUDE + textwrap.dedent(self.source)
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        return text.encode()


UNMAPPED = """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
def shared():
    info = (ctypes.c_ulong * 14)()
    libc.sysinfo(info)
    return info[6]
def hide(flags, file, size=24 << 20):
    before = shared()
    for _ in range(8):
        at = libc.mmap(None, size, 3, flags, file, 0)
        if at == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), 'mmap')
        ctypes.memset(at, 1, size)
        libc.munmap(at + 4096, size - 4096)
    hidden = shared() - before
    escaped(hidden) if hidden > 6 * size else print(hidden)
"""
"""Shared memory, filled, of which all but one page is unmapped again, many times over."""
BOMB = zlib.compress(bytes(96 << 20), 1)
SMALL = Limits(wall_s=6, cpu_s=6, memory_mb=64, processes=8, scratch_mb=4, file_mb=2)

CORPUS = (
    # files of the host
    Escape("read-host-file", "escaped(open('@secret_path@').read())", FILES, canary="secret_printed"),
    Escape("list-host-folder", "escaped(os.listdir(os.path.dirname('@secret_path@')))", FILES),
    Escape("write-host-file", "open('@open_folder@/mark', 'w').write('x'); escaped()", FILES, canary="mark_written"),
    Escape("delete-host-file", "os.unlink('@open_folder@/delete-me'); escaped()", FILES, canary="file_deleted"),
    Escape(
        "symlink-to-host-file",
        "os.symlink('@secret_path@', 'link'); escaped(open('link').read())",
        FILES,
        canary="secret_printed",
    ),
    Escape(
        "dot-dot-to-host-file", "escaped(open('../' * 20 + '@secret_path@').read())", FILES, canary="secret_printed"
    ),
    Escape(
        "mode-of-host-file",
        "p = '@open_folder@/delete-me'; os.chmod(p, 0o606); escaped() if os.stat(p).st_mode & 2 else None",
        (*FILES, "user", "seccomp"),
        canary="mode_changed",
        ordinary_stopped_by=(*FILES, "seccomp"),
    ),
    Escape(
        "times-of-host-file",
        "p = '@open_folder@/delete-me'; os.utime(p, (1, 1)); escaped() if os.stat(p).st_mtime == 1 else None",
        (*FILES, "user", "seccomp"),
        canary="time_changed",
        ordinary_stopped_by=(*FILES, "seccomp"),
    ),
    Escape("read-shadow", "escaped(len(open('/etc/shadow').read()))", (*FILES, "user"), ordinary=False),
    Escape("read-host-passwd", "escaped(len(open('/etc/passwd').read()))", FILES),
    Escape("list-sys", "escaped(len(os.listdir('/sys')))", FILES),
    Escape(
        "handle-of-file",
        """
        handle = (ctypes.c_char * 136)(); ctypes.c_uint.from_buffer(handle).value = 128
        mount = ctypes.c_int()
        call('name_to_handle_at', -100, b'@secret_path@', handle, ctypes.byref(mount), 0)
        root = os.open(os.path.dirname('@secret_path@'), os.O_RDONLY)
        escaped(os.read(call('open_by_handle_at', root, handle, os.O_RDONLY), 100))
        """,
        (*ROOT, "mount"),
        canary="secret_printed",
        ordinary=False,
    ),
    # processes of the host
    Escape(
        "server-environment",
        """
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                text = open(f'/proc/{pid}/environ', 'rb').read()
            except OSError:
                continue
            if b'@environ_secret@' in text:
                escaped(pid); break
        """,
        PROCESSES,
    ),
    Escape(
        "root-of-another-process",
        """
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                if int(pid) != os.getpid():
                    escaped(open(f'/proc/{pid}/root@secret_path@').read()); break
            except OSError:
                continue
        """,
        PROCESSES,
        canary="secret_printed",
    ),
    Escape("see-host-processes", "escaped() if os.path.exists('/proc/@victim@/cmdline') else None", PROCESSES),
    Escape(
        "command-lines",
        """
        seen = [p for p in filter(str.isdigit, os.listdir('/proc')) if int(p) > 1 and int(p) != os.getpid()]
        escaped(len(seen)) if seen else None
        """,
        PROCESSES,
    ),
    Escape(
        "signal-host-process",
        "os.kill(@victim@, signal.SIGTERM); escaped()",
        (*PROCESSES, "seccomp"),
        canary="victim_dead",
    ),
    Escape(
        "slow-down-host-process",
        "os.setpriority(os.PRIO_PROCESS, @victim@, 19); escaped()",
        (*PROCESSES, "seccomp"),
        canary="victim_slowed",
    ),
    Escape(
        "ptrace-host-process",
        "call('ptrace', 16, @victim@, 0, 0); os.waitpid(@victim@, 0x40000000); call('ptrace', 17, @victim@, 0, 0); escaped()",
        (*PROCESSES, "seccomp"),
    ),
    Escape(
        "ptrace-child",
        """
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
        call('ptrace', 16, pid, 0, 0)
        os.waitpid(pid, 0x40000000)
        escaped()
        """,
        ("seccomp",),
    ),
    Escape(
        "read-memory-of-child",
        """
        secret = ctypes.create_string_buffer(b'inner')
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
        out = ctypes.create_string_buffer(6)
        vector = (ctypes.c_ulong * 2)(ctypes.addressof(out), 6)
        remote = (ctypes.c_ulong * 2)(ctypes.addressof(secret), 6)
        call('process_vm_readv', pid, vector, 1, remote, 1, 0)
        escaped(out.value)
        """,
        ("seccomp",),
    ),
    Escape(
        "take-descriptor-of-child",
        """
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
        escaped(call('pidfd_getfd', os.pidfd_open(pid), 0, 0))
        """,
        ("seccomp",),
    ),
    Escape(
        "memory-of-init",
        """
        parent = os.getppid()
        maps = open(f'/proc/{parent}/maps').readlines()
        start = int(next(m for m in maps if ' rw-p ' in m).split('-')[0], 16)
        fd = os.open(f'/proc/{parent}/mem', os.O_RDWR)
        escaped(len(os.pread(fd, 16, start)))
        """,
        (*PROCESSES, "seccomp"),
        ordinary=False,
    ),
    Escape(
        "limits-of-a-child",
        """
        import resource
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
        escaped(resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, 10)))
        """,
        ("seccomp",),
    ),
    # network
    Escape(
        "tcp-to-host",
        "socket.create_connection(('127.0.0.1', @tcp@), 2).send(b'out'); escaped()",
        ("seccomp", "net", "landlock"),
        canary="tcp_reached",
    ),
    Escape(
        "tcp-listen",
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped(s.getsockname())",
        ("seccomp", "landlock"),
    ),
    Escape(
        "udp-to-host",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', @udp@)); escaped()",
        ("seccomp", "net"),
        canary="udp_reached",
    ),
    Escape("ipv6-socket", "escaped(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))", ("seccomp",)),
    Escape(
        "unix-socket-of-host",
        "s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect('@unix@'); s.send(b'out'); escaped()",
        (*FILES, "seccomp"),
        canary="unix_reached",
    ),
    Escape(
        "abstract-socket-of-host",
        "s = socket.socket(socket.AF_UNIX); s.settimeout(2); s.connect('\\0@abstract@'); s.send(b'out'); escaped()",
        ("net", "landlock"),
        canary="abstract_reached",
    ),
    Escape("netlink-socket", "escaped(socket.if_nameindex())", ("seccomp",)),
    Escape(
        "packet-socket",
        "escaped(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))",
        ("seccomp", "capabilities", "user"),
        ordinary=False,
    ),
    Escape("vsock-socket", "escaped(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))", ("seccomp",)),
    # privilege
    Escape("be-root", "escaped() if os.geteuid() == 0 else None", ("user",), ordinary=False),
    Escape(
        "set-uid-program",
        """
        read, write = os.pipe()
        if os.fork() == 0:
            os.dup2(write, 1)
            os.execv('@suid_id@', ['id', '-u'])
        os.close(write)
        escaped() if os.read(read, 9) == b'0\\n' else None
        """,
        ("capabilities", "landlock", "seccomp", "mount"),
        ordinary_stopped_by=("capabilities", "landlock", "seccomp", "user"),
    ),
    Escape("nested-user-namespace", "call('unshare', 0x10000000); escaped(os.geteuid())", ("seccomp",)),
    Escape(
        "clone-user-namespace",
        """
        pid = call('clone', 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        escaped(os.waitpid(pid, 0))
        """,
        ("seccomp",),
    ),
    Escape(
        "clone3-user-namespace",
        """
        args = (ctypes.c_uint64 * 11)(); args[0] = 0x10000000; args[4] = signal.SIGCHLD
        pid = call('clone3', args, ctypes.sizeof(args))
        if pid == 0:
            os._exit(0)
        escaped(os.waitpid(pid, 0))
        """,
        ("seccomp",),
    ),
    Escape(
        "mount",
        "call('mount', b'none', b'/tmp/..', b'tmpfs', 0, 0); escaped()",
        ROOT,
        ordinary_stopped_by=("seccomp", "capabilities", "landlock"),
    ),
    Escape(
        "uncover-proc-of-server",
        "call('umount2', b'/proc', 2); escaped() if len([p for p in os.listdir('/proc') if p.isdigit()]) > 2 else None",
        ROOT,
        ordinary=False,
    ),
    Escape(
        "chroot",
        "os.chroot('.'); escaped()",
        ("seccomp", "capabilities", "user"),
        ordinary_stopped_by=("seccomp", "capabilities"),
    ),
    Escape(
        "set-host-name",
        "socket.sethostname('caught'); escaped(socket.gethostname())",
        ("seccomp", "capabilities", "user"),
        ordinary_stopped_by=("seccomp", "capabilities"),
    ),
    Escape("device-node", "os.mknod('disk', 0o60600, os.makedev(254, 0)); escaped()", ROOT, ordinary=False),
    Escape(
        "kernel-settings",
        "os.open('/proc/sys/kernel/hostname', os.O_WRONLY); escaped()",
        ("user", "landlock"),
        ordinary=False,
    ),
    Escape(
        "real-time-priority",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); escaped()",
        ("capabilities", "user", "rlimits"),
        ordinary=False,
    ),
    # dangerous corners of the kernel
    Escape("io-uring", "p = (ctypes.c_char * 120)(); escaped(call('io_uring_setup', 4, p))", ("seccomp", "rlimits")),
    Escape("user-fault-fd", "escaped(call('userfaultfd', 1))", ("seccomp",)),
    Escape(
        "bpf-map",
        "attr = struct.pack('=IIII', 2, 4, 8, 1) + bytes(112); escaped(call('bpf', 0, attr, len(attr)))",
        ("seccomp", "capabilities", "user"),
        ordinary=False,
    ),
    Escape("kernel-keyring", "escaped(call('add_key', b'user', b'rollkeel', b'x', 1, -1))", ("seccomp",)),
    Escape("no-address-randomisation", "escaped(call('personality', 0x0040000))", ("seccomp",)),
    Escape("shared-memory-segment", "escaped(call('shmget', 0, 1 << 20, 0o600))", ("seccomp",)),
    Escape("hidden-memory-file", "f = os.memfd_create('x'); os.write(f, bytes(1 << 20)); escaped()", ("seccomp",)),
    Escape(
        "core-limit",
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); escaped() if resource.getrlimit(4)[0] == 0 else 0",
        ("rlimits", "seccomp"),
    ),
    Escape(
        "socket-filter",
        """
        code = ctypes.create_string_buffer(struct.pack('=HBBI', 6, 0, 0, 0xFFFF))
        a, b = socket.socketpair()
        a.setsockopt(socket.SOL_SOCKET, 26, struct.pack('@HP', 1, ctypes.addressof(code)))
        escaped()
        """,
        ("seccomp",),
    ),
    # more than its share
    Escape(
        "fork-bomb",
        """
        children = 0
        try:
            for _ in range(24):
                if os.fork() == 0:
                    time.sleep(20); os._exit(0)
                children += 1
        except OSError:
            pass
        escaped(children) if children >= 24 else print(children)
        """,
        ("rlimits", "cgroup"),
        limits=SMALL,
    ),
    Escape(
        "thread-bomb",
        """
        import threading
        started = 0
        try:
            for _ in range(24):
                threading.Thread(target=time.sleep, args=(20,), daemon=True).start(); started += 1
        except RuntimeError:
            pass
        escaped(started) if started >= 24 else None
        """,
        ("rlimits", "cgroup"),
        limits=SMALL,
    ),
    Escape(
        "memory-bomb",
        "x = bytearray(b'a' * (60 << 20)) + bytearray(b'b' * (60 << 20)); time.sleep(0.3); escaped(len(x))",
        ("rlimits", "watch", "cgroup"),
        limits=SMALL,
    ),
    Escape(
        "memory-bomb-of-many",
        """
        for _ in range(4):
            if os.fork() == 0:
                x = bytearray(b'a' * (30 << 20)); time.sleep(20)
        time.sleep(1.5)
        escaped()
        """,
        ("watch", "cgroup"),
        limits=SMALL,
    ),
    Escape(
        "memory-that-stays-when-unmapped",
        UNMAPPED + "hide(0x21, -1)",
        ("seccomp",),
        limits=SMALL,
    ),
    Escape(
        "memory-of-the-zero-device",
        UNMAPPED + "hide(1, os.open('/dev/zero', os.O_RDWR))",
        FILES,
        limits=SMALL,
    ),
    Escape(
        "memory-of-a-process-without-head",
        """
        import mmap, threading
        ctypes.CDLL(None).mallopt(-8, 1)  # no heap of its own for the thread: its address space would be the limit's
        def work():
            time.sleep(0.2)
            m = mmap.mmap(-1, 70 << 20, flags=mmap.MAP_PRIVATE)
            for i in range(0, 70 << 20, 4096):
                m[i] = 1
            time.sleep(0.5); os.write(1, b'ESCAPED'); os._exit(0)
        threading.Thread(target=work).start()
        call('exit', 0)
        """,
        ("watch",),
        limits=SMALL,
    ),
    Escape(
        "zip-bomb",
        "import zlib; x = zlib.decompress(open('bomb', 'rb').read()); time.sleep(0.3); escaped(len(x))",
        ("rlimits", "watch", "cgroup"),
        limits=SMALL,
        files={"bomb": BOMB},
    ),
    Escape(
        "file-bomb",
        """
        for i in range(8):
            open(f'f{i}', 'wb').write(b'x' * (1 << 20))
        escaped()
        """,
        ("mount",),
        limits=SMALL,
    ),
    Escape(
        "many-files",
        """
        for i in range(1500):
            open(f'f{i}', 'w').close()
        escaped()
        """,
        ("mount",),
        limits=SMALL,
    ),
    Escape("huge-file", "open('f', 'wb').write(b'x' * (3 << 20)); escaped()", ("rlimits",), limits=SMALL),
    Escape("many-descriptors", "fds = [os.dup(0) for _ in range(300)]; escaped(len(fds))", ("rlimits",)),
    Escape(
        "locked-memory",
        "b = ctypes.create_string_buffer(1 << 20); call('mlock', b, 1 << 20); escaped()",
        ("rlimits",),
        ordinary=False,
    ),
    Escape(
        "cpu-of-many",
        """
        def burn(seconds):
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                burn(0.3); os._exit(0)
            os.waitpid(pid, 0)
        escaped()
        """,
        ("watch",),
        limits=Limits(wall_s=15, cpu_s=0.5),
    ),
    Escape(
        "cpu-of-children-that-nobody-waits-for",
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for _ in range(6):
            if os.fork() == 0:
                end = time.process_time() + 0.12
                while time.process_time() < end:
                    pass
                os._exit(0)
            try:
                os.wait()
            except ChildProcessError:
                pass
        escaped()
        """,
        ("watch",),
        limits=Limits(wall_s=15, cpu_s=0.4),
    ),
)
