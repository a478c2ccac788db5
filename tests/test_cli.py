"""What a person at a terminal sees: one clear line for every mistake, the promised exit code, and nothing half-written.

Commands run in this process except where an import or a kill matters. Not covered: how the live view looks (tests/record).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import TINY, cli, events, rows
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, MambaConfig, Qwen3Config

from rollkeel import cli as cli_module
from rollkeel import errors
from rollkeel.models.forward import said_forward
from rollkeel.models.presets import build_preset, build_tokenizer
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.tasks import names as task_names
from rollkeel.types import GraderSpec

QUICK = [*TINY, "sft.steps=0", "run.steps=1", "rollout.prompts=2", "eval.items=2"]


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


GOOD_ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 2) -> str:
    """The one line on standard error of a command that must fail with `code`."""
    got, _, err = cli(capsys, *words)
    assert got == code, err
    assert err.count("\n") == 1, err
    assert err.startswith("rollkeel: ")
    assert "Traceback" not in err
    return err


# -- bad input of `train` ----------------------------------------------------------------------------------------------

BAD_TRAIN = [
    (["train.lrr=1"], "did you mean train.lr?"),
    (["run.steps=many"], "config run.steps: expected an integer, got 'many'"),
    (["no-such-recipe"], "recipe 'no-such-recipe': no such file"),
    (["default", "also"], "override 'also': expected key=value"),
    (["model.path=./nowhere"], "expected a Hugging Face folder with config.json"),
    (["model.path=preset:tiny-qwen"], "did you mean preset:tiny-qwen3"),
    (["model.overrides.hiden_size=96"], "has no such field"),
    (["model.overrides.vocab_size=96"], "expected at least the tokenizer's 264, got 96"),
    (["model.overrides.max_position_embeddings=2", "sampling.max_new_tokens=1"], "3 tokens, expected at most 1"),
    (["engine.max_length=2", "sampling.max_new_tokens=1"], "3 tokens, expected at most 1"),
    (
        ["sampling.max_new_tokens=5000"],
        "sampling.max_new_tokens: expected at most 4095, got 5000; prompt and response share",
    ),
    (["engine.max_length=8", "sampling.max_new_tokens=8"], "sampling.max_new_tokens: expected at most 7, got 8"),
    (["rollout.prompts=1000000000"], "rollout.prompts × rollout.samples: takes at least"),
    (["eval.items=1000000000"], "eval.items × eval.samples: takes at least"),
    (["engine.slots=10000000000"], "engine.slots: takes at least"),
    (["engine.processes=1000000"], "engine.processes: takes at least"),
    (["train.processes=1000000"], "train.processes: takes at least"),
    (["train.lr=.inf"], "config train.lr: expected a finite number, got inf"),
    (["train.betas=[1.5,2]"], "config train.betas.0: expected < 1"),
    (["run.name=../../evil"], "run.name: '../../evil' is a path"),
    (["engine.kind=vllm", "engine.server.url=http://127.0.0.1:1"], "nothing listens at http://127.0.0.1:1"),
    (["data.task=algebra"], "task 'algebra': removed; use data.task=gym data.options.generator=simple_equations"),
    (["data.task=runsumm"], "did you mean runsum?"),
    (["data.options.digitz=2"], "unknown option 'digitz'; did you mean digits?"),
    (["data.options.digits=0"], "option digits"),
    (["objective.name=kpopp"], "did you mean"),
    (["objective.phii=0.1"], "objective.phii: not an option of kpop; did you mean"),
    (["objective.phi=-1"], "kpop.phi"),
    (["advantages.name=grpoo"], "config advantages.name"),
    (["sampling.temperature=0"], "expected > 0 for training"),
    (["rollout.samples=1"], "expected at least 2"),
    (["data.task=null", "data.path=nowhere.jsonl"], "no such file"),
    (["data.task=null", "data.path=x.csv"], "x.csv': no such file"),
]


@pytest.mark.parametrize(("words", "message"), BAD_TRAIN, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_bad_input_of_train(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = [w for w in words if "=" not in w]
    rest = [*QUICK, *(w for w in words if "=" in w), f"run.dir={tmp_path / 'new' / 'run'}"]
    assert message in refused(capsys, "train", *recipe, *rest)
    assert list(tmp_path.iterdir()) == []


BAD_DATA = [
    ([{"question": "1", "answer": "2"}], [], "no column 'prompt'; present: 'answer', 'question'"),
    ([{"prompt": "1"}], [], "no column 'answer'"),
    ([], [], "empty data"),
    (["{"], [], "line 1: not valid JSON"),
    (["[1]"], [], "line 1: expected an object, got list"),
    ([{"prompt": None, "answer": "2"}], [], "got null"),
    ([{"prompt": "x" * 5000, "answer": "2"}], ["data.eval_fraction=0"], "5000 tokens, expected at most 4095"),
    (GOOD_ROWS, ["data.grader=exactt"], "did you mean exact?"),
    (GOOD_ROWS, ["data.prompt_column=promt"], "no column 'promt'"),
    (GOOD_ROWS[:1], ["data.eval_fraction=0.5"], "split at data.eval_fraction=0.5"),
]


@pytest.mark.parametrize(("records", "words", "message"), BAD_DATA, ids=[m for _, _, m in BAD_DATA])
def test_bad_data_file(
    records: list[object], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    words = [*QUICK, "data.task=null", "data.options={}", f"data.path={data}", *words, f"run.dir={tmp_path / 'run'}"]
    assert message in refused(capsys, "train", *words)
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def test_tokenizer_that_does_not_belong_to_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = build_preset("tiny-qwen3")
    model.resize_token_embeddings(32)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = [*QUICK, f"model.path={tmp_path / 'model'}"]
    assert "outside the model's vocabulary of 32" in refused(capsys, "train", *words, f"run.dir={tmp_path / 'run'}")
    assert "outside the model's vocabulary of 32" in refused(capsys, "eval", *words)
    assert "outside the model's vocabulary of 32" in refused(capsys, "rollout", *words, "--out", tmp_path / "r.parquet")
    assert "outside the model's vocabulary of 32" in refused(
        capsys, "sft", *words, "sft.steps=1", "--out", tmp_path / "sft"
    )
    assert "sft.steps=0 trains nothing" in refused(capsys, "sft", *words, "--out", tmp_path / "sft")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


ARCHITECTURES = {
    "soft-capping": (Gemma2Config, {"head_dim": 32}),
    "granite scales its logits": (GraniteConfig, {"logits_scaling": 2.0}),
    "mamba has no attention": (MambaConfig, {"state_size": 8}),
}


@pytest.mark.parametrize("message", ARCHITECTURES)
def test_an_architecture_that_the_engine_refuses_is_refused_before_the_warm_start(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, options = ARCHITECTURES[message]
    heads = {} if made is MambaConfig else {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    config = made(vocab_size=288, hidden_size=64, num_hidden_layers=1, **heads, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        "rollkeel.loop.warm_start.run_sft", lambda *_, **__: pytest.fail("trained before it was refused")
    )
    words = [*TINY, f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}"]
    assert message in refused(capsys, "train", *words)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_preset("tiny-qwen3")[0].config.save_pretrained(tmp_path / "model")
    err = refused(capsys, "train", *QUICK, f"model.path={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}")
    assert "transformers cannot load it" in err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("mine", "is not empty (notes.txt) and holds no run"),
        ('"a\\0b"', "null characters"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_run_folder_that_cannot_be(
    place: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert message in refused(capsys, "train", *QUICK, f"run.dir={place}")
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == ["mine", "mine/notes.txt"]


def test_existing_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("mine")
    err = refused(capsys, "train", *QUICK, f"run.dir={run}")
    assert "already holds a run (config.yaml)" in err
    assert {p.name: p.read_text() for p in run.iterdir()} == {"config.yaml": "mine"}


@pytest.mark.parametrize("content", [None, {}, {"notes.txt": "x"}])
def test_resume_of_something_else(
    content: dict[str, str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    assert "expected a run folder with config.yaml, found none" in refused(capsys, "train", "--resume", folder)
    assert not folder.exists() or {p.name for p in folder.iterdir()} == set(content or {})


def test_which_forward_samples_is_said_with_the_reason() -> None:
    for asked, text, fast, compiled, says in (
        ("fast", Qwen3Config(), True, False, "fast (engine.forward=fast)"),
        ("auto", Qwen3Config(), True, True, "compiled (the fast forward with compiled decode steps"),
        ("auto", Qwen3Config(), True, False, "fast (compiled decode steps are for float32 on a CPU"),
        ("auto", Gemma2Config(), False, False, "transformers, several times slower (model type gemma2 is not"),
        ("auto", Qwen3Config(), False, False, "transformers, several times slower (an option of it is not"),
    ):
        assert said_forward(asked, text, fast, compiled).startswith(says)


def test_resume_with_a_damaged_config_is_a_corrupt_artefact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("run: {stepz: 3}\n")
    assert "did you mean run.steps?" in refused(capsys, "train", "--resume", tmp_path, code=4)
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("place", ["/proc/nowhere/run", "{file}/run", "{file}"])
def test_unwritable_run_folder(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for words in (["train", *QUICK, f"run.dir={place.format(file=file)}"],):
        assert "choose another" in refused(capsys, *words)
    assert file.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_unwritable_out_of_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    refused(capsys, "rollout", *QUICK, "--out", tmp_path / "file" / "r.parquet")
    refused(capsys, "sft", *QUICK, "sft.steps=1", "--out", tmp_path / "file" / "model")
    assert "already exists" in refused(capsys, "rollout", *QUICK, "--out", tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# -- full disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: the warm start fits in memory, one checkpoint of 1.8 MB does not fit on it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_full_disk_leaves_nothing_half_written(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "train", *QUICK, f"run.dir={small_disk / 'run'}")
    assert "No space left on device" in err or "free space" in err
    run = small_disk / "run"
    # Step 0 was measured before its checkpoint failed: the run is there, whole as far as it goes, and can be resumed.
    assert [row["step"] for row in rows(run)] == [0]
    assert [p.name for p in run.rglob(".*") if p.name != ".lock"] == []
    assert not (run / "model").exists()
    assert list((run / "checkpoints").iterdir()) == []
    assert events(run)[-1]["status"] == "failed"
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, _, err = cli(capsys, "train", "--resume", run)
    assert (code, err) == (0, "")
    assert [row["step"] for row in rows(run)] == [0, 1]


def test_disk_that_is_full_from_the_start(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(2**20 + 1))
    assert "No space left" in refused(capsys, "train", *QUICK, f"run.dir={small_disk / 'run'}")
    refused(capsys, "sft", *QUICK, "sft.steps=1", "--out", small_disk / "model")
    refused(capsys, "rollout", *QUICK, "--out", small_disk / "r.parquet")
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


# -- exit codes and usage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "trian"),
        (["train", "--resum", "x"], "--resum"),
        (["sft"], "--out"),
        (["rollout", "--out", "x", "--step", "0"], "--step"),
        (["score", "nowhere.parquet", "--out", "x.parquet"], "nowhere.parquet: no such file"),
        (["report", "nowhere"], "no such folder"),
        (["tasks", "show", "runsumm"], "did you mean runsum?"),
        (["tasks", "check", "runsum", "digitz=3"], "unknown option 'digitz'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_wrong_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *words)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadInput("x"), 2),
        (errors.RunStopped("x"), 3),
        (errors.NonFinite("x"), 3),
        (errors.EngineFailure("x"), 3),
        (errors.GraderFailure("x"), 3),
        (errors.Corrupt("x"), 4),
        (errors.Interrupted("x"), 130),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 3),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert cli_module.guarded(fail) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_a_fault_of_ours_is_not_dressed_up() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        cli_module.guarded(fail)


def test_success_is_zero_and_a_negative_verdict_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(capsys, "tasks", "check", "runsum", "-n", "5")[0] == 0
    assert cli_module.guarded(lambda: 1) == 1


def test_tasks_check_asks_the_grader_that_a_run_would_ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollkeel.tasks.base.Task.grader", lambda self, item: GraderSpec(name="numeric"))
    code, out, _ = cli(capsys, "tasks", "check", "addition", "digits=2", "-n", "3")
    assert code == 1  # the numeric grader takes 122.0 and 0122, which the task itself refuses
    assert ".0' scores 1.0, expected 0" in out


def test_tasks_check_says_the_same_failure_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grader that is broken breaks at every answer: that was thousands of lines."""
    monkeypatch.setattr("rollkeel.tasks.base.Task.grader", lambda self, item: GraderSpec(name="nobody"))
    code, out, _ = cli(capsys, "tasks", "check", "addition", "digits=2", "-n", "3")
    *lines, last = out.splitlines()
    assert code == 1
    assert len(lines) == 3, "the gold answer, the same after JSON, and every other"
    assert "grader 'nobody': unknown" in lines[0]
    assert lines[0].startswith("FAIL sft item 0 ")
    assert lines[0].endswith("(and 8 more like it)")
    assert last.startswith("addition: 9 items, ")


def test_a_second_ctrl_c_inside_a_verb_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollkeel.tasks.names", interrupted)
    code, _, err = cli(capsys, "tasks", "list")
    assert (code, err.strip()) == (130, "rollkeel: stopped")


def test_tasks_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    out = cli(capsys, "tasks", "list")[1]
    assert [line.split()[0] for line in out.splitlines()] == task_names()
    out = cli(capsys, "tasks", "show", "runsum", "digits=3", "-n", "2")[1]
    assert len([line for line in out.splitlines() if "→" in line]) == 2
    assert "knobs: digits=3\n" in out


# -- without torch -----------------------------------------------------------------------------------------------------

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
from rollkeel import cli
for words in WORDS:
    try:
        cli.main(words)
    except SystemExit as stopped:
        print("code", stopped.code, file=sys.stderr)
"""


def test_help_and_bad_config_answer_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    words = [
        (["--help"], 0),
        ([], 0),
        *(([verb, "--help"], 0) for verb in ("train", "sft", "rollout", "score", "eval", "report", "tasks")),
        (["tasks", "list"], 0),
        (["tasks", "show", "countdown"], 0),
        (["train", "train.lrr=1"], 2),
        (["train", "run.steps=many"], 2),
        (["train", "nowhere"], 2),
        (["train", "data.task=runsumm"], 2),
        (["train", "data.options.digitz=3"], 2),
        (["train", "--resume", str(tmp_path / "nowhere")], 2),
        (["train", "--resume", str(tmp_path), "train.lrr=1"], 2),
        (["sft", "--out", "x", "train.lrr=1"], 2),
        (["eval", "eval.every=-1"], 2),
        (["report", "nowhere"], 2),
        (["score", "nowhere", "--out", "x"], 2),
    ]
    script = NO_TORCH.replace("WORDS", repr([w for w, _ in words]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("code")]
    assert codes == [code for _, code in words], done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["config.yaml"]


# -- the stages, one after another through files ----------------------------------------------------------------------


def test_stages_chain_through_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = [w for w in TINY if not w.startswith("run.steps")]
    code, out, err = cli(capsys, "sft", *tiny, "--out", tmp_path / "model", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["sft/steps"] == 60
    model = [*tiny, f"model.path={tmp_path / 'model'}"]

    raw, scored, again = (tmp_path / "deep" / f"{name}.parquet" for name in ("raw", "scored", "again"))
    code, out, err = cli(capsys, "rollout", *model, "--step", "3", "--out", raw, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["rollout/count"] == 32
    sampled = to_rollouts(read_step(raw))
    assert [r.id for r in sampled] == list(range(2 * 32, 3 * 32))
    assert all(r.reward is None for r in sampled)

    code, out, err = cli(capsys, "score", raw, "--out", scored, "--json")
    assert (code, err) == (0, "")
    rewards = [r.reward for r in to_rollouts(read_step(scored))]
    assert json.loads(out)["reward/mean"] == pytest.approx(sum(r or 0 for r in rewards) / 32, abs=1e-6)
    assert set(rewards) == {0.0, 1.0}

    assert "already exists" in refused(capsys, "score", raw, "--out", scored)
    raw.write_bytes(raw.read_bytes()[:-20])
    assert "not a whole parquet file" in refused(capsys, "score", raw, "--out", again, code=4)
    assert not again.exists()

    code, out, err = cli(capsys, "eval", *model, "--out", tmp_path / "answers.parquet", "--json")
    assert (code, err) == (0, "")
    scores = json.loads(out)
    assert 0 <= scores["eval/runsum/avg@k"] <= 1
    assert scores["eval/runsum/k"] == 2
    assert len(to_rollouts(read_step(tmp_path / "answers.parquet"))) == 16

    run = tmp_path / "run"
    code, _, err = cli(capsys, "train", *model, "run.steps=1", "sft.steps=0", f"run.dir={run}")
    assert (code, err) == (0, "")
    assert rows(run)[0]["eval/runsum/avg@k"] == pytest.approx(scores["eval/runsum/avg@k"], abs=1e-6)
    (run / "report.html").unlink()
    code, out, err = cli(capsys, "report", run)
    assert (code, err) == (0, "")
    assert Path(out.strip()) == run / "report.html"
    assert (run / "report.html").stat().st_size > 10_000


def test_steps_zero_stops_after_the_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, _, err = cli(capsys, "train", *TINY, "run.steps=0", f"run.dir={run}")
    assert (code, err) == (0, "")
    assert [row["step"] for row in rows(run)] == [0]
    assert (run / "model" / "model.safetensors").is_file()
