"""Commands that evaluate, compare and train reward models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollkeel.cli.words import AsJson, Out, Words, config_of, show_result
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.recipe import load

if TYPE_CHECKING:
    from rollkeel.evals.benchmarks import Loaded

app = typer.Typer()


@app.command(name="eval")
def evaluate(
    words: Words = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the answers (parquet); with --benchmark, the folder of results."),
    ] = None,
    benchmark: Annotated[str | None, typer.Option(metavar="NAME[,NAME]", help="See `rollkeel benchmarks`.")] = None,
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]PATH", help="Its files: one file or folder; NAME=PATH for each of several."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=0, help="Answers per item (the benchmark's own k).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Also one greedy answer per item.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items.")] = None,
    shuffle: Annotated[int | None, typer.Option(min=0, help="Seed of the order of choices.")] = None,
    since: Annotated[str | None, typer.Option(help="Only problems from this date on (2024-08).")] = None,
    until: Annotated[str | None, typer.Option(help="Only problems up to this date (2025-05).")] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="reported|N",
            help="Tokens of prompt and response: as the Ring-1T report, or N; YaRN beyond the model's.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy of model.path on held-out items or public benchmarks: avg@k, pass@k, majority@k, with errors."""
    config = config_of(words)
    if benchmark is None:
        beside = {
            "--path": path,
            "--samples": samples,
            "--greedy": greedy or None,
            "--limit": limit,
            "--shuffle": shuffle,
            "--context": context,
        }
        for name, value in beside.items():
            if value is not None:
                raise BadInput(f"{name}: is for --benchmark; without one, set eval.items, eval.samples, eval.greedy")
        from rollkeel.loop.stages import eval_stage

        show_result(eval_stage(config, out), out, as_json)
        return
    if out is None:
        raise BadInput("eval --benchmark: expected --out, the folder of results; the same command goes on in it")
    from rollkeel.evals.benchmarks import contexts_of
    from rollkeel.evals.run import run_benchmarks
    from rollkeel.evals.view import show_results

    chosen = _loaded(config, benchmark, path or [], limit=limit, shuffle=shuffle, since=since, until=until)
    contexts = contexts_of([each.benchmark for each in chosen], context)
    results = run_benchmarks(config, chosen, out, samples=samples, greedy=greedy, contexts=contexts)
    if as_json:
        print(json.dumps(results, ensure_ascii=False))
    else:
        show_results(results)


def _loaded(config: Config, benchmark: str, path: list[str], **asked: Any) -> list[Loaded]:
    """The benchmarks named, with a word about what they lack."""
    from rollkeel.evals.benchmarks import Options, get

    names = list(dict.fromkeys(name.strip() for name in benchmark.split(",") if name.strip()))
    chosen = [get(name) for name in names]
    paths = _paths(names, path)
    try:
        options = Options(**asked)
    except ValueError:
        raise BadInput(
            f"--since, --until: expected a date like 2024-08 or 2024-08-01, got {asked['since']}, {asked['until']}"
        ) from None
    loaded = [b.load(paths.get(b.name), b.graded_by(options, config.data.grader_options)) for b in chosen]
    for warning in (each.warning for each in loaded if each.warning):
        typer.echo(f"rollkeel: warning: {warning}", err=True)
    return loaded


def _paths(names: list[str], given: list[str]) -> dict[str, str]:
    """Files by benchmark. A single path without a name belongs to a single benchmark."""
    if len(names) == 1 and len(given) == 1 and not given[0].startswith(f"{names[0]}="):
        return {names[0]: given[0]}
    pairs = dict(text.split("=", 1) for text in given if "=" in text)
    if len(pairs) != len(given) or not set(pairs) <= set(names):
        raise BadInput(
            f"--path: expected NAME=PATH with names of {', '.join(names)}, once each, got {', '.join(given)}"
        )
    return pairs


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A model (folder, id or preset:NAME) or a finished run's folder.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: sampling, engine.dtype, …")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines as they are, without the model's chat template.")
    ] = False,
) -> None:
    """Talk to a model through the embedded engine: a line is a prompt, answers come token by token. Ctrl-D ends."""
    folder = Path(model)
    if (folder / "config.yaml").is_file() and (
        folder / "model"
    ).is_dir():  # of a run, which says how its prompts were shown
        plain = plain or not load(str(folder / "config.yaml"), []).data.chat_template
        folder = folder / "model"
    own = [
        f"model.path={folder if folder.is_dir() else model}",
        "sampling.max_new_tokens=512",
        "engine.kv=keep",
        "engine.slots=1",
    ]
    config = config_of([*own, *(words or [])])
    if config.engine.kind != "local" or config.engine.processes:
        raise BadInput("chat: talks to the embedded engine in this process: engine.kind=local, engine.processes=0")
    from rollkeel.cli.talk import chat as talk

    talk(config, sys.stdin, sys.stdout, plain=plain)


@app.command()
def benchmarks(name: Annotated[str | None, typer.Argument(help="Tell all about one.")] = None) -> None:
    """List the public benchmarks: where their files are, and how items are asked, graded and reported."""
    from rollkeel.evals.benchmarks import BENCHMARKS, get

    for each in BENCHMARKS.values() if name is None else ():
        print(f"{each.name:19} {each.items:>5} items  {each.grader:19} {each.title}{', judged' * each.judged}")
    if name is not None:
        b = get(name)
        hub = f"{b.hub}{f', config {b.config}' if b.config else ''}, split {b.split}" if b.hub else "none, files alone"
        told = {"hub": hub, "files": b.where, "columns": ", ".join(b.columns), "items": b.items, "grader": b.grader}
        told |= {"context": f"{b.context} tokens", "k": b.k, "reported": b.reported, "license": b.license}
        print(b.title, *(f"  {key}: {value}" for key, value in told.items()), sep="\n")


@app.command(name="eval-compare")
def eval_compare(
    one: Annotated[Path, typer.Argument(help="Results of `rollkeel eval --benchmark`.")],
    other: Annotated[Path, typer.Argument(help="Those of another model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Compare two models: second minus first, paired by item, with 95 % intervals."""
    from rollkeel.evals.summary import compare
    from rollkeel.evals.view import show_comparison

    found = compare(one, other)
    if as_json:
        print(json.dumps(found))
    else:
        show_comparison(found)


@app.command()
def retained(
    this: Annotated[Path, typer.Argument(help="Answers of `rollkeel eval --out`, or results of `eval --benchmark`.")],
    earlier: Annotated[list[Path], typer.Argument(help="Those of earlier stages, to the same items.")],
    allow: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the best earlier score that may be lost.")
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Say what was forgotten: compare the score in each domain with the best score of an earlier stage.

    Exit code 1 if a domain lost more than --allow.
    """
    from rollkeel.evals.answers import retained as compared
    from rollkeel.evals.view import show_retained

    found = compared(this, earlier, allow)
    print(json.dumps(found)) if as_json else show_retained(found)
    if not all(row["kept"] for row in found.values()):
        raise typer.Exit(1)


@app.command(name="win-rate")
def win_rate(
    first: Annotated[Path, typer.Argument(help="Answers of `rollkeel eval --out`.")],
    second: Annotated[Path, typer.Argument(help="Another model's, to the same prompts.")],
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Count how often the judge `data.grader` prefers SECOND's answers to FIRST's: blind, in both orders, with 95 % intervals.

    Exit code 1 unless the interval of all is above one half.
    """
    config = config_of(words)
    from rollkeel.evals.answers import win_rate as judged
    from rollkeel.evals.view import show_win_rate

    found = judged(config, first, second)
    print(json.dumps(found)) if as_json else show_win_rate(found)
    if found["all"]["low"] <= 0.5:
        raise typer.Exit(1)


@app.command(name="reward-model")
def reward_model(
    pairs: Annotated[Path, typer.Argument(help="Preference pairs: jsonl or parquet with prompt, chosen, rejected.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the model; the same command goes on in it.")],
    words: Words = None,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on preference pairs, starting from model.path; steps and learning rate are settings of `sft`."""
    config = config_of(words)
    from rollkeel.loop.stages import reward_model_stage

    show_result(reward_model_stage(config, pairs, out), out, as_json)


@app.command()
def pairs(
    run: Annotated[Path, typer.Argument(help="A run folder with rollouts.")],
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Write preference pairs from a run's rollouts (best and worst of each group), and its prompts; see examples/ring.sh."""
    from rollkeel.loop.stages import pairs_stage

    show_result(pairs_stage(run, out), out, as_json)
