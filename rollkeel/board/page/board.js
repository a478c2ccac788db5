// What the board shows now, and how it follows the runs: a question twice a second, and curves of the runs that have new rows.
import { Chart, short } from "./chart.js";
import { ask, bullets, button, div, empty, hideTip, make, span } from "./dom.js";
import { TokenView } from "./tokens.js";

const EVERY_MS = 500, JUDGED_MS = 5000, FIRST = 8;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];
const at = (id) => document.getElementById(id);
const state = { runs: [], chosen: new Map(), focus: null, view: "curves", range: null, metrics: [], seen: "", known: "", judged: 0 };
const charts = new Map(); // metric → {chart, visible, data: run → curve, rows: run → rows it is of}
const tokens = new TokenView(at("tokens"), (place) => write({ step: place.step, row: place.row, token: place.token }));

const run = (number) => state.runs.find((one) => one.run === number);
const newest = () => [...state.runs].sort((a, b) => b.changed - a.changed);
function look(number) {
  const slot = state.chosen.get(number);
  return { color: `--s${slot % 8 + 1}`, dash: DASHES[Math.floor(slot / 8) % DASHES.length] };
}

// -- the address: #view=tokens&run=NAME&step=12&row=3&token=0 ------------------------------------------------------------
const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
function write(values) {
  const now = { ...read(), view: state.view, run: run(state.focus)?.name ?? "", ...values };
  history.replaceState(null, "", `#${new URLSearchParams(now)}`);
}

// -- runs ---------------------------------------------------------------------------------------------------------------
function choose(numbers) { // a run that stays chosen keeps its colour, another gets the first that is free
  const kept = new Map([...state.chosen].filter(([number]) => numbers.includes(number)));
  for (const number of numbers) if (!kept.has(number)) {
    const taken = new Set(kept.values());
    let slot = 0;
    while (taken.has(slot)) slot += 1;
    kept.set(number, slot);
  }
  state.chosen = kept;
  list(); fresh();
}

function list() {
  const word = at("find").value.toLowerCase();
  const shown = state.runs.filter((one) => one.name.toLowerCase().includes(word));
  at("chosen").textContent = `${state.chosen.size} of ${state.runs.length}`;
  at("runs").replaceChildren(...shown.map(item));
  if (!state.runs.length) at("runs").append(make("li", { className: "muted" }, "", "No runs yet."));
}

function item(one) {
  const on = state.chosen.has(one.run);
  const others = [...state.chosen.keys()].filter((number) => number !== one.run);
  const press = (event) => { event.stopPropagation(); choose(on ? others : [...others, one.run]); };
  const about = { className: "swatch", ariaPressed: String(on), title: "Show its curves", ariaLabel: `curves of ${one.name}` };
  const swatch = button("", press, about);
  if (on) swatch.style.background = swatch.style.borderColor = `var(${look(one.run).color})`;
  const doctor = { true: span("good", " · healthy"), false: span("bad", " · sick") }[one.doctor] ?? "";
  const named = (key) => key === "reward/mean" ? "reward" : key.split("/")[1];
  const last = Object.entries(one.last).map(([key, value]) => `${named(key)} ${value.toFixed(3)}`);
  const steps = one.steps ? `${one.step}/${one.steps}` : `step ${one.step}`;
  const facts = div("facts", span(`dot ${one.status}`), [steps, ...last.slice(0, 1)].join(" · "), doctor);
  const title = [one.name, one.status, one.detail, ...last].filter(Boolean).join("\n");
  const line = make("li", { className: one.run === state.focus ? "focus" : "", title }, swatch, div("name", one.name), facts);
  line.addEventListener("click", () => focus(one.run));
  return line;
}

function focus(number) {
  state.focus = number; state.known = "";
  list(); judge(); write({ step: "", row: "", token: "" });
  if (number !== null) tokens.open(number).catch(broken);
  if (!state.chosen.has(number)) choose([...state.chosen.keys(), number]);
}

// -- curves -------------------------------------------------------------------------------------------------------------
async function fresh() { // which metrics the chosen runs have, then their curves
  const numbers = [...state.chosen.keys()];
  state.metrics = numbers.length ? await ask("metrics", { run: numbers }) : [];
  arrange();
  if (state.view === "settings") settings();
}

function arrange() {
  const word = at("metric").value.toLowerCase(), rest = at("rest").checked || word;
  const shown = state.metrics.filter((m) => (m.title || rest) && `${m.key} ${m.title ?? ""}`.toLowerCase().includes(word));
  for (const metric of shown) if (!charts.has(metric.key)) {
    const others = (step, from) => charts.forEach((one) => one.visible && one.chart !== from && one.chart.mark(step));
    const chart = new Chart(metric, { zoom, hover: others });
    charts.set(metric.key, { chart, visible: false, data: new Map(), rows: new Map() });
    watcher.observe(chart.element);
  }
  const elements = shown.map((metric) => charts.get(metric.key).chart.element);
  const there = at("charts").children, same = elements.length === there.length && elements.every((one, i) => one === there[i]);
  if (!same) at("charts").replaceChildren(...elements);
  if (!elements.length) at("charts").append(empty(state.chosen.size ? "No metric fits." : "Choose runs on the left."));
  draw(); load();
}

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) charts.get(entry.target.dataset.key).visible = entry.isIntersecting;
  load();
}, { root: document.querySelector("main"), rootMargin: "200px" });

let loading = null, again = false;
async function load() { // curves that are seen and of which there is more than is known: one request at a time
  if (loading) { again = true; return; }
  const stamps = new Map(), keys = new Set();
  for (const [key, one] of charts) if (one.visible && one.chart.element.isConnected)
    for (const number of state.chosen.keys()) if (one.rows.get(number) !== stamp(number)) {
      stamps.set(number, stamp(number));
      keys.add(key);
    }
  if (!keys.size) return;
  const range = state.range ? { from: state.range[0], to: state.range[1] } : {};
  loading = ask("curves", { run: [...stamps.keys()], key: [...keys], points: 600, ...range });
  try {
    const found = await loading;
    for (const key of keys) for (const [number, rows] of stamps) {
      const one = charts.get(key), curve = found[key][number];
      if (curve) one.data.set(number, curve); else one.data.delete(number);
      one.rows.set(number, rows);
    }
    draw(keys);
  } catch (error) { broken(error); return; } finally { loading = null; }
  if (again) { again = false; load(); }
}
const stamp = (number) => `${run(number)?.rows} ${state.range}`;

function draw(keys = [...charts.keys()]) {
  for (const key of keys) {
    const { chart, data, visible } = charts.get(key);
    if (!visible) continue;
    const drawn = [...state.chosen.keys()].filter((number) => data.has(number) && run(number));
    const lines = drawn.map((number) => ({ name: run(number).name, ...look(number), ...data.get(number) }));
    chart.set(lines, state.range, at("smooth").checked);
  }
}

function zoom(range) {
  state.range = range;
  at("whole").hidden = !range;
  if (range) at("whole").textContent = `steps ${Math.ceil(range[0])}–${Math.floor(range[1])} ✕`;
  draw(); load();
}

// -- verdict and settings -----------------------------------------------------------------------------------------------
async function judge() {
  const one = run(state.focus);
  if (!one) return at("verdict").replaceChildren(empty("Choose a run to see what is known of it."));
  const { words, problems, doctor } = await ask("verdict", { run: one.run });
  if (state.focus !== one.run) return;
  const ended = [one.status, one.detail].filter(Boolean).join(": ");
  const parts = [make("h2", {}, one.name), make("p", { className: "muted" }, span(`dot ${one.status}`), ended)];
  parts.push(...words.map((word) => told(word.about, word.tone, word.text, word.more)), told("Doctor", ...opinion(doctor)));
  for (const cause of doctor.causes ?? []) {
    const evidence = `${cause.kind}, score ${cause.score.toFixed(2)}. ${cause.evidence}`;
    const box = told(cause.id, "bad", evidence, [`Do: ${cause.advice}`]);
    for (const { step, id, token } of cause.positions.slice(0, 6)) {
      const go = () => { show("tokens"); tokens.go({ step, id, token }); };
      box.append(button(`step ${step} · rollout ${id} · token ${token}`, go));
    }
    parts.push(box);
  }
  const unread = [...new Set([...problems, ...one.problems, ...(doctor.notes ?? [])])];
  const lists = { Observed: doctor.observed, "Not examined": reasons(doctor.not_examined), "Cannot be read": unread };
  for (const [title, lines] of Object.entries(lists)) if (lines?.length) parts.push(make("h3", {}, title), bullets(lines));
  at("verdict").replaceChildren(...parts);
}

function opinion(doctor) {
  if (doctor.state === "none") return ["plain", "No rollouts were recorded: nothing to examine."];
  if (doctor.state === "waiting") return ["plain waiting", "Examining…"];
  if (doctor.state === "failed") return ["warn", `Could not say: ${doctor.reason}`];
  const part = doctor.part ? ` Of the last ${doctor.part} steps; rollkeel doctor RUN reads all.` : "";
  const size = ` ${doctor.tokens.toLocaleString("en")} tokens, to step ${doctor.newest}.${part}`;
  if (doctor.healthy === null) return ["warn", `Too little could be examined.${size}`];
  if (doctor.healthy) return ["good", `Healthy as far as was examined.${size}`];
  const count = doctor.causes.length === 1 ? "One cause" : `${doctor.causes.length} causes`;
  return ["bad", `${count} found.${size}`];
}

function reasons(missing = {}) { // one line for each reason
  const by = new Map();
  for (const [cause, reason] of Object.entries(missing)) by.set(reason, [...(by.get(reason) ?? []), cause]);
  return [...by].map(([reason, causes]) => `${causes.join(", ")}: ${reason}`);
}

const told = (about, tone, text, more = []) =>
  div(`word ${tone}`, make("b", {}, `${about} `), text, more.length ? bullets(more) : "");

async function settings() {
  const numbers = [...state.chosen.keys()];
  const rows = numbers.length > 1 ? await ask("settings", { run: numbers }) : [];
  const head = make("tr", {}, make("th", {}, "setting"), ...numbers.map((n) => make("th", {}, run(n).name)));
  const body = rows.map((row) => make("tr", {}, make("td", {}, row.key), ...row.values.map((value) => make("td", {}, value))));
  const none = numbers.length > 1 ? "The chosen runs have the same settings." : "Choose two runs to see how they differ.";
  at("settings").replaceChildren(rows.length ? div("panel", make("table", {}, head, ...body)) : empty(none));
}

// -- following ----------------------------------------------------------------------------------------------------------
function show(view) {
  state.view = view;
  hideTip();
  for (const name of ["curves", "tokens", "settings"]) at(name).hidden = name !== view;
  for (const button of document.querySelectorAll("nav button")) button.ariaPressed = String(button.dataset.view === view);
  if (view === "settings") settings().catch(broken);
  tokens.seen = view === "tokens";
  write({});
}

function broken(error) {
  at("live").className = "off";
  at("live").textContent = error.message;
}

async function follow() {
  const { board, where, runs } = await ask("runs", { run: [...state.chosen.keys()].slice(0, FIRST) });
  if (state.board && board !== state.board) location.reload(); // it was started anew and may number the runs otherwise
  state.board = board;
  const text = JSON.stringify(runs), first = !state.seen, changed = text !== state.seen;
  const names = runs.map((one) => one.run).join() !== state.runs.map((one) => one.run).join();
  state.runs = runs; state.seen = text;
  at("where").textContent = where; at("where").title = where;
  const going = runs.filter((one) => one.status === "running").length;
  at("live").className = going ? "on" : "";
  at("live").textContent = going ? `● ${going} running` : "no run goes on";
  if (first) await begin();
  if (names && !first) choose([...state.chosen.keys()].filter(run));
  else if (changed && !first) { list(); if (state.metrics.length) load(); else fresh(); }
  const known = JSON.stringify(run(state.focus) ?? null), waits = document.querySelector("#verdict .waiting");
  if (!state.known || ((waits || known !== state.known) && performance.now() > state.judged + JUDGED_MS)) {
    Object.assign(state, { known, judged: performance.now() });
    await judge();
  }
  if (changed) await tokens.follow();
}

async function begin() { // what the address says, or the newest runs
  const asked = read();
  state.focus = (state.runs.find((one) => one.name === asked.run) ?? newest()[0])?.run ?? null;
  const chosen = newest().slice(0, FIRST).map((one) => one.run);
  if (state.focus !== null && !chosen.includes(state.focus)) chosen.push(state.focus);
  show(["curves", "tokens", "settings"].includes(asked.view) ? asked.view : "curves");
  choose(chosen);
  const place = asked.step ? { step: +asked.step, row: +(asked.row || 0), token: +(asked.token || 0) } : null;
  if (state.focus !== null) await tokens.open(state.focus, place).catch(broken);
}

at("find").addEventListener("input", list);
at("metric").addEventListener("input", arrange);
at("rest").addEventListener("change", arrange);
at("smooth").addEventListener("change", () => draw());
at("whole").addEventListener("click", () => zoom(null));
at("every").addEventListener("click", () => choose(state.runs.map((one) => one.run)));
at("none").addEventListener("click", () => choose([]));
at("some").addEventListener("click", () => choose(newest().slice(0, FIRST).map((one) => one.run)));
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => show(button.dataset.view));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());

(async () => {
  for (;;) {
    if (!document.hidden) await follow().catch(broken);
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
})();
