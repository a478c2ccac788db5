"""The command line: one verb per arrow. Help and bad input answer without importing torch."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rollkeel.cli_about import app as about
from rollkeel.cli_about import version
from rollkeel.cli_config import AsJson, Out, Words, config_of, refuse_damage, show_result
from rollkeel.cli_data import app as data
from rollkeel.cli_diagnose import app as diagnose
from rollkeel.cli_eval import app as evaluation
from rollkeel.cli_sandbox import app as sandbox
from rollkeel.config import Config
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.host import keep_freed_memory
from rollkeel.recipe import from_tree, load, merge

# Two spinning threads on a shared core are ten times slower than one; this must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

app = typer.Typer(
    name="rollkeel",
    help="RL post-training that stays stable when the sampling engine and the training engine disagree.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(about)
app.add_typer(diagnose)
app.add_typer(evaluation)
app.add_typer(sandbox, name="sandbox")
app.add_typer(data, name="data")
tasks_app = typer.Typer(no_args_is_help=True, help="Verifiable task families.")
app.add_typer(tasks_app, name="tasks")
objectives_app = typer.Typer(
    no_args_is_help=True, help="Objectives: masks, weights and surrogates under their papers' names."
)
app.add_typer(objectives_app, name="objectives")


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _resumed_config(folder: Path, overrides: list[str]) -> tuple[Config, str]:
    """The config of a run folder with overrides (more steps, say) applied, and a line if nothing is left to do."""
    from rollkeel.diagnostics.run_files import finished
    from rollkeel.diagnostics.runfolder import RunFolder

    run = RunFolder.open(folder, lock=False)
    config = from_tree(merge(run.config.model_dump(mode="json"), overrides))
    return config, finished(folder, config.run.steps) if config == run.config else ""


@app.command()
def train(
    words: Words = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run folder; give overrides only.")] = None,
) -> None:
    """Warm start, then reinforcement learning, then a model and a report."""
    if resume is None:
        config = config_of(words)
    else:
        if not (resume / "config.yaml").is_file():
            raise BadInput(f"--resume {resume}: expected a run folder with config.yaml, found none")
        config, done = _resumed_config(resume, words or [])
        if done:
            return print(done)
    from rollkeel.pipeline import train as run

    run(config, resume=resume)


@app.command()
def sft(out: Out, words: Words = None, as_json: AsJson = False) -> None:
    """Supervised warm start; writes a Hugging Face folder."""
    config = config_of(words)
    from rollkeel.stages import sft_stage

    show_result(sft_stage(config, out), out, as_json)


@app.command()
def rollout(
    out: Out,
    words: Words = None,
    step: Annotated[int, typer.Option(min=1, help="Training step whose prompts are sampled.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Sample one step's prompts with model.path; writes ungraded rollouts (parquet)."""
    config = config_of(words)
    from rollkeel.stages import rollout_stage

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
    from rollkeel.stages import score_stage

    budget = config.rollout.failure_budget if failure_budget is None else failure_budget
    show_result(score_stage(config, source, out, budget), out, as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="A run folder, finished or not; several are compared.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File (RUN/report.html; comparison.html for several).")
    ] = None,
) -> None:
    """Render report.html from a run's files, or one page that compares several runs (settings × seeds).

    Exit code 4 if files are damaged: the page says which, and shows the rest.
    """
    for run in runs:
        if not run.is_dir():
            raise BadInput(f"run folder {run}: no such folder")
    from rollkeel.diagnostics.run_files import damage
    from rollkeel.report import render
    from rollkeel.report.compare import compare

    try:
        print(render(runs[0], out) if len(runs) == 1 else compare(runs, out or Path("comparison.html")))
    except BadInput as error:
        raise BadInput(f"{error}{'' if out else ', or give --out FILE'}") from None
    for run in runs:
        refuse_damage(run, damage(run))


@app.command(name="simulate")
def simulate_policies(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="A scenario (file or name), overrides.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for JSON, page and resolved scenario; may exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the embedded engine's speed curve first.")
    ] = False,
) -> None:
    """Compare rollout policies (barrier, over-sampling, APRIL, C3PO++, asynchronous) by discrete events."""
    from rollkeel.rollout.scenario import load_scenario

    words = list(words or [])
    scenario = load_scenario(words.pop(0) if words and "=" not in words[0] else None, words)
    if measure:
        from rollkeel.stages import measured

        scenario = measured(scenario)
    from rollkeel.report import simulation

    found = simulation.run(scenario, out)
    print(json.dumps(found) if as_json else "\n".join(simulation.table(found["policies"])))
    if out is not None and not as_json:
        print(out / "simulation.html")


@tasks_app.command(name="list")
def list_tasks(
    files: Annotated[list[str] | None, typer.Argument(help="Files with families of your own.")] = None,
) -> None:
    """Names of the task families."""
    from rollkeel import plugins, tasks

    found = {name: tasks.TASKS[name] for name in tasks.names()}
    for file in files or []:
        own = plugins.members(file, "tasks list", tasks.is_family)
        if not own:
            raise BadInput(f"tasks list {file!r}: expected a subclass of rollkeel.tasks.Task, got none")
        found |= {f"{file}:{name}": kind for name, kind in own.items()}
    for name, kind in found.items():
        print(f"{name:12} {kind.summary}")


Options = Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Difficulty knobs.")]


def _task(name: str, options: list[str] | None) -> Any:
    from rollkeel import tasks

    return tasks.get(name, load(None, [f"data.options.{o}" for o in options or []]).data.options)


@tasks_app.command()
def show(
    name: str,
    options: Options = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1)] = 5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    split: str = "train",
) -> None:
    """Knobs and a few items of a task."""
    task = _task(name, options)
    print(f"{name}: {task.summary}\nknobs: {task.describe()}")
    for index in range(count):
        item = task.item(seed, split, index)
        print(f"{index}: {item.text!r} → {task.gold(item)!r}   near miss {task.near_miss(item)!r}")


def _through(graders: Any, task: Any) -> Callable[[Any, str], tuple[float, str]]:
    """A score by the grader that a run would use, which for code is the sandbox."""
    from rollkeel.rewards.trial import rollout_of
    from rollkeel.tasks.source import Problem

    def score(item: Any, response: str) -> tuple[float, str]:
        problem = Problem(text=item.text, answer=item.answer, grader=task.grader(item), metadata=item.metadata)
        graded = graders.grade([rollout_of(task.name, problem, response)])[0]
        if graded.reward is None:
            raise RollkeelError(graded.detail)
        return graded.reward, graded.detail

    return score


_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")


def _shape(failure: str) -> str:
    """What two failures for one reason share: not the numbers and words of an item; of a grader that broke not the answer either."""
    broke = "scores None" in failure
    shaped = _QUOTED.sub(lambda quoted: "" if broke else re.sub(r"\w+", "#", quoted[0]), failure)
    return re.sub(r"^\w+ item|\d+", "#", shaped)


EPISODES = 4
"""Episodes played at once by `tasks check`: one waits for its tool most of the time."""


@tasks_app.command()
def check(
    name: str, options: Options = None, count: Annotated[int, typer.Option("--count", "-n", min=1)] = 200
) -> None:
    """Prove that gold answers score 1, near misses 0, items repeat and splits are disjoint."""
    from rollkeel import rewards, tasks
    from rollkeel.diagnostics.bars import Bars
    from rollkeel.tasks.environment import Environment

    task = _task(name, options)
    if isinstance(task, Environment):
        from rollkeel.play import equipped

        with equipped(task), Bars() as bars:
            result = tasks.check(task, count, threads=EPISODES if task.uses_tool else 1, progress=bars)
    else:
        with rewards.Graders() as graders, Bars() as bars:
            result = tasks.check(task, count, score=_through(graders, task), progress=bars)
    alike: dict[str, list[str]] = {}
    for failure in result.failures:
        alike.setdefault(_shape(failure), []).append(failure)
    for first, *more in alike.values():
        print(f"FAIL {first}{f' (and {len(more)} more like it)' if more else ''}")
    print(f"{name}: {result.items} items, {result.scored} answers scored, {len(result.failures)} failures")
    if not result.passed:
        raise typer.Exit(1)


@objectives_app.command(name="list")
def list_objectives() -> None:
    """Names of the recipes."""
    from rollkeel.objectives.described import summaries

    for name, summary in summaries():
        print(f"{name:22} {summary}")
    print("  beside these: composed (your own masks, weight, surrogate) and module:function; see docs/objectives.md")


ObjectiveOptions = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Options of the recipe, as under `objective`.")
]


@objectives_app.command(name="show")
def show_objective(name: str, options: ObjectiveOptions = None) -> None:
    """Formula, source, options with their defaults, and what they resolve to."""
    from rollkeel.objectives.described import description

    print(description(name, load(None, [f"objective.{o}" for o in options or []]).objective.options))


@objectives_app.command()
def plot(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]... [OPTION=VALUE]...", help="Recipes (all) and options for them."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for NAME.svg and index.html; may exist.")] = Path(
        "objectives"
    ),
) -> None:
    """Draw acceptance regions over the two probabilities of a token, by calling the objectives."""
    names = [w for w in words or [] if "=" not in w]
    options = load(None, [f"objective.{w}" for w in words or [] if "=" in w]).objective.options
    from rollkeel import objectives
    from rollkeel.report import regions

    made = {name: objectives.build(name, options) for name in names or list(objectives.RECIPES)}
    print(regions.write(made, out)[-1])


def main(argv: list[str] | None = None) -> None:
    """Entry point: every refusal is one line on standard error and its exit code."""
    keep_freed_memory()
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    sys.exit(guarded(lambda: app(args=words, standalone_mode=False)))


def _unread() -> int:
    """Exit code where the reader of standard output went away, as `head` does: that of a program which SIGPIPE ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more on its way out
    return 128 + signal.SIGPIPE


# typer bundles click from some version on; its public exceptions lead to the base class in either case.
_UsageError: Any = typer.BadParameter.__mro__[1]


def guarded(call: Callable[[], Any]) -> int:
    """Run `call`; returns the exit code, having printed one line for an error that a user can act on."""
    try:
        result = call()
        sys.stdout.flush()  # a reader that went away is noticed here and not on the interpreter's way out
        if result == 130:  # typer turns a KeyboardInterrupt into this code and says nothing
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except RollkeelError as error:
        print(f"rollkeel: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("rollkeel: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _unread()
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _unread()  # typer exits with 1 there, which is the doctor's verdict
    except MemoryError:
        hint = "lower train.micro_batch_tokens, engine.slots or engine.kv_memory_gb"
        print(f"rollkeel: out of memory; {hint}", file=sys.stderr)
        return 3
    except Exception as caught:
        error: Any = caught
        if not isinstance(error, _UsageError):
            raise
        message = error.format_message()  # unlike str(error) it names the option
        print(f"rollkeel: {' '.join(message.split())} (see rollkeel --help)", file=sys.stderr)
        return 2


if __name__ == "__main__":
    main()
