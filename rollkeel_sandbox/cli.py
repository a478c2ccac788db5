"""Commands that run untrusted programs, and that say how well this machine holds them."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rollkeel_sandbox.errors import BadInput, SandboxError, nearest
from rollkeel_sandbox.kinds import KINDS

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Run programs that nobody has read, away from this machine's files.",
)

# typer bundles click from some version on; its public exceptions lead to the base class in either case.
_UsageError: Any = typer.BadParameter.__mro__[1]

KIND_BY_SUFFIX = {suffix: name for name, kind in KINDS.items() for suffix in kind.suffixes}
LEVELS = ("none", "restricted", "namespaces", "full")
REPORT = {
    "timeout": "killed after {limits.wall_s:g} s",
    "cpu": "killed: it used {limits.cpu_s:g} s of CPU",
    "memory": "out of memory at {limits.memory_mb} MB",
    "output": "killed: it printed more than {limits.output_bytes} bytes",
    "killed": "{result.reason}",
}


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help=f"A program: {', '.join(KIND_BY_SUFFIX)}.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Its arguments.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until it is killed.")] = 10.0,
    memory: Annotated[int, typer.Option(min=1, help="MB of memory for all its processes.")] = 512,
    stdin: Annotated[Path | None, typer.Option(help="File that it reads as standard input (nothing).")] = None,
    minimum: Annotated[str, typer.Option(help="Refuse below this level: restricted, namespaces, full.")] = "namespaces",
    backend: Annotated[str, typer.Option(help="auto, native, bubblewrap, gvisor.")] = "auto",
    image: Annotated[Path | None, typer.Option(help="Container image (OCI layout, docker save) to run it in.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON instead.")] = False,
) -> int:
    """Run one file and print what it printed. Exit code: the program's own, 124 for a limit, 128 + number for a signal."""
    from rollkeel_sandbox import Job, Level, Limits, Sandbox

    if minimum not in LEVELS[1:]:
        raise BadInput(f"--minimum {minimum!r}: no such level{nearest(minimum, LEVELS[1:])}")
    for path in (file, *([stdin] if stdin else [])):
        if not path.is_file():
            raise BadInput(f"{path}: no such file")
    if file.suffix not in KIND_BY_SUFFIX:
        raise BadInput(f"{file}: expected a name that ends in {', '.join(KIND_BY_SUFFIX)}")
    limits = Limits(wall_s=timeout, cpu_s=timeout, memory_mb=memory)
    job = Job(
        source=file.read_bytes(),
        kind=KIND_BY_SUFFIX[file.suffix],
        stdin=stdin.read_bytes() if stdin else b"",
        args=tuple(arguments or ()),
        limits=limits,
    )
    with Sandbox(workers=1, minimum=Level[minimum.upper()], warm=False, backend=backend, image=image) as sandbox:
        sandbox.require()
        result = sandbox.run(job)
    if as_json:
        print(json.dumps(_plain(asdict(result) | {"level": result.level.name.lower()})))
    else:
        _write(1, result.stdout)
        _write(2, result.stderr)
        if result.status.value in REPORT:
            said = REPORT[result.status.value].format(limits=limits, result=result)
            print(f"sandbox: {file.name} {said}", file=sys.stderr)
    if result.signal is not None:
        return 128 + result.signal
    return 124 if result.exit_code is None else result.exit_code


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False) -> int:
    """Which layers hold on this machine, each tried for real, the isolation level, and the kinds of programs it can run.

    Exit code 1 below `namespaces`.
    """
    from rollkeel_sandbox import Level, enclosure, kinds, probe

    found = probe()
    level = found.plan().level
    programs, backends = kinds.doctor(), enclosure.doctor()
    if as_json:
        layers = {f.layer: {"holds": f.holds, "how": f.how} for f in found.findings}
        able = {name: {"runs": runs, "how": how} for name, (runs, how) in programs.items()}
        others = {name: {"level": reached, "how": how} for name, (reached, how) in backends.items()}
        report = {"level": level.name.lower(), "root": found.root, "layers": layers, "kinds": able, "backends": others}
        print(json.dumps(report))
    else:
        for finding in found.findings:
            print(f"{finding.layer:<13} {'yes' if finding.holds else 'no':<4} {finding.how}")
        for name, (runs, how) in programs.items():
            print(f"{name:<13} {'yes' if runs else 'no':<4} {how}")
        for name, (reached, how) in backends.items():
            print(f"{name:<13} {reached:<4} {how}")
        print(f"isolation level: {level.name.lower()}")
    return 0 if level >= Level.NAMESPACES else 1


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than this machine need 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8787,
    token_file: Annotated[Path | None, typer.Option(help="File with the token (one is made and kept).")] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Jobs at a time in a partition that does not say.")
    ] = os.cpu_count() or 2,
    partitions: Annotated[
        list[str] | None,
        typer.Option("--partition", metavar="NAME=WORKERS", help="A queue with workers of its own; repeat for more."),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Jobs that wait in a partition at most.")] = 1000,
    minimum: Annotated[str, typer.Option(help="Refuse below this level: restricted, namespaces, full.")] = "namespaces",
    backend: Annotated[str, typer.Option(help="auto, native, bubblewrap, gvisor.")] = "auto",
    image: Annotated[
        Path | None, typer.Option(help="Container image (OCI layout, docker save) to run jobs in.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for what must outlive a restart.")] = None,
    terminals: Annotated[int, typer.Option(min=0, help="Terminal sessions open at most.")] = 8,
    max_request_mb: Annotated[int, typer.Option(min=1, max=1024, help="Largest request.")] = 64,
    drain_s: Annotated[
        float, typer.Option("--drain", min=0, help="Seconds that running jobs have left at Ctrl-C.")
    ] = 10.0,
    stdio: Annotated[bool, typer.Option("--stdio", help="Speak MCP on standard input and output instead.")] = False,
) -> int:
    """The sandbox as a service: HTTP and MCP behind a token. Ctrl-C or SIGTERM ends it after the jobs that run."""
    options: dict[str, Any] = locals() | {"partitions": tuple(partitions or ())}
    from rollkeel_sandbox import serve as service

    if minimum not in LEVELS[1:]:
        raise BadInput(f"--minimum {minimum!r}: no such level{nearest(minimum, LEVELS[1:])}")
    return service.serve(service.Options(**options))


@app.command()
def front(
    nodes: Annotated[str, typer.Option(help="URL,URL,… of `serve`, or a TOML file with partitions.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8786,
    token_file: Annotated[Path | None, typer.Option(help="File with the token (one is made and kept).")] = None,
    node_token_file: Annotated[Path | None, typer.Option(help="File with the nodes' token, if it is another.")] = None,
    max_request_mb: Annotated[int, typer.Option(min=1, max=1024, help="Largest request.")] = 64,
    check_s: Annotated[float, typer.Option("--check", min=0.05, help="Seconds between checks of a node.")] = 1.0,
    drain_s: Annotated[float, typer.Option("--drain", min=0, help="Seconds that requests have left at Ctrl-C.")] = 10.0,
) -> int:
    """One address for several `serve`: to the least loaded node, around the dead and the frozen ones."""
    options: dict[str, Any] = locals()
    from rollkeel_sandbox import gate

    return gate.serve(gate.Options(**options))


@app.command()
def manifest(
    image: Annotated[str, typer.Option(help="Container image with rollkeel-sandbox[service] in it.")],
    runtime: Annotated[str, typer.Option(help="runsc (gVisor) or kata.")] = "runsc",
    name: Annotated[str, typer.Option(help="What all objects' names begin with.")] = "sandbox",
    nodes: Annotated[int, typer.Option(min=1, max=1000, help="Pods that run jobs.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Jobs at a time in each, and its CPUs.")] = 4,
    memory_mb: Annotated[int, typer.Option("--memory", min=256, help="MB of each.")] = 4096,
    minimum: Annotated[str, typer.Option(help="Refuse below this level: restricted, namespaces, full.")] = "namespaces",
) -> int:
    """Print Kubernetes objects for nodes on gVisor or Kata behind a front, for `kubectl apply -f -`."""
    options: dict[str, Any] = locals()
    from rollkeel_sandbox import manifest as made

    if minimum not in LEVELS[1:]:
        raise BadInput(f"--minimum {minimum!r}: no such level{nearest(minimum, LEVELS[1:])}")
    print(json.dumps(made.manifest(made.Options(**options)), indent=1))
    return 0


def main() -> None:
    """Entry point of `rollkeel-sandbox`: every refusal is one line on standard error and its exit code."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="rollkeel-sandbox", standalone_mode=False)
        sys.stdout.flush()
    except SandboxError as error:
        code = error.exit_code
        print(f"rollkeel-sandbox: {str(error).removeprefix('sandbox: ')}", file=sys.stderr)
    except (BrokenPipeError, SystemExit) as ended:  # the reader of standard output went away; typer exits with 1 there
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 128 + signal.SIGPIPE
    except Exception as caught:
        error: Any = caught
        if not isinstance(error, _UsageError):
            raise
        code = 2
        message = " ".join(error.format_message().split())  # unlike str(error) it names the option
        print(f"rollkeel-sandbox: {message} (see rollkeel-sandbox --help)", file=sys.stderr)
    sys.exit(code)


def _plain(result: dict) -> dict:
    """Bytes as text: what is no UTF-8 as escapes."""
    out = {k: v.decode("utf-8", "backslashreplace") if isinstance(v, bytes) else v for k, v in result.items()}
    out["files"] = {k: v.decode("utf-8", "backslashreplace") for k, v in result["files"].items()}
    return out


def _write(descriptor: int, data: bytes) -> None:
    """What the program printed, byte by byte; a terminal gets control characters escaped."""
    from rollkeel_sandbox import display

    if os.isatty(descriptor):
        data = display(data, len(data)).encode()
    while data:
        data = data[os.write(descriptor, data) :]
