"""A compiler that is missing, or that does not fit into the limits, must not look like a wrong answer of the model.

Compilers and interpreters that are installed here run for real, as root and as an ordinary user; others are skipped and say
so. Not covered: what the layers stop, which is the same for every kind (test_escapes.py).
"""

from __future__ import annotations

import pytest
from sandbox_driver import Here, There

from rollkeel_sandbox import Job, Level, Limits, Sandbox, Status, kinds, probe
from rollkeel_sandbox.job import KINDS
from rollkeel_sandbox.plan import NAMESPACES

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
LIMITS = Limits(wall_s=60, cpu_s=60)
ECHO = {
    "c": b'#include <stdio.h>\nint main(int n, char **a) { char s[9]; scanf("%8s", s); printf("%s %s\\n", s, a[1]); return 3; }',
    "c++": b"#include <iostream>\nint main(int n, char **a) { std::string s; std::cin >> s; std::cout << s << ' ' << a[1] << '\\n'; return 3; }",
    "rust": b"""
        fn main() {
            let mut s = String::new();
            std::io::stdin().read_line(&mut s).unwrap();
            println!("{} {}", s.trim(), std::env::args().nth(1).unwrap());
            std::process::exit(3)
        }""",
    "javascript": b"console.log(require('fs').readFileSync(0, 'utf8').trim(), process.argv[2]); process.exitCode = 3",
    "java": b"""
        public class Solution {
            public static void main(String[] a) {
                System.out.println(new java.util.Scanner(System.in).nextLine() + " " + a[0]);
                System.exit(3);
            }
        }""",
}
WRONG = {
    "c": b"int main( {",
    "c++": b"int main( {",
    "rust": b"fn main( {",
    "javascript": b"const = 1",
    "java": b"class {",
}
GROWS = {
    "c": b"#include <stdlib.h>\n#include <string.h>\nint main() { for (;;) memset(malloc(1 << 20), 1, 1 << 20); }",
    "rust": b"fn main() { let mut v = Vec::new(); loop { v.push(vec![1u8; 1 << 20]); } }",
    "javascript": b"const v = []; for (;;) v.push(new Uint8Array(1 << 20).fill(1))",
}


def every(programs: dict[str, bytes], *quick: str) -> list:
    return [pytest.param(k, marks=[] if k in quick else [pytest.mark.slow]) for k in programs]


def run(driver: Here | There, kind: str, source: bytes, limits: Limits = LIMITS, without: tuple[str, ...] = ()):
    try:
        result = driver.run(Job(source=source, kind=kind, stdin=b"fed\n", args=("a b",), limits=limits), without)
    except kinds.MissingTool as error:
        pytest.skip(str(error))
    if result.stderr.startswith(tuple(f"sh: 1: {tool}: Permission".encode() for tool in kinds.KINDS[kind].tools)):
        pytest.skip("installed for another user only")
    return result


@pytest.mark.parametrize("kind", every(ECHO, "c", "javascript"))
def test_a_program_reads_prints_and_returns(kind: str, driver: Here | There) -> None:
    result = run(driver, kind, ECHO[kind])
    assert (result.status, result.exit_code, result.stdout) == (Status.ERROR, 3, b"fed a b\n"), result
    assert result.stderr == b""


@pytest.mark.parametrize("kind", every(WRONG, "c"))
def test_a_program_that_does_not_compile_says_so(kind: str, driver: Here | There) -> None:
    result = run(driver, kind, WRONG[kind])
    assert result.status is Status.ERROR
    assert b"rror" in result.stderr
    assert b"program" not in result.stderr.lower().split(b"rror")[0]  # nothing was run


@pytest.mark.parametrize("kind", every(GROWS, "javascript"))
def test_it_is_held_to_the_memory_limit(kind: str, driver: Here | There) -> None:
    memory_mb = 512 if kind == "rust" else 256  # its compiler counts too
    result = run(driver, kind, GROWS[kind], Limits(wall_s=60, cpu_s=60, memory_mb=memory_mb))
    assert result.status is Status.MEMORY, result


@pytest.mark.slow
def test_java_is_held_to_its_heap(driver: Here | There) -> None:
    source = b"class A { public static void main(String[] a) { var v = new java.util.ArrayList<byte[]>(); for (;;) v.add(new byte[1 << 20]); } }"
    result = run(driver, "java", source)
    assert result.status in (Status.ERROR, Status.MEMORY)
    assert result.status is Status.MEMORY or b"OutOfMemoryError" in result.stderr


@pytest.mark.skipif(probe().landlock_abi < 6, reason="Landlock does not hold well enough on this machine")
@pytest.mark.parametrize("kind", every({k: ECHO[k] for k in ("c", "javascript", "java")}, "c"))
def test_it_runs_where_namespaces_are_blocked(kind: str, driver: Here | There, user: str) -> None:
    without = NAMESPACES if user == "root" else ("user",)
    result = run(driver, kind, ECHO[kind], without=without)
    # Where jobs of root cannot read this Python, as in a folder of mode 0700, there is no level, and these programs run all the same.
    level = probe().plan(without).level if user == "root" else Level.RESTRICTED
    assert (result.exit_code, result.stdout, result.level) == (3, b"fed a b\n", level), result


def test_a_missing_tool_is_named_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "locate", lambda tool: "" if tool == "rustc" else f"/bin/{tool}")
    with Sandbox(workers=1) as sandbox, pytest.raises(kinds.MissingTool, match="rust programs need rustc") as caught:
        sandbox.run(Job(source=b"", kind="rust"))
    assert "\n" not in str(caught.value)
    assert kinds.doctor()["rust"] == (False, "needs rustc")
    assert kinds.doctor()["c"] == (True, "/bin/gcc")


def test_tools_elsewhere_are_found_by_their_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "tree/bin").mkdir(parents=True)
    node = tmp_path / "tree/bin/node"
    node.write_text("#!/bin/sh\n")
    node.chmod(0o755)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/node").symlink_to(node)
    monkeypatch.setattr(kinds, "STANDARD_PATH", "/nowhere")
    monkeypatch.setenv("PATH", f"{tmp_path}/links")
    for function in (kinds.locate, kinds.search_path):
        function.cache_clear()
    try:
        assert kinds.locate("node") == str(node)
        assert kinds.search_path() == f"/nowhere:{tmp_path}/tree/bin"
        assert kinds.prefixes(kinds.search_path()) == [f"{tmp_path}/tree"]
    finally:
        for function in (kinds.locate, kinds.search_path):
            function.cache_clear()


def test_every_kind_can_be_asked_for() -> None:
    assert set(KINDS) == {"python", "shell", "c", "c++", "rust", "javascript", "java"}
    assert set(ECHO) == set(KINDS) - {"python", "shell"}
