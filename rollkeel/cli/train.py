"""Commands from a recipe to a run: training, its stages one at a time, the report, the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollkeel import recipe
from rollkeel.cli.words import AsJson, Out, Scenario, Words, config_of, named, refuse_damage, show_result
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.recipe import from_tree

app = typer.Typer()
Public = Annotated[bool, typer.Option("--public", help="Make a new repository public.")]


def _resumed_config(said: str, folder: Path, overrides: list[str]) -> tuple[Config, str]:
    """The config of a run folder with overrides (more steps, say) applied, and a line if nothing is left to do.

    `said`: the word that named the folder, for the refusal of one that holds no run.
    """
    if not (folder / "config.yaml").is_file():
        raise BadInput(f"{said} {folder}: expected a run folder with config.yaml, found none")
    from rollkeel.record.runfolder import RunFolder
    from rollkeel.report.run_files import finished

    run = RunFolder.open(folder, lock=False)
    config = from_tree(recipe.merge(run.config.model_dump(mode="json"), overrides))
    return config, finished(folder, config.run.steps) if config == run.config else ""


@app.command()
def train(
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder; name no recipe.")] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="REPO", help="Upload the model to this repository of the Hugging Face Hub at the end."),
    ] = None,
    public: Public = False,
) -> None:
    """Warm start, then reinforcement learning, then a model with its card, and a report."""
    folder, done = resume, ""
    if resume is None:
        config = config_of(words)
    else:
        config, done = _resumed_config("--resume", resume, words or [])
        if done:
            print(done)
    if push_to_hub is not None:
        from rollkeel.integrations.hub import reached

        reached(push_to_hub)
    if not done:
        from rollkeel.loop.job import train as run

        folder = run(config, resume=resume)
    if push_to_hub is not None and folder is not None:
        _push(folder, push_to_hub, public)


@app.command()
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a final model.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face Hub.")],
    public: Public = False,
) -> None:
    """Upload a run's final model and its card to the Hugging Face Hub; a new repository is private."""
    _push(run, repo, public)


def _push(run: Path, repo: str, public: bool) -> None:
    from rollkeel.integrations.hub import push as upload

    print(f"pushed to {upload(run, repo, public=public)}")


@app.command()
def sft(out: Out, words: Words = None, as_json: AsJson = False) -> None:
    """Supervised warm start; writes a Hugging Face folder."""
    config = config_of(words)
    from rollkeel.loop.stages import sft_stage

    show_result(sft_stage(config, out), out, as_json)


@app.command()
def merge(out: Out, words: Words = None) -> None:
    """Add the adapters of model.path (train.lora) to their base; writes a whole Hugging Face folder."""
    config = config_of(words)
    from rollkeel.loop.stages import merge_stage

    merge_stage(config, out)
    print(f"written to {out}")


@app.command()
def rollout(
    out: Out,
    words: Words = None,
    step: Annotated[int, typer.Option(min=1, help="Training step whose prompts are sampled.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Sample one step's prompts with model.path; writes ungraded rollouts (parquet)."""
    config = config_of(words)
    from rollkeel.loop.stages import rollout_stage

    rollouts = rollout_stage(config, out, step)
    tokens = sum(r.span.own_count for r in rollouts)
    show_result({"rollout/count": len(rollouts), "rollout/tokens": tokens}, out, as_json)


@app.command()
def score(
    source: Annotated[Path, typer.Argument(help="Rollouts written by `rollkeel rollout`.")],
    out: Out,
    words: Words = None,
    failure_budget: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of rollouts that may fail (rollout.failure_budget)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Grade rollouts as reward.graders says; writes them with rewards (parquet)."""
    if not source.is_file():
        raise BadInput(f"{source}: no such file")
    config = config_of(words)
    from rollkeel.loop.stages import score_stage

    budget = config.rollout.failure_budget if failure_budget is None else failure_budget
    show_result(score_stage(config, source, out, budget), out, as_json)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="A run folder, finished or not, or another trainer's dump; several runs are compared."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File (RUN/report.html; comparison.html for several).")
    ] = None,
) -> None:
    """Render report.html from a run's files, or one page that compares several runs (settings × seeds).

    Exit code 4 if files are damaged: the page says which, and shows the rest.
    """
    for run in runs:
        if not run.exists():
            raise BadInput(f"run folder {run}: no such folder")
    from rollkeel.report import render
    from rollkeel.report.compare import compare
    from rollkeel.report.run_files import as_run, damage

    try:
        if len(runs) == 1:
            with as_run(runs[0]) as run:
                print(render(run, out or (None if run == runs[0] else Path("report.html"))))
        else:
            print(compare(runs, out or Path("comparison.html")))
    except BadInput as error:
        raise BadInput(f"{error}{'' if out else ', or give --out FILE'}") from None
    for run in runs:
        refuse_damage(run, damage(run))


@app.command(name="simulate")
def simulate_policies(
    words: Scenario = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for JSON, page and resolved scenario; may exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the embedded engine's speed curve first.")
    ] = False,
) -> None:
    """Simulate rollout policies (barrier, over-sampling, APRIL, C3PO++, asynchronous) and compare their throughput."""
    from rollkeel.rollout.scenario import load_scenario

    scenario = load_scenario(*named(words))
    if measure:
        from rollkeel.loop.stages import measured

        scenario = measured(scenario)
    from rollkeel.report import simulation

    found = simulation.run(scenario, out)
    print(json.dumps(found) if as_json else "\n".join(simulation.table(found["policies"])))
    if out is not None and not as_json:
        print(out / "simulation.html")


@app.command(name="simulate-sync")
def simulate_sync(
    words: Scenario = None,
    as_json: AsJson = False,
) -> None:
    """Plan a weight publication between any two meshes, and predict its seconds on given links."""
    from rollkeel.rollout.scenario import read_scenario
    from rollkeel.sync.at_scale import SyncScenario, lines, predict

    scenario = read_scenario(SyncScenario, *named(words))
    found = predict(scenario)
    print(json.dumps(found) if as_json else "\n".join(lines(scenario, found)))


@app.command(name="simulate-goodput")
def simulate_goodput(
    words: Scenario = None,
    gpus: Annotated[
        list[int] | None, typer.Option(min=2, help="A number of GPUs; may be repeated. The scenario's by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a month with faults: the share of time that is kept, with and without each mechanism against them."""
    from rollkeel.cluster.goodput import GoodputScenario, compared, lines
    from rollkeel.rollout.scenario import read_scenario

    scenario = read_scenario(GoodputScenario, *named(words))
    found = compared(scenario, gpus or [scenario.gpus])
    print(json.dumps(found) if as_json else "\n".join(lines(scenario, found)))


@app.command()
def chaos(
    words: Words = None,
    faults: Annotated[
        str,
        typer.Option(
            help="Some of kill:, stop: and slow: with rank, engine, grader, and kill:controller, with commas; one that is named twice"
            " comes twice as often."
        ),
    ] = "kill:rank,kill:engine,stop:rank,stop:engine",
    count: Annotated[int, typer.Option(min=1, help="Faults.")] = 5,
    every: Annotated[float, typer.Option(min=0, help="Seconds between them on average, while the run goes on.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides which and when.")] = 0,
    compare: Annotated[bool, typer.Option(help="Run it once more without faults, and compare the models.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train over a Ray of this machine while actors are killed and stopped, and say what was noticed, when, and what it cost.

    Exit code 1 if a fault was not noticed, the run did not end, a rollout was trained twice or lost, a token was older than its loop allows,
    or the model is not that of the undisturbed run.
    """
    config = config_of(words)
    from rollkeel.cluster.chaos import chaos as harm
    from rollkeel.cluster.chaos import summary

    say = (lambda line: None) if as_json else lambda line: print(line, flush=True)
    found = harm(config, words or [], faults, count, every, seed, compare, say)
    print(json.dumps(found) if as_json else summary(found))
    sound = found.get("same_model", True) and found.get("audit", {}).get("fits", True)
    if found["noticed"] < len(found["incidents"]) or found["exit_code"] or not sound:
        raise typer.Exit(1)


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run over a cluster.")],
    engines: Annotated[int, typer.Argument(metavar="N", min=1, help="Engines that it is to have.")],
) -> None:
    """Ask a run over a cluster that goes on for another number of engines.

    Engines leave at the next publication of weights. Others start where the cluster has places, and join at the publication behind that.
    """
    config, _ = _resumed_config("scale", run, [])
    from rollkeel.cluster.wanted import ask

    ask(run, config, engines)
    print(f"{run}: {engines} engines are wanted from its next publication on")


@app.command()
def plan(
    words: Words = None,
    device: Annotated[
        Literal["h100", "h200", "a100", "cpu"], typer.Option(help="Whose memory; cpu is this machine's.")
    ] = "h100",
    lora: Annotated[
        int, typer.Option(min=0, help="Rank of adapters on every projection; 0 is what train.lora says.")
    ] = 0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Estimate how much device memory a run needs, by component; downloads and builds nothing.

    Exit code 1 if it does not fit; the last line says what to change.
    """
    adapters = [f"train.lora.rank={lora}", "train.lora.experts=true"] if lora else []
    config = config_of([*(words or []), *adapters])
    from rollkeel.memory.advice import answer, lines
    from rollkeel.memory.plan import Setting

    found = answer(config, device, Setting(cpu=device == "cpu", prompt=prompt))
    print(json.dumps(found) if as_json else "\n".join(lines(found)))
    if not found["fits"]:
        raise typer.Exit(1)
