"""Commands that look at runs instead of making them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollkeel.errors import BadInput
from rollkeel_doctor import cli

if TYPE_CHECKING:
    from rollkeel_doctor import Diagnosis

app = typer.Typer()


@app.command()
def doctor(
    path: cli.TracePath,
    as_json: cli.AsJson = False,
    last: cli.Last = None,
    trace_format: cli.Format = "auto",
    recompute: Annotated[
        bool,
        typer.Option(
            help="Compute with a run's checkpoints whether the stated weights and dtype give the recorded log-probs, and if not, which do."
        ),
    ] = True,
) -> int:
    """Say why a run went bad, from its recorded tokens: causes with evidence (exit code 1), or healthy (0).

    Exit code 2: bad input, or no cause was found and most could not be examined. 4: the run's files are damaged, and what is left shows no cause.
    """
    from rollkeel.record.runfolder import CONFIG
    from rollkeel.report.run_files import damage

    def refine(diagnosis: Diagnosis, run: Path) -> Diagnosis:
        if not (run / CONFIG).is_file():
            return diagnosis
        from rollkeel.diagnose.recompute import refine  # loads torch

        return refine(diagnosis, run)

    def of_metrics(run: Path) -> list[str]:
        return damage(run, rollouts=False)

    return cli.answer(path, as_json, last, trace_format, of_metrics, refine if recompute else None)


@app.command()
def analyze(
    target: Annotated[str, typer.Argument(help="A run folder, or a model: folder, id or preset:NAME.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of its config.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Other weights, recorded tensors (.safetensors) or the address of a vLLM server.")
    ] = None,
    sides: Annotated[
        str | None, typer.Option(help="Two of trainer, engine[:DTYPE], prefill[:DTYPE], FILE.safetensors.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of engines: fp32, bf16, fp16, fp8, fp8_weights, int8, int4.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="Rollouts (parquet) or a run whose tokens are used.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to sample where no tokens are at hand.")] = 4,
    sequences: Annotated[int, typer.Option(min=1, help="Most sequences.")] = 8,
    limit: Annotated[int, typer.Option("--max-tokens", min=2, help="Most tokens in all sequences.")] = 2048,
    every: Annotated[bool, typer.Option("--all", help="Show every layer's operations.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Find where two ways of computing the same tokens first differ: layer, operation, flips. Exit code 1 if they differ."""
    from rich.console import Console

    from rollkeel.analyzer.view import render
    from rollkeel.diagnose.analysis import Asked, analyze

    asked = Asked(
        target=target,
        overrides=words or [],
        against=against,
        sides=sides,
        dtype=dtype,
        tokens=tokens,
        prompts=prompts,
        sequences=sequences,
        limit=limit,
    )
    with Console(stderr=True).status("loading") as status:
        found = analyze(asked, status.update)
    if as_json:
        print(json.dumps(found.as_dict(), allow_nan=False))
    else:
        Console().print(render(found, every=every))
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="A run folder, or with --objective any trace.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="With --step: the factor to change.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Do this step again and compare.")] = None,
    only: Annotated[str | None, typer.Option(help="With --step: rollout or update alone.")] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(help="Judge recorded tokens by these: NAME[:OPTION=VALUE]..., parted by commas."),
    ] = None,
    steps: Annotated[str | None, typer.Option(help="With --objective: 12 or 10:20, inclusive.")] = None,
    html: Annotated[Path | None, typer.Option(help="With --objective: also write a page with charts.")] = None,
    trace_format: Annotated[
        str,
        typer.Option(
            "--format", help="With --objective: who wrote it, where that is not clear: rollkeel, nemo-rl, slime, …"
        ),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Repeat a recorded step, unchanged or with one setting changed; or try other objectives on recorded tokens."""
    if (step is None) == (not objective):
        raise BadInput("replay: expected --step N, or --objective NAME,…, and not both")
    if (objective and (overrides or only)) or (step is not None and (steps or html or trace_format != "auto")):
        raise BadInput("replay: overrides and --only belong to --step, --steps, --html and --format to --objective")
    from rollkeel.diagnose.replay import command

    if objective:
        command.try_objectives(run, objective, steps, html, as_json, trace_format)
    elif not command.repeat_step(run, step or 0, only, overrides or [], as_json):
        raise typer.Exit(1)


@app.command()
def board(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8785,
    host: Annotated[
        str, typer.Option(help="Address to listen at. Whoever reaches it reads the runs: there is no password.")
    ] = "127.0.0.1",
) -> None:
    """Show runs on a local web page while they go on: curves side by side, tokens, the doctor. Ctrl-C ends it."""
    from rollkeel.board.server import serve

    serve(runs, host, port)


@app.command(name="lab")
def laboratory(
    preset: Annotated[str | None, typer.Argument(help="Name of an experiment; without one, they are listed.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for lab.html and lab.json (lab/NAME).")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each setting (the preset's own number).")] = None,
    first_seed: Annotated[int | None, typer.Option(help="The lowest of them (the preset's own).")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at once (one per core).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Run an experiment over seeds and say whether a paper's claim shows here. Exit code 1: a stated band was missed."""
    from rollkeel.lab.presets import PRESETS, find

    if preset is None:
        for name, found in PRESETS.items():
            print(f"{name:<16} {found.question}")
        return 0
    chosen = find(preset)
    from rollkeel.lab.command import run_preset
    from rollkeel.lab.page import as_json as to_json
    from rollkeel.lab.page import lines

    out = out or Path("lab") / chosen.name
    result = run_preset(
        chosen, out=out, seeds=seeds, first_seed=first_seed, jobs=jobs, say=lambda line: print(line, file=sys.stderr)
    )
    print(json.dumps(to_json(result)) if as_json else "\n".join([*lines(result), f"report {out / 'lab.html'}"]))
    return 0 if result.met else 1
