"""A result is only as good as the code that it is said to come from: a helper beside somebody's own file is code of the run, too.

Files are written, imported and changed for real, and short runs trained, resumed and moved. Not covered: helpers that are
imported by a name made at run time, which nobody can see in a file; packages that are installed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, cli, rows, weights

from rollkeel import plugins, tasks
from rollkeel.batch import build
from rollkeel.errors import BadInput
from rollkeel.lab.preset import Arm, Preset
from rollkeel.lab.runs import plan
from rollkeel.loop import warm_start
from rollkeel.loop.warm_start import warm_start_key
from rollkeel.models import packed
from rollkeel.recipe import load
from rollkeel.train import sft

TASK = """from rollkeel.tasks import Task, TaskItem, TaskOptions
{imports}
class Size(TaskOptions):
    size: int = 1000
class Twice(Task):
    options_type = Size
    def draw(self, rng):
        word = str(rng.randrange(self.options.size))
        return TaskItem(text=f"{{word}}=", answer=answer(word))
def measured(words, seed):
    return {{"seed": seed}}
"""
HELPER = "def answer(word):\n    return word\n"
SMALL = [word for word in TINY if "digits" not in word and "checkpoint" not in word]
SMALL += ["run.steps=2", "sft.steps=2", "eval.every=0", "eval.items=2", "eval.greedy=false", "checkpoint.every=1"]


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules and paths of one test are not seen by the next; warm starts are kept here."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    yield
    forget(tmp_path)


def forget(path: Path) -> None:
    """As in a process that has loaded nothing from there."""
    sys.path[:] = [each for each in sys.path if not each.startswith(str(path))]
    for name, module in [*sys.modules.items()]:
        if str(path) in f"{vars(module).get('__file__')} {vars(module).get('__path__')}":
            del sys.modules[name]


def folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def known(place: str) -> set[str]:
    return set(plugins.digests({"data": {"task": f"{place}:Twice"}})[place]["files"])


REACHED = [
    ("from helper import answer", {"helper.py"}),
    ("import helper; answer = helper.answer", {"helper.py"}),
    ("from far import answer", {"far.py", "helper.py"}),
    ("from kit.words import answer", {"kit/__init__.py", "kit/words.py", "kit/deep/more.py"}),
    ("from bare.words import answer", {"bare/words.py"}),
    ("def answer(word):\n    from helper import answer\n    return answer(word)", {"helper.py"}),
    ("try:\n    from helper import *\nexcept ImportError:\n    import nosuch", {"helper.py"}),
    ("import numpy, json\nanswer = str", set()),
]
BESIDE = {
    "helper.py": HELPER,
    "far.py": "from helper import answer\n",
    "kit/__init__.py": "",
    "kit/words.py": "from .deep import more\n" + HELPER,
    "kit/deep/more.py": "",
    "kit/unused.py": "",
    "bare/words.py": HELPER,
    "unused.py": "",
    ".venv/lib/python3/site-packages/installed.py": "",
}


@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize(("imports", "files"), REACHED, ids=[each[0].split("\n")[0] for each in REACHED])
def test_the_digest_covers_what_the_file_imports_from_its_folder(
    imports: str, files: set[str], as_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder(tmp_path, {**BESIDE, "mine.py": TASK.format(imports=imports)}))
    sys.path.append(str(tmp_path / ".venv/lib/python3/site-packages"))
    assert known("mine" if as_module else f"{tmp_path}/mine.py") == {"mine.py", *files}


def test_a_module_in_a_package_is_of_the_whole_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TASK.format(imports="from ..words import answer\nimport beside")
    files = {"top/__init__.py": "from . import made", "top/made.py": "", "top/words.py": HELPER, "beside.py": ""}
    monkeypatch.chdir(folder(tmp_path, {**files, "top/sub/__init__.py": "", "top/sub/mine.py": text}))
    assert known("top.sub.mine") == {*files, "top/sub/__init__.py", "top/sub/mine.py"}


def test_the_digest_does_not_depend_on_what_else_was_loaded(tmp_path: Path) -> None:
    files = {"helper.py": HELPER, "other.py": "from helper import answer\n"}
    folder(tmp_path, {**files, "mine.py": TASK.format(imports="from helper import answer")})
    plugins.load(f"{tmp_path}/other.py:answer", "x")
    assert known(f"{tmp_path}/mine.py") == {"mine.py", "helper.py"}


def test_the_digest_covers_the_module_that_grades_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TASK.format(imports="answer = 1").replace("options_type = Size", 'worker = "grading:grade"')
    monkeypatch.chdir(
        folder(tmp_path, {"mine.py": text, "grading.py": "def grade(text, answer, options): return 1.0\n"})
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = {"data": {"task": f"{tmp_path}/mine.py:Twice"}}
    assert {f for each in plugins.digests(tree).values() for f in each["files"]} == {"mine.py", "grading.py"}


def test_an_installed_module_is_of_its_own_package_alone(tmp_path: Path) -> None:
    installed = folder(
        tmp_path / "site-packages",
        {"giant/__init__.py": "", "ours/__init__.py": "", "ours/words.py": HELPER}
        | {"ours/mine.py": TASK.format(imports="import giant\nfrom ours.words import answer")},
    )
    sys.path.append(str(installed))
    assert known("ours.mine") == {"ours/__init__.py", "ours/mine.py", "ours/words.py"}


def test_another_helper_makes_another_warm_start_and_other_runs_of_the_lab(tmp_path: Path) -> None:
    mine = (
        folder(tmp_path, {"helper.py": HELPER, "mine.py": TASK.format(imports="from helper import answer")}) / "mine.py"
    )
    common: Any = {"question": "", "paper": "", "expected": "", "judge": list, "readings": {}, "arms": (Arm(name="a"),)}

    def keys() -> list[str]:
        trained = Preset(name="t", words=(f"data.task={mine}:Twice",), **common)
        measured = Preset(name="m", measure=plugins.load(f"{mine}:measured", "x"), **common)
        names = [plan(preset, [0], tmp_path / "store")[0].folder.name for preset in (trained, measured)]
        return [warm_start_key(load(None, [f"data.task={mine}:Twice"])), *names]

    before = keys()
    assert keys() == before
    (tmp_path / "helper.py").write_text(HELPER + "# another\n")
    assert all(old != new for old, new in zip(before, keys(), strict=True))


def test_a_warm_start_is_named_by_the_code_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    digest = warm_start._digest_files
    monkeypatch.setattr(warm_start, "_digest_files", lambda files: read.extend(files) or digest(files))
    warm_start_key(load(None, []))
    for module in (tasks, build, packed, sft):
        assert Path(str(module.__file__)) in read


def test_two_helpers_of_one_name_are_refused_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TASK.format(imports="from helper import answer") + "def credit(groups):\n    return groups.centred\n"
    for name in "ab":
        folder(tmp_path / name, {"helper.py": HELPER, "mine.py": text})
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(capsys, "train", *SMALL, "data.task=a/mine.py:Twice", "advantages.name=b/mine.py:credit")
    assert code == 2
    assert err == (
        f"rollkeel: advantages.name '{tmp_path}/b/mine.py:credit': {tmp_path}/b/mine.py:2 would import"
        f" {tmp_path}/a/helper.py and not {tmp_path}/b/helper.py; rename one of them\n"
    )


NAMESAKES = [
    ({"statistics.py": HELPER}, "from statistics import answer"),  # of the standard library
    ({"numpy/__init__.py": HELPER}, "from numpy import answer"),  # installed
    ({"bare/words.py": HELPER}, "from bare.words import answer"),  # a folder without __init__.py
    ({"far.py": "import helper", "helper.py": ""}, "import far"),  # by way of another file
    ({"helper.py": HELPER}, "def answer(word):\n    import helper"),  # not yet imported
]


@pytest.mark.parametrize(("files", "imports"), NAMESAKES, ids=[each[1] for each in NAMESAKES])
def test_a_file_that_another_of_its_name_hides_is_refused(files: dict[str, str], imports: str, tmp_path: Path) -> None:
    sys.path.append(str(folder(tmp_path / "first", {"helper.py": "", "bare/words.py": ""})))
    folder(tmp_path / "own", {**files, "mine.py": TASK.format(imports=imports)})
    with pytest.raises(BadInput, match=rf"would import \S+ and not {tmp_path}/own/\S+; rename one of them$"):
        plugins.load(f"{tmp_path}/own/mine.py:Twice", "x")


def test_a_folder_by_two_names_is_one(tmp_path: Path) -> None:
    folder(tmp_path / "real", {"helper.py": HELPER, "mine.py": TASK.format(imports="from helper import answer")})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert known(f"{tmp_path}/real/mine.py") == known(f"{tmp_path}/link/mine.py") == {"mine.py", "helper.py"}


def train(capsys: pytest.CaptureFixture[str], where: Path, *words: str) -> None:
    code, _, err = cli(capsys, "train", *SMALL, *words, f"run.dir={where}")
    assert (code, err) == (0, "")


def test_a_changed_helper_is_told_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(
        folder(tmp_path, {"helper.py": HELPER, "mine.py": TASK.format(imports="from helper import answer")})
    )
    train(capsys, tmp_path / "run", "data.task=mine.py:Twice")
    assert "changed" not in cli(capsys, "train", "--resume", "run", "run.steps=3")[1]
    (tmp_path / "helper.py").write_text(HELPER + "# another\n")
    said = f"{tmp_path}/helper.py changed since this run last used it"
    code, out, _ = cli(capsys, "train", "--resume", "run", "run.steps=4")
    assert (code, out.count("changed since"), said in out) == (0, 1, True)
    assert "changed" not in cli(capsys, "train", "--resume", "run", "run.steps=5")[1]


@pytest.mark.slow
def test_a_run_that_moved_with_its_file_goes_on_under_the_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    folder(old, {"helper.py": HELPER, "mine.py": TASK.format(imports="from helper import answer")})
    monkeypatch.chdir(old)
    train(capsys, old / "run", "data.task=mine.py:Twice", "data.options.size=500")
    shutil.copytree(old / "run", old / "whole")
    shutil.rmtree(old / "run" / "checkpoints" / "step_000002")
    monkeypatch.chdir(tmp_path)
    old.rename(new)

    def resumed(*words: str) -> tuple[int, str]:
        forget(tmp_path)
        code, out, err = cli(capsys, "train", "--resume", new / "run", *words)
        return code, out + err

    code, said = resumed()
    assert code == 2
    assert f"no such file {old}/mine.py; put it there, or name the file where it is" in said
    (new / "helper.py").write_text(HELPER + "# another\n")
    code, said = resumed(f"data.task={new}/mine.py:Twice")
    assert (
        code,
        f"the run has '{old}/mine.py:Twice', got '{new}/mine.py:Twice'; resume with the same task, its files unchanged"
        in said,
    ) == (2, True), said
    (new / "helper.py").write_text(HELPER)
    code, said = resumed(f"data.task={new}/mine.py:Twice")
    assert (code, "until here" in said, "changed since" in said) == (0, False, False), said
    assert (rows(new / "run"), weights(new / "run")) == (rows(new / "whole"), weights(new / "whole"))
    assert resumed("run.steps=3")[0] == 0
    assert set(json.loads((new / "run" / plugins.RECORD).read_text())) == {f"{new}/mine.py"}


def test_a_module_is_that_of_the_run_wherever_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("here", "there"):
        folder(tmp_path / name, {"mine.py": TASK.format(imports=HELPER) + f"where = {name!r}\n"})
    monkeypatch.chdir(tmp_path / "here")
    train(capsys, tmp_path / "run", "data.task=mine:Twice", "run.steps=1")
    forget(tmp_path)
    monkeypatch.chdir(tmp_path / "there")
    code, out, err = cli(capsys, "train", "--resume", tmp_path / "run", "run.steps=2")
    assert (code, err, "changed" in out) == (0, "", False)
    assert sys.modules["mine"].where == "here"


def test_the_setting_that_names_broken_code_is_named(tmp_path: Path) -> None:
    for tree in (
        {"data": {"grader_options": {"parts": [{"grader": "no.py:x"}]}}},
        {"report": {"trackers": ["no.py:x"]}},
    ):
        with pytest.raises(BadInput, match=r"^(data.grader_options.parts|report.trackers) 'no.py:x': no such file"):
            plugins.digests(tree)
