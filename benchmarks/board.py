"""`rollkeel board` in a headless Chromium: first view, turning pages, following a run, and where requests go.

    python -m benchmarks.board                              # 50 runs, 10⁷ tokens: two minutes and 0.5 GB of disk
    python -m benchmarks.board --out board.json
    python -m benchmarks.board --runs 3 --tokens 20000      # a quick look

Half of the tokens lie in sixty files, the other half in two large ones. Every round starts a board of its own, so that
nothing is cached but by the system. Targets: first view under 2 s, a page of 1,000 tokens under 200 ms, a new row on the
page within 2 s, no request to another host. The load of the machine is printed: what else runs there counts in.
Processor time is of server and browser, all their processes together, with what they do beside: the page asks for news
twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.browser import Browser, find
from rollkeel.record.rollout_store import write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

FILES, LARGE, VOCABULARY, KEYS = 60, 2, 5000, 110
DRAWN = (
    """[...document.querySelectorAll('#charts figure')].filter((f) => f.getBoundingClientRect().top < innerHeight)"""
)
UNTIL = """(test) => new Promise((done) => {
  const look = () => test() ? requestAnimationFrame(() => done(performance.now())) : setTimeout(look, 2);
  look();
})"""
TURN = """(async () => {{
  const root = document.getElementById('tokens'), before = root.dataset.drawn, began = performance.now();
  {action};
  await ({until})(() => root.dataset.drawn !== before);
  return performance.now() - began;
}})()"""


def metrics(run: Path, steps: int, seed: int) -> None:
    """Rows as wide as a run's, of curves that rise and fall."""
    draw = np.random.default_rng(seed)
    keys = [
        "reward/mean",
        "eval/runsum/avg@k",
        "mismatch/ratio_std",
        "mismatch/kl_k3",
        "policy/entropy",
        "optimizer/grad_norm",
    ]
    keys += ["mask/kpop/dropped", "rollout/length_mean", "time/rollout_s", "time/update_s", "memory/rss_mb"]
    keys += [f"other/number_{i}" for i in range(KEYS - len(keys))]
    at = np.linspace(0, 1, steps)[:, None]
    values = np.abs(draw.uniform(0.2, 1, KEYS) * (1 - np.exp(-3 * at)) + draw.normal(0, 0.05, (steps, KEYS)))
    lines = (json.dumps({"step": i + 1, **dict(zip(keys, row, strict=True))}) for i, row in enumerate(values.tolist()))
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (run / "config.yaml").write_text(f"run: {{name: run, steps: {steps}, seed: {seed}}}\n")
    (run / "events.jsonl").write_text(json.dumps({"time": 0.0, "event": "run_created", "steps": steps}) + "\n")


def rollouts(run: Path, step: int, count: int, length: int) -> int:
    """One file of `count` rollouts of `length` tokens each; returns its tokens."""
    draw = np.random.default_rng(step)
    made, trained, entropy, keep = [], {}, {}, {}
    for i in range(count):
        log_q = -draw.exponential(0.5, length).astype(np.float32)
        version = np.full(length, step)
        span = TokenSpan(
            token_ids=draw.integers(0, VOCABULARY, length),
            logprobs=log_q,
            kept_mass=np.ones(length, np.float32),
            versions=version - draw.integers(0, 3, length),
            kv_versions=version - 2,
        )
        prompt = Prompt(
            id=str(i // 8),
            index=i // 8,
            text=f"prompt {i // 8}",
            token_ids=np.arange(8),
            answer="42",
            grader=GraderSpec(name="exact"),
            task="sum",
        )
        made.append(
            Rollout(
                id=step * 1_000_000 + i,
                group=i // 8,
                member=i % 8,
                prompt=prompt,
                span=span,
                status=Status.FINISHED,
                sampling=SamplingParams(),
                engine="local",
                dtype="fp8",
                reward=float(i % 2),
            )
        )
        key = made[-1].id
        trained[key] = np.minimum(log_q + draw.normal(0, 0.1, length), 0).astype(np.float32)
        entropy[key], keep[key] = draw.exponential(0.7, length).astype(np.float32), draw.random(length) > 0.01
    (run / "rollouts").mkdir(exist_ok=True)
    write_step(
        run / "rollouts" / f"step_{step:06d}.parquet",
        made,
        step=step,
        train_version=dict.fromkeys(trained, step),
        train_logprobs=trained,
        entropy=entropy,
        keep=keep,
        piece=lambda token: f" w{token}",
    )
    return count * length


def generate(folder: Path, runs: int, steps: int, tokens: int) -> int:
    """The runs; returns how many tokens they hold."""
    for i in range(runs):
        metrics(folder / f"run{i:02}", steps, i)
    small, large = max(tokens // 2 // FILES // 800, 1), max(tokens // 2 // LARGE // 2500, 1)
    made = sum(rollouts(folder / "run00", step, small, 800) for step in range(1, FILES + 1))
    made += sum(rollouts(folder / "run00", FILES + step, large, 2500) for step in range(1, LARGE + 1))
    return made + sum(rollouts(folder / f"run{i:02}", 1, 16, 100) for i in range(1, runs))


def start(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A board over `folder`, and its address."""
    script = "from rollkeel.cli import main; main()"
    words = [sys.executable, "-c", script, "board", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    if not found:
        raise SystemExit(f"the board ended with {process.wait()}")
    return process, found[0]


def processor_s(server: int, browser: int) -> float:
    """Processor seconds so far of the server, without its child, the doctor, and of the browser with its children."""
    parents, seconds = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        number = int(file.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    counted = {server, browser}
    while new := {number for number, parent in parents.items() if parent in counted - {server}} - counted:
        counted |= new
    return sum(seconds.get(number, 0.0) for number in counted)


def turns(browser: Browser, count: int) -> dict[str, list[float]]:
    """Milliseconds from an action to the page that it shows, by kind of action."""
    draw = random.Random(0)

    def turn(action: str) -> float:
        return float(browser.run(TURN.format(action=action, until=UNTIL)))

    slider = "const s = document.querySelector('#tokens input[type=range]'); s.value = {}; s.dispatchEvent(new Event('input'))"
    after = "[...document.querySelectorAll('#tokens button')].find((b) => b.textContent === 'next →').click()"
    found: dict[str, list[float]] = {"next page": [], "another step": [], "a rollout of a large step": []}
    for _ in range(count):
        found["another step"].append(turn(slider.format(draw.randrange(FILES))))
        found["next page"].append(turn(after))
    turn(slider.format(FILES))
    browser.run(
        "const s = document.querySelector('#tokens select'); s.value = 'gap'; s.dispatchEvent(new Event('change'))"
    )
    time.sleep(2)
    for i in range(count):
        found["a rollout of a large step"].append(turn(f"document.querySelectorAll('#tokens .item')[{i % 8}].click()"))
        found["next page"].append(turn(after))
    return found


def live(browser: Browser, run: Path, count: int) -> list[float]:
    """Seconds from the last byte of a row to its point on a chart. Each row is written in two halves, as a slow disk would."""
    found = []
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    chart = "document.querySelector('figure[data-key=\"reward/mean\"]').dataset.last"
    for i in range(count):
        time.sleep(random.Random(i).uniform(0.5, 1.5))
        last["step"] += 1
        line = json.dumps(last) + "\n"
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line[:50])
            file.flush()
            time.sleep(0.3)
            file.write(line[50:])
        found.append(browser.wait(f"{chart} == {last['step']}"))
    return found


def measure(folder: Path, program: str, runs: int, count: int) -> dict[str, Any]:
    """One round."""
    process, url = start(folder)
    try:
        with Browser(program) as browser:
            listed = f"document.querySelectorAll('#runs li').length === {runs}"
            seen = f"() => {listed} && {DRAWN}.length > 3 && {DRAWN}.every((f) => f.dataset.lines > 0)"
            before = processor_s(process.pid, browser.pid)
            browser.open(f"{url}#run=run00")
            found: dict[str, Any] = {"first view, s": browser.run(f"({UNTIL})({seen})") / 1000}
            found["processor time of the first view, s"] = processor_s(process.pid, browser.pid) - before
            every = f"await ({UNTIL})(() => {DRAWN}.every((f) => f.dataset.lines == {runs}))"
            click = "const began = performance.now(); document.getElementById('every').click()"
            found["all runs drawn, s"] = browser.run(f"(async () => {{ {click}; return {every} - began; }})()") / 1000
            found["a new row, s"] = live(browser, folder / "run00", count)
            browser.run("document.querySelector('button[data-view=tokens]').click()")
            browser.wait("document.querySelector('#tokens .part')")
            time.sleep(2)
            before = processor_s(process.pid, browser.pid)
            times = turns(browser, count)
            spent = processor_s(process.pid, browser.pid) - before
            found |= {f"{kind}, ms": each for kind, each in times.items()}
            found["processor time of a page, ms"] = 1000 * spent / sum(map(len, times.values()))
            found["requests"] = len(browser.requests)
            hosts = {urlsplit(address).netloc for address in browser.requests}
            found["other hosts"] = sorted(hosts - {urlsplit(url).netloc, ""})
            found["errors"] = browser.errors
            return found
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Also write JSON here.")
    asked = parser.parse_args()
    program = find()
    if program is None:
        raise SystemExit("no Chromium on this machine; install one, or set ROLLKEEL_CHROMIUM to it")
    folder = Path(tempfile.mkdtemp(prefix="rollkeel-board-"))
    try:
        tokens = generate(folder, asked.runs, asked.steps, asked.tokens)
        rounds = [measure(folder, program, asked.runs, asked.turns) for _ in range(asked.rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load = os.getloadavg()
    print(f"{asked.runs} runs, {tokens:,} tokens, {asked.rounds} rounds, load {load[0]:.1f} on {os.cpu_count()} cores")
    result: dict[str, Any] = {
        "runs": asked.runs,
        "tokens": tokens,
        "rounds": asked.rounds,
        "load": load,
        "cores": os.cpu_count(),
    }
    for name in [name for name in rounds[0] if name[-3:] == ", s" or name[-4:] == ", ms"]:
        values = np.concatenate([np.atleast_1d(one[name]) for one in rounds])
        told = {"median": np.median(values), "p95": np.quantile(values, 0.95), "max": values.max()}
        result[name] = {key: float(value) for key, value in told.items()} | {"n": len(values)}
        print(f"{name:36}", *(f"{key} {value:8.3f}" for key, value in told.items()), f"of {len(values)}")
    for name in ("other hosts", "errors"):
        result[name] = [value for one in rounds for value in one[name]]
    result["requests"] = sum(one["requests"] for one in rounds)
    print(f"{result['requests']} requests, to other hosts: {result['other hosts'] or 'none'}")
    print(f"errors: {result['errors'] or 'none'}")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
