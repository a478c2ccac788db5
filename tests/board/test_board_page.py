"""What a person sees: the page in a real browser, over runs made by hand. Canvases are asked what they were given, not how they
look.

Needs Chromium, on the path or named by `ROLLKEEL_CHROMIUM` (`make test-browser`); without one these tests are skipped and
say so.
Not covered: other browsers; how long anything takes, which benchmarks/board.py measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from board_kit import HOSTILE, run_folder, step_file

from benchmarks.browser import Browser, find
from rollkeel.board.server import Board, listen

PROGRAM = find()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium: install one, or set ROLLKEEL_CHROMIUM to it"),
]
CHART = "document.querySelector('figure[data-key=\"{}\"]')"
REWARD = CHART.format("reward/mean")
TEXT = "document.querySelector('{}').textContent"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for i, name in enumerate(("first", "second", f"third {HOSTILE.replace('/', '')}")):
        rows = [{"step": step, "reward/mean": step / 10 + i, "policy/entropy": 1.0} for step in range(1, 31)]
        path = run_folder(
            root / name,
            rows,
            [{"event": "run_created", "steps": 40}, {"event": "alarm", "step": 2, "evidence": [HOSTILE]}],
        )
        for step in (1, 2):
            step_file(path, step, (1500, 5, 2, 0, 4), piece=HOSTILE)
    return root


@pytest.fixture
def url(root: Path) -> Iterator[str]:
    board = Board([root])
    with listen(board, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
    board.doctor.close()


@pytest.fixture
def browser(url: str) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM) as browser:
        browser.open(f"{url}#run=first")
        browser.wait(f"{REWARD}?.dataset.lines == 3")
        yield browser
        assert browser.errors == []
        assert {urlsplit(asked).netloc for asked in browser.requests} <= {urlsplit(url).netloc, ""}


def middle(browser: Browser, element: str, share: float = 0.5) -> tuple[float, float]:
    x, y = browser.run(
        f"(() => {{ const r = {element}.getBoundingClientRect(); return [r.x + r.width * {share}, r.y + r.height / 2]; }})()"
    )
    return x, y


def tokens(browser: Browser) -> str:
    browser.run("document.querySelector('button[data-view=tokens]').click()")
    browser.wait("document.querySelector('#tokens .part')")
    return "[...document.querySelectorAll('#tokens .tokens span')]"


def test_runs_stand_side_by_side_and_a_click_takes_one_out(browser: Browser) -> None:
    assert browser.run("[...document.querySelectorAll('#runs .name')].map((e) => e.textContent)")[:2] == [
        "first",
        "second",
    ]
    assert "30/40 · reward 3.000" in browser.run(TEXT.format("#runs li"))
    browser.run("document.querySelectorAll('#runs .swatch')[1].click()")
    browser.wait(f"{REWARD}.dataset.lines == 2")
    browser.run("document.getElementById('every').click()")
    browser.wait(f"{REWARD}.dataset.lines == 3")
    browser.run(
        "(() => { const m = document.getElementById('metric'); m.value = 'entropy'; m.dispatchEvent(new Event('input')); })()"
    )
    assert browser.run("[...document.querySelectorAll('#charts figure')].map((e) => e.dataset.key)") == [
        "policy/entropy"
    ]


def test_hover_tells_the_values_and_a_drag_zooms_every_chart(browser: Browser) -> None:
    plot = f"{REWARD}.querySelector('.plot')"
    x, y = middle(browser, plot)
    browser.mouse("mouseMoved", x, y)
    browser.wait("document.querySelector('.tip:not([hidden])')")
    told = browser.run(TEXT.format(".tip"))
    step = int(told.split("first")[0].split("third")[0].removeprefix("step "))
    assert 12 <= step <= 18
    assert [
        f"{name}{step / 10 + i:g}" in told.replace(HOSTILE.replace("/", ""), "")
        for i, name in enumerate(("first", "second", "third "))
    ] == [True] * 3
    for kind, share in (("mouseMoved", 0.4), ("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.6)):
        browser.mouse(kind, *middle(browser, plot, share))
    browser.wait("!document.getElementById('whole').hidden")
    low, high = map(int, browser.run(TEXT.format("#whole")).removeprefix("steps ").removesuffix(" ✕").split("–"))
    assert 8 <= low < high <= 20
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, *middle(browser, plot), clicks=clicks)
    browser.wait("document.getElementById('whole').hidden")


def test_a_row_appears_once_its_line_is_whole_and_a_new_run_beside_it(browser: Browser, root: Path) -> None:
    line = json.dumps({"step": 31, "reward/mean": 9.0, "brand/new": 1}) + "\n"
    with (root / "first" / "metrics.jsonl").open("a") as file:
        file.write(line[:20])
        file.flush()
        browser.run("new Promise((done) => setTimeout(done, 2500))")
        assert browser.run(f"{REWARD}.dataset.last") == "30"
        file.write(line[20:])
    browser.wait(f"{REWARD}.dataset.last == 31")
    run_folder(root / "fourth", [{"step": 1, "reward/mean": 0.5}])
    browser.wait("document.querySelectorAll('#runs li').length === 4")
    browser.run("document.getElementById('every').click()")
    browser.wait(f"{REWARD}.dataset.lines == 4")


def test_text_of_a_run_stays_text(browser: Browser) -> None:
    spans = tokens(browser)
    assert browser.run(f"{spans}[0].textContent") == f" {HOSTILE}2000"
    assert HOSTILE in browser.run(TEXT.format("#tokens .prompt"))
    browser.wait(f"document.getElementById('verdict').textContent.includes({json.dumps(HOSTILE)})")
    assert browser.run("document.querySelectorAll('main script, aside script').length") == 0
    assert browser.run("window.bad === undefined")


def test_pages_of_tokens_turn_forwards_and_back(browser: Browser) -> None:
    spans = tokens(browser)
    where = TEXT.format("#tokens .grow")
    assert browser.run(f"{spans}.length") == 1000
    assert browser.run(where) == "rollout 1 of 5, tokens 1–1000 of 1500"
    press = "document.dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    browser.run(press % "ArrowRight")
    browser.wait(f"{where} === 'rollouts 1–5 of 5'")
    assert browser.run(f"{spans}.length") == 511
    assert (
        browser.run("document.querySelectorAll('#tokens .dropped').length") == 1
    )  # of rollout 1; rollout 3 has no token
    assert browser.run(
        "[...document.querySelectorAll('#tokens button')].find((b) => b.textContent === 'next →').disabled"
    )
    browser.run(press % "ArrowLeft")
    browser.wait(f"{where} === 'rollout 1 of 5, tokens 1–1000 of 1500'")
    browser.run(press % "ArrowLeft")
    browser.wait("document.querySelector('#tokens input[type=number]').value === '1'")
    assert browser.run(where) == "rollouts 1–5 of 5"
    assert browser.run(f"[{spans}.length, {spans}[0].textContent.slice(-4)]") == [1000, "1511"]


def test_colours_and_the_tooltip_say_what_was_recorded(browser: Browser) -> None:
    spans = tokens(browser)
    browser.wait("document.querySelectorAll('#tokens .item').length === 5")
    browser.run("[...document.querySelectorAll('#tokens .item')].find((e) => e.dataset.row === '1').click()")
    browser.wait("document.querySelector('#tokens .part h3').textContent.startsWith('Rollout 201')")
    shown = {}
    for mode in ("ratio", "mask", "version", "entropy"):
        browser.run(f"document.querySelector('#tokens button[data-mode={mode}]').click()")
        shown[mode] = browser.run(f"{spans}.slice(0, 2).map((s) => s.style.background)")
    # log ρ is 0.1 at both; the first was dropped; both are one version old, the oldest there is; 0.5 nats of 2 at both.
    strength = (0.1 / 0.6931) ** 0.5 * 0.75
    assert shown["ratio"] == [f"rgb(var(--more)/{strength:.2f})"] * 2
    assert shown["mask"] == ["color-mix(in srgb, var(--bad) 70%, transparent)", ""]
    assert shown["version"] == ["color-mix(in srgb, var(--s4) 70%, transparent)"] * 2
    assert shown["entropy"] == ["color-mix(in srgb, var(--s3) 18%, transparent)"] * 2
    browser.mouse("mouseMoved", *middle(browser, f"{spans}[0]"))
    browser.wait("document.querySelector('.tip:not([hidden])')")
    told = browser.run(TEXT.format(".tip"))
    for part in (
        "position 0 of rollout 201",
        "sampler q0.36788 (log -1)",
        "trainer o0.40657 (log -0.9)",
        "ρ = o/q1.1052",
        "version1 (1 behind)",
        "entropy0.5 nats",
        "dropped by a mask",
    ):
        assert part in told


def test_new_steps_are_followed(browser: Browser, root: Path) -> None:
    tokens(browser)
    browser.run("document.querySelector('#tokens .step input[type=checkbox]').click()")
    step_file(root / "first", 3, (2,))
    with (root / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31}\n')
    browser.wait("document.querySelector('#tokens input[type=number]').value === '3'")
    (root / "first" / "rollouts" / "step_000004.parquet").write_bytes(b"PAR1")
    with (root / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 32}\n')
    browser.wait(
        "document.querySelector('#tokens .problem')?.textContent.startsWith('step_000004.parquet cannot be read')"
    )
    refused = [line for line in browser.errors if "422" in line and "step=4" in line]
    assert refused  # a browser notes on its console what the page shows
    assert browser.errors == refused
    browser.errors.clear()


def test_a_board_that_ends_is_missed_and_one_that_begins_anew_is_read_anew(root: Path) -> None:
    assert PROGRAM is not None

    def begin(port: int) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-m", "rollkeel", "board", str(root), "--port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[1]

    process, url = begin(0)
    try:
        with Browser(PROGRAM) as browser:
            browser.open(url)
            browser.wait(f"{REWARD}?.dataset.lines == 3")
            browser.run("window.before = true")
            process.kill()
            process.wait()
            browser.wait("document.getElementById('live').textContent === 'the board does not answer'")
            process, _ = begin(urlsplit(url).port or 0)
            browser.wait("window.before === undefined && document.querySelectorAll('#runs .name').length === 3")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(url: str, dark: bool) -> None:
    assert PROGRAM is not None
    with Browser(PROGRAM, dark=dark) as browser:
        browser.open(url)
        browser.wait(f"{REWARD}?.dataset.lines == 3")
        page, ink = browser.run(
            "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
        )
        light = [sum(map(int, color[4:-1].split(","))) / 765 for color in (page, ink)]
        assert (light[0] < 0.2 < 0.8 < light[1]) if dark else (light[1] < 0.2 < 0.8 < light[0])
