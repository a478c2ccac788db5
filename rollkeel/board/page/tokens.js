// Recorded tokens of one run: choose a step, choose a rollout, turn pages. Colours say one thing at a time.
import { short } from "./chart.js";
import { ask, button, div, empty, hideTip, make, problem, span, tip } from "./dom.js";

const PAGE = 1000, LISTED = 100, BEFORE = 200; // tokens, rollouts, tokens shown before one that was pointed at
const FAR = Math.log(2), NATS = 2; // what gets the full colour: ρ of 2 or ½, an entropy of 2 nats
const MODES = { // name, ends of the scale, what it shows, colour
  ratio: ["log ratio", "sampler likelier", "trainer likelier", "log ρ = log o − log q, full colour at ρ ≥ 2 or ≤ ½"],
  mask: ["mask", "kept", "dropped", "amber: clipped; pale: the environment's; grey: not trained on", "--bad"],
  version: ["version", "fresh", "oldest of the page", "weights that sampled, against those that train", "--s4"],
  entropy: ["entropy", "0", "≥ 2 nats", "of the trainer's distribution at the token", "--s3"],
};
const SORTS = {
  order: "in order", gap: "largest mean |log ρ|", dropped: "most dropped", reward: "highest reward", length: "longest",
};
const isNumber = (value) => typeof value === "number";
const count = (value) => value.toLocaleString("en");
const reward = (one) => isNumber(one.reward) ? `reward ${short(one.reward)}` : "not graded";

export class TokenView {
  constructor(root, moved) {
    Object.assign(this, { root, moved, run: null, steps: [], seen: false, mode: "ratio", first: 0, turn: 0 });
    this.slider = make("input", { type: "range", min: 0, ariaLabel: "step" });
    this.number = make("input", { type: "number", ariaLabel: "step number" });
    this.newest = make("input", { type: "checkbox" });
    this.count = span("muted");
    this.legend = div("legend");
    const sorts = Object.entries(SORTS).map(([value, text]) => make("option", { value }, text));
    this.sort = make("select", { ariaLabel: "order of rollouts" }, ...sorts);
    this.rows = div("rows");
    this.parts = make("div");
    this.where = span("muted grow");
    this.back = button("← back", () => this.turnBack());
    this.on = button("next →", () => this.go(this.page?.next));
    this.modes = Object.entries(MODES).map(([mode, [text]]) => button(text, () => { this.mode = mode; this.paint(); }));
    this.modes.forEach((one, i) => { one.dataset.mode = Object.keys(MODES)[i]; });
    const follow = make("label", {}, this.newest, " follow the newest");
    root.append(
      div("row step", "Step", this.slider, this.number, follow, this.count),
      div("row", span("muted", "Colour"), ...this.modes, this.where, this.back, this.on),
      this.legend, div("browse", div("list", this.sort, this.rows), this.parts));
    this.slider.addEventListener("input", () => { this.newest.checked = false; this.begin(this.steps[+this.slider.value]); });
    this.number.addEventListener("change", () => {
      const far = (step) => Math.abs(step - this.number.value);
      this.begin(this.steps.reduce((a, b) => far(b) < far(a) ? b : a));
    });
    this.newest.addEventListener("change", () => this.follow());
    this.sort.addEventListener("change", () => { this.first = 0; this.ranking(); });
    this.parts.addEventListener("pointermove", (event) => this.hover(event));
    this.parts.addEventListener("pointerleave", hideTip);
    document.addEventListener("keydown", (event) => {
      if (!this.seen || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
      if (event.key === "ArrowRight") this.go(this.page?.next);
      if (event.key === "ArrowLeft") this.turnBack();
    });
  }

  async open(run, place = null) {
    Object.assign(this, { run, page: null, step: null, ranked: null, first: 0 });
    this.turn += 1;
    this.parts.replaceChildren();
    this.rows.replaceChildren();
    const steps = await ask("steps", { run });
    if (run !== this.run) return;
    this.steps = steps;
    this.slider.max = Math.max(steps.length - 1, 0);
    for (const part of [this.slider, this.number, this.back, this.on, this.sort]) part.disabled = !steps.length;
    if (steps.length) return this.go(place ?? { step: steps.at(-1), row: 0, token: 0 });
    this.count.textContent = this.where.textContent = "";
    this.parts.replaceChildren(empty("This run has recorded no rollouts yet."));
  }

  async follow() { // the run goes on
    if (this.run === null) return;
    const run = this.run, steps = await ask("steps", { run });
    if (run !== this.run || !steps.length) return;
    if (!this.steps.length) return this.open(run);
    this.steps = steps;
    this.slider.max = steps.length - 1;
    this.slider.value = steps.indexOf(this.step);
    this.total();
    if (this.newest.checked && steps.at(-1) !== this.step) await this.begin(steps.at(-1));
  }

  begin(step) { return this.go({ step, row: 0, token: 0 }); }
  turnBack() { return this.go(this.page && !this.page.first && { ...this.page.start, before: 1 }); }

  // to {step, row, token}, or {step, id, token} of a rollout; the last call wins
  async go(place) {
    if (!place) return;
    const turn = this.turn += 1, began = performance.now();
    const target = place.id === undefined ? null : place;
    const start = target ? { ...place, token: Math.max(place.token - BEFORE, 0) } : place;
    let found = null, reason = null;
    try { found = await ask("tokens", { run: this.run, count: PAGE, ...start }); } catch (error) { reason = error.message; }
    if (turn !== this.turn) return;
    const step = found?.start.step ?? place.step, other = step !== this.step;
    Object.assign(this, { step, page: found, target });
    this.slider.value = this.steps.indexOf(step);
    this.number.value = step;
    if (found) {
      this.paint();
      this.root.dataset.drawn = `${performance.now() - began}`; // for whoever measures
      this.moved(found.start);
    } else this.parts.replaceChildren(problem(reason));
    if (other) this.first = 0;
    if (other || !this.ranked) await this.ranking(); else this.select();
  }

  async ranking() {
    const { run, step, first } = this;
    const asked = { run, step, sort: this.sort.value, first, count: LISTED };
    let ranked = null, reason = null;
    try { ranked = await ask("rollouts", asked); } catch (error) { reason = error.message; }
    if (run !== this.run || step !== this.step) return;
    this.ranked = ranked;
    this.total();
    if (!ranked) return this.rows.replaceChildren(problem(reason));
    const from = (text, place) => button(text, () => { this.first = place; this.ranking(); });
    const left = ranked.count - first - LISTED;
    const before = first ? [from("… before", Math.max(first - LISTED, 0))] : [];
    const after = left > 0 ? [from(`… ${count(left)} more`, first + LISTED)] : [];
    this.rows.replaceChildren(...before, ...ranked.rollouts.map((one) => this.item(one)), ...after);
    this.select();
  }

  item(one) {
    const facts = [reward(one), `${one.length} tokens`, isNumber(one.gap) ? `|log ρ| ${short(one.gap, 2)}` : "not trained on"];
    if (one.dropped) facts.push(`${short(100 * one.dropped, 2)}% dropped`);
    const name = make("b", {}, span("id", `id ${one.id}`), `group ${one.group ?? "?"}, member ${one.member ?? "?"}`);
    const go = () => this.go({ step: this.step, row: one.row, token: 0 });
    const item = button([name, span("", facts.join(" · "))], go, { className: "item" });
    item.dataset.row = one.row;
    return item;
  }

  total() {
    const size = this.ranked ? ` · ${count(this.ranked.count)} rollouts, ${count(this.ranked.tokens)} tokens` : "";
    this.count.textContent = `of ${count(this.steps.length)} recorded${size}`;
  }

  select() {
    const shown = new Set(this.page?.parts.map((part) => String(part.row)));
    for (const item of this.rows.children) item.classList.toggle("focus", shown.has(item.dataset.row));
  }

  paint() {
    for (const one of this.modes) one.classList.toggle("on", one.dataset.mode === this.mode);
    if (!this.page) return;
    const { parts, rows, first, next } = this.page;
    this.oldest = Math.max(1, ...parts.flatMap((part) => part.versions?.map((_, i) => lag(part, i) ?? 0) ?? []));
    this.back.disabled = first;
    this.on.disabled = !next;
    this.explain();
    const [one, last] = [parts[0], parts.at(-1)];
    const several = parts.length > 1 && `rollouts ${one.row + 1}–${last.row + 1} of ${rows}`;
    this.where.textContent = several || (one ? `rollout ${one.row + 1} of ${rows}, ${range(one)}` : "no rollouts in this step");
    this.parts.replaceChildren(...parts.map((part, at) => this.part(part, at)));
    this.parts.querySelector(".target")?.scrollIntoView({ block: "center" });
  }

  explain() {
    const [, low, high, about, color] = MODES[this.mode];
    const [less, more] = ["--less", "--more"].map((name) => (share) => `rgb(var(${name})/${share})`);
    const scale = span("scale");
    scale.style.background = color ? `linear-gradient(90deg, transparent, ${mix(color, 1)})`
      : `linear-gradient(90deg, ${less(0.75)}, ${less(0.34)} 25%, transparent 50%, ${more(0.34)} 75%, ${more(0.75)})`;
    this.legend.replaceChildren(low, scale, high, ` — ${about}. `, make("s", {}, "Struck through"), ": dropped by a mask.");
  }

  part(part, at) {
    const facts = [`group ${part.group}, member ${part.member}`, reward(part), part.status, range(part)];
    if (!part.train_logprobs) facts.push("not trained on");
    const title = make("h3", {}, `Rollout ${part.id} `, span("muted", facts.filter(Boolean).join(" · ")));
    const article = make("article", { className: "panel part" }, title);
    const same = at > 0 && this.page.parts[at - 1].group === part.group; // which has shown it
    if (part.prompt_text && !same) article.append(div("prompt", part.prompt_text));
    const box = div("tokens");
    part.texts.forEach((text, i) => {
      const token = span("", text);
      Object.assign(token.dataset, { part: at, i });
      if (part.keep?.[i] === false) token.classList.add("dropped");
      if (part.sampled?.[i] === false) token.classList.add("foreign");
      if (part.id === this.target?.id && part.start + i === this.target.token) token.classList.add("target");
      const color = this.color(part, i);
      if (color) token.style.background = color;
      box.append(token);
    });
    article.append(box);
    const more = [!same && part.answer && `gold answer: ${part.answer}`, part.detail && `grader: ${part.detail}`];
    if (more.some(Boolean)) article.append(make("p", { className: "muted" }, more.filter(Boolean).join(" · ")));
    return article;
  }

  color(part, i) {
    if (part.sampled?.[i] === false) return "";
    if (this.mode === "version") return mix("--s4", (lag(part, i) ?? 0) / this.oldest);
    if (this.mode === "entropy") return mix("--s3", (part.entropy?.[i] ?? 0) / NATS);
    if (this.mode === "mask") {
      if (part.keep?.[i] === false) return mix("--bad", 1);
      if (part.cut?.[i]) return mix("--warn", 0.8);
      return part.train_logprobs ? "" : mix("--muted", 0.3);
    }
    const gap = ratio(part, i), strength = Math.min(Math.abs(gap ?? 0) / FAR, 1) ** 0.5;
    return strength < 0.02 ? "" : `rgb(var(${gap > 0 ? "--more" : "--less"})/${(strength * 0.75).toFixed(2)})`;
  }

  hover(event) {
    const { part: at, i } = event.target.dataset, part = this.page?.parts[at];
    if (i === undefined || !part) return hideTip();
    const line = (name, value) => value ? div("", span("", name), span("", value)) : "";
    const each = (name, tell) => isNumber(part[name]?.[i]) ? tell(part[name][i]) : "";
    const both = (log) => `${short(Math.exp(log), 5)} (log ${short(log, 5)})`;
    const gap = ratio(part, i), behind = lag(part, i);
    tip(event, make("b", {}, part.texts[i].trim() || "␣"),
      div("muted", `id ${part.token_ids[i]}, position ${part.start + +i} of rollout ${part.id}`),
      part.sampled?.[i] === false ? div("", "written by the environment") : "",
      line("sampler q", each("logprobs", both)),
      line("trainer o", each("train_logprobs", both)),
      line("ρ = o/q", gap === null ? "" : `${short(Math.exp(gap), 5)} (log ${short(gap, 3)})`),
      line("version", each("versions", (version) => behind === null ? `${version}` : `${version} (${behind} behind)`)),
      line("entropy", each("entropy", (nats) => `${short(nats)} nats`)),
      line("advantage", each("advantages", (value) => short(value))),
      part.keep?.[i] === false ? problem("dropped by a mask") : "", part.cut?.[i] ? div("", "cut by the clip") : "");
  }
}

const mix = (name, share) =>
  share > 0.02 ? `color-mix(in srgb, var(${name}) ${Math.round(70 * Math.min(share, 1))}%, transparent)` : "";

function range(part) { // which of a rollout's tokens a part has
  const shown = part.texts.length;
  return shown < part.length ? `tokens ${part.start + 1}–${part.start + shown} of ${part.length}` : `${part.length} tokens`;
}

function ratio(part, i) {
  const [q, o] = [part.logprobs?.[i], part.train_logprobs?.[i]];
  return isNumber(q) && isNumber(o) ? o - q : null;
}

function lag(part, i) { // versions between the weights that sampled the token and those that train on it
  const version = part.versions?.[i];
  return isNumber(version) && isNumber(part.train_version) ? part.train_version - version : null;
}
