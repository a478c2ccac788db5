// Recorded tokens of one run: choose a step, choose a rollout, turn pages. Colours say one thing at a time.
import { short } from "./chart.js";
import { ask, hideTip, make, tip } from "./dom.js";

const PAGE = 1000, LISTED = 100;
const FAR = Math.log(2), NATS = 2; // what gets the full colour: ρ of 2 or ½, an entropy of 2 nats
const MODES = {
  ratio: ["log ratio", "sampler likelier", "trainer likelier", "log ρ = log o − log q, full colour at ρ ≥ 2 or ≤ ½"],
  mask: ["mask", "kept", "dropped by a mask", "amber: cut by the clip; pale: written by the environment; grey: not trained on"],
  version: ["version", "fresh", "oldest of the page", "weights that sampled the token, against those that train on it"],
  entropy: ["entropy", "0", "≥ 2 nats", "of the trainer's distribution at the token"],
};
const SORTS = { order: "in order", gap: "largest mean |log ρ|", dropped: "most dropped", reward: "highest reward", length: "longest" };

export class TokenView {
  constructor(root, moved) {
    this.root = root; this.moved = moved; this.run = null; this.steps = []; this.seen = false; this.mode = "ratio"; this.first = 0;
    this.slider = make("input", { type: "range", min: 0, ariaLabel: "step" });
    this.number = make("input", { type: "number", ariaLabel: "step number" });
    this.newest = make("input", { type: "checkbox" });
    this.count = make("span", { className: "muted" });
    this.legend = make("div", { className: "legend" });
    this.sort = make("select", { ariaLabel: "order of rollouts" }, ...Object.entries(SORTS).map(([value, text]) => make("option", { value }, text)));
    this.rows = make("div", { className: "rows" });
    this.parts = make("div");
    this.where = make("span", { className: "muted grow" });
    [this.back, this.on] = [make("button", {}, "← back"), make("button", {}, "next →")];
    this.modes = Object.entries(MODES).map(([mode, [text]]) => {
      const button = make("button", {}, text);
      button.addEventListener("click", () => { this.mode = mode; this.paint(); });
      button.dataset.mode = mode;
      return button;
    });
    root.append(
      make("div", { className: "row step" }, "Step", this.slider, this.number, make("label", {}, this.newest, " follow the newest"), this.count),
      make("div", { className: "row", style: "margin-top:8px" }, make("span", { className: "muted" }, "Colour"), ...this.modes, this.where, this.back, this.on),
      this.legend,
      make("div", { className: "browse" }, make("div", { className: "list" }, this.sort, this.rows), this.parts));
    this.slider.addEventListener("input", () => { this.newest.checked = false; this.go({ step: this.steps[+this.slider.value], row: 0, token: 0 }); });
    this.number.addEventListener("change", () => this.go({ step: this.steps.reduce((a, b) => Math.abs(b - this.number.value) < Math.abs(a - this.number.value) ? b : a, this.steps[0]), row: 0, token: 0 }));
    this.newest.addEventListener("change", () => this.follow());
    this.sort.addEventListener("change", () => { this.first = 0; this.ranking(); });
    this.back.addEventListener("click", () => this.go(this.page && !this.page.first && { ...this.page.start, before: 1 }));
    this.on.addEventListener("click", () => this.go(this.page?.next));
    this.parts.addEventListener("pointermove", (event) => this.hover(event));
    this.parts.addEventListener("pointerleave", hideTip);
    document.addEventListener("keydown", (event) => {
      if (!this.seen || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
      if (event.key === "ArrowRight") this.go(this.page?.next);
      if (event.key === "ArrowLeft") this.go(this.page && !this.page.first && { ...this.page.start, before: 1 });
    });
  }

  async open(run, place = null) {
    Object.assign(this, { run, page: null, step: null, ranked: null, first: 0 });
    this.parts.replaceChildren(); this.rows.replaceChildren();
    this.steps = await ask("steps", { run });
    this.slider.max = Math.max(this.steps.length - 1, 0);
    const empty = !this.steps.length;
    for (const part of [this.slider, this.number, this.back, this.on, this.sort]) part.disabled = empty;
    if (empty) { this.count.textContent = ""; this.where.textContent = ""; this.parts.replaceChildren(make("p", { className: "empty" }, "This run has recorded no rollouts yet.")); return; }
    await this.go(place ?? { step: this.steps.at(-1), row: 0, token: 0 });
  }

  async follow() { // the run goes on
    if (this.run === null) return;
    const steps = await ask("steps", { run: this.run }), before = this.steps.at(-1);
    if (!this.steps.length) { if (steps.length) await this.open(this.run); return; }
    this.steps = steps; this.slider.max = steps.length - 1; this.slider.value = steps.indexOf(this.step);
    this.total();
    if (this.newest.checked && steps.at(-1) !== this.step) await this.go({ step: steps.at(-1), row: 0, token: 0 });
  }

  // to {step, row, token}, or {step, id, token} of a rollout; the last call wins
  async go(place) {
    if (!place) return;
    const turn = this.turn = (this.turn ?? 0) + 1, started = performance.now();
    const error = (caught) => { if (turn === this.turn) { this.page = null; this.parts.replaceChildren(make("p", { className: "problem" }, caught.message)); } };
    const begin = { ...place, token: place.id === undefined ? place.token : Math.max(place.token - 200, 0) };
    const found = await ask("tokens", { run: this.run, count: PAGE, ...begin }).catch(error);
    if (turn !== this.turn) return;
    const step = found?.start.step ?? place.step, other = step !== this.step;
    this.step = step;
    this.slider.value = this.steps.indexOf(step); this.number.value = step;
    if (found) {
      this.page = found; this.target = place.id === undefined ? null : place;
      this.paint();
      this.root.dataset.drawn = `${performance.now() - started}`; // for whoever measures
      this.moved(found.start);
    }
    if (other || !this.ranked) { this.first = 0; await this.ranking(); } else this.select();
  }

  async ranking() {
    const step = this.step;
    this.ranked = await ask("rollouts", { run: this.run, step, sort: this.sort.value, first: this.first, count: LISTED }).catch((caught) => { this.rows.replaceChildren(make("p", { className: "problem" }, caught.message)); return null; });
    if (!this.ranked || step !== this.step) return;
    const more = (text, first) => { const button = make("button", {}, text); button.addEventListener("click", () => { this.first = first; this.ranking(); }); return button; };
    const items = this.ranked.rollouts.map((one) => {
      const facts = [one.reward === null ? "not graded" : `reward ${short(one.reward)}`, `${one.length} tokens`, one.gap === null ? "not trained on" : `|log ρ| ${short(one.gap, 2)}`];
      if (one.dropped) facts.push(`${short(100 * one.dropped, 2)} % dropped`);
      const button = make("button", { className: "item" }, make("b", {}, make("span", { className: "id" }, `id ${one.id}`), `group ${one.group ?? "?"}, member ${one.member ?? "?"}`), make("span", {}, facts.join(" · ")));
      button.dataset.row = one.row;
      button.addEventListener("click", () => this.go({ step: this.step, row: one.row, token: 0 }));
      return button;
    });
    this.rows.replaceChildren(
      this.first ? more("… before", Math.max(this.first - LISTED, 0)) : "", ...items,
      this.first + LISTED < this.ranked.count ? more(`… ${this.ranked.count - this.first - LISTED} more`, this.first + LISTED) : "");
    this.total(); this.select();
  }

  total() {
    const size = this.ranked ? ` · ${this.ranked.count.toLocaleString("en")} rollouts, ${this.ranked.tokens.toLocaleString("en")} tokens` : "";
    this.count.textContent = `of ${this.steps.length.toLocaleString("en")} recorded${size}`;
  }

  select() {
    const shown = new Set(this.page?.parts.map((part) => String(part.row)));
    for (const button of this.rows.children) button.classList.toggle("focus", shown.has(button.dataset.row));
  }

  paint() {
    for (const button of this.modes) button.classList.toggle("on", button.dataset.mode === this.mode);
    if (!this.page) return;
    const { parts, rows } = this.page;
    this.oldest = Math.max(1, ...parts.flatMap((part) => part.versions ? part.versions.map((v) => (part.train_version ?? v) - v) : []));
    this.back.disabled = this.page.first; this.on.disabled = !this.page.next;
    const [, low, high, about] = MODES[this.mode];
    const scale = make("span", { className: "scale" });
    const full = (name) => `rgb(var(${name})/.75)`, faint = (name) => `rgb(var(${name})/.34)`;
    scale.style.background = this.mode === "ratio" ? `linear-gradient(90deg, ${full("--less")}, ${faint("--less")} 25%, transparent 50%, ${faint("--more")} 75%, ${full("--more")})`
      : `linear-gradient(90deg, transparent, color-mix(in srgb, var(${{ mask: "--bad", version: "--s4", entropy: "--s3" }[this.mode]}) 70%, transparent))`;
    this.legend.replaceChildren(low, scale, high, ` — ${about}. `, make("s", {}, "Struck through"), ": dropped by a mask.");
    const first = parts[0], last = parts.at(-1);
    this.where.textContent = !first ? "no rollouts in this step" : parts.length > 1 ? `rollouts ${first.row + 1}–${last.row + 1} of ${rows}`
      : `rollout ${first.row + 1} of ${rows}, tokens ${first.start + 1}–${first.start + first.token_ids.length} of ${first.length}`;
    this.parts.replaceChildren(...parts.map((part, at) => this.part(part, at)));
    this.parts.querySelector(".target")?.scrollIntoView({ block: "center" });
  }

  part(part, at) {
    const reward = part.reward === null || part.reward === undefined ? "not graded" : `reward ${short(part.reward)}`;
    const range = part.token_ids.length < part.length ? `tokens ${part.start + 1}–${part.start + part.token_ids.length} of ${part.length}` : `${part.length} tokens`;
    const facts = [`group ${part.group}, member ${part.member}`, reward, part.status, range, part.train_logprobs ? "" : "not trained on"].filter(Boolean).join(" · ");
    const box = make("div", { className: "tokens" });
    part.token_ids.forEach((_, i) => {
      const span = make("span", {}, part.texts[i]);
      span.dataset.part = at; span.dataset.i = i;
      if (part.keep?.[i] === false) span.classList.add("dropped");
      if (part.sampled?.[i] === false) span.classList.add("foreign");
      if (this.target && part.id === this.target.id && part.start + i === this.target.token) span.classList.add("target");
      const color = this.color(part, i);
      if (color) span.style.background = color;
      box.append(span);
    });
    const article = make("article", { className: "panel part" }, make("h3", {}, `Rollout ${part.id} `, make("span", { className: "muted" }, facts)));
    const same = at > 0 && this.page.parts[at - 1].group === part.group; // which has shown it
    if (part.prompt_text && !same) article.append(make("div", { className: "prompt" }, part.prompt_text));
    article.append(box);
    const more = [!same && part.answer && `gold answer: ${part.answer}`, part.detail && `grader: ${part.detail}`].filter(Boolean).join(" · ");
    if (more) article.append(make("p", { className: "muted" }, more));
    return article;
  }

  color(part, i) {
    const mix = (name, share) => share > 0.02 ? `color-mix(in srgb, var(${name}) ${Math.round(70 * Math.min(share, 1))}%, transparent)` : "";
    if (part.sampled?.[i] === false) return "";
    if (this.mode === "ratio") {
      const gap = ratio(part, i);
      const strength = gap === null ? 0 : Math.min(Math.abs(gap) / FAR, 1) ** 0.5;
      return strength < 0.02 ? "" : `rgb(var(${gap > 0 ? "--more" : "--less"})/${(strength * 0.75).toFixed(2)})`;
    }
    if (this.mode === "mask") return part.keep?.[i] === false ? mix("--bad", 1) : part.cut?.[i] ? mix("--warn", 0.8) : part.train_logprobs ? "" : mix("--muted", 0.3);
    if (this.mode === "version") return part.versions && part.train_version !== null ? mix("--s4", ((part.train_version ?? part.versions[i]) - part.versions[i]) / this.oldest) : "";
    return typeof part.entropy?.[i] === "number" ? mix("--s3", part.entropy[i] / NATS) : "";
  }

  hover(event) {
    const { part: at, i } = event.target.dataset, part = this.page?.parts[at];
    if (i === undefined || !part) return hideTip();
    const line = (name, value) => value === null || value === undefined ? "" : make("div", {}, make("span", {}, name), make("span", {}, value));
    const [q, o, gap] = [part.logprobs?.[i], part.train_logprobs?.[i], ratio(part, i)];
    const both = (log) => typeof log === "number" ? `${short(Math.exp(log), 5)} (log ${short(log, 5)})` : null;
    const lag = part.versions && typeof part.train_version === "number" ? ` (${part.train_version - part.versions[i]} behind)` : "";
    tip(event, make("b", {}, part.texts[i].trim() || "␣"), make("div", { className: "muted" }, `id ${part.token_ids[i]}, position ${part.start + +i} of rollout ${part.id}`),
      part.sampled?.[i] === false ? "written by the environment" : "",
      line("sampler q", both(q)), line("trainer o", both(o)), line("ρ = o/q", gap === null ? null : `${short(Math.exp(gap), 5)} (log ${short(gap, 3)})`),
      line("version", part.versions ? `${part.versions[i]}${lag}` : null), line("entropy", typeof part.entropy?.[i] === "number" ? `${short(part.entropy[i])} nats` : null),
      line("advantage", typeof part.advantages?.[i] === "number" ? short(part.advantages[i]) : null),
      part.keep?.[i] === false ? make("div", { className: "problem" }, "dropped by a mask") : "", part.cut?.[i] ? make("div", {}, "cut by the clip") : "");
  }
}

function ratio(part, i) {
  const [q, o] = [part.logprobs?.[i], part.train_logprobs?.[i]];
  return typeof q === "number" && typeof o === "number" ? o - q : null;
}
