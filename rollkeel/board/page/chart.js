// One metric of several runs over steps, on a canvas: hover, zoom, light and dark.
import { div, hideTip, make, span, tip } from "./dom.js";

const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
const MANY = 8; // lines above which the raw values are not drawn behind their means
const LISTED = 12;

export class Chart {
  // hooks: zoom([from, to] or null), hover(step or null, chart)
  constructor(metric, hooks) {
    this.metric = metric; this.hooks = hooks; this.lines = []; this.range = null; this.smooth = true;
    const title = make("h3", { title: metric.meaning }, metric.key, metric.unit ? span("unit", metric.unit) : "");
    this.base = make("canvas", { role: "img", ariaLabel: `${metric.key} over steps` });
    this.over = make("canvas", { ariaHidden: "true" });
    this.plot = div("plot", this.base, this.over);
    this.element = make("figure", {}, title, this.plot);
    this.element.dataset.key = metric.key;
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.move(event));
    this.plot.addEventListener("pointerleave", () => {
      if (this.from !== undefined) return; // a drag may leave the chart
      hideTip(); this.mark(null); this.hooks.hover(null, this);
    });
    this.plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.from = event.offsetX;
      this.plot.setPointerCapture(event.pointerId);
    });
    this.plot.addEventListener("pointerup", (event) => this.release(event));
    this.plot.addEventListener("pointercancel", () => { this.from = undefined; this.mark(null); });
    this.plot.addEventListener("dblclick", () => this.hooks.zoom(null));
  }

  // lines: [{name, color, dash, x, y, m}], in the metric's own unit
  set(lines, range, smooth) {
    this.lines = lines; this.range = range; this.smooth = smooth;
    this.element.dataset.lines = lines.length; this.element.dataset.last = Math.max(...lines.map((line) => line.x.at(-1) ?? 0));
    this.draw();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (!width) return;
    this.width = width; this.height = height;
    const context = clear(this.base, width, height);
    clear(this.over, width, height);
    const css = getComputedStyle(document.documentElement);
    this.colors = (name) => name.startsWith("--") ? css.getPropertyValue(name).trim() : name;
    this.bounds();
    this.axes(context);
    context.save();
    context.beginPath(); context.rect(LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM); context.clip();
    for (const line of this.lines) {
      const mean = this.smooth && line.x.length >= 25;
      if (mean && this.lines.length <= MANY) this.stroke(context, line, line.y, 0.8, 0.35);
      this.stroke(context, line, mean ? line.m : line.y, 1.6, 1);
    }
    context.restore();
    if (!this.lines.some((line) => line.x.length)) {
      context.fillStyle = this.colors("--muted"); context.textAlign = "center";
      context.fillText("no values in the chosen runs", (LEFT + width) / 2, height / 2);
    }
  }

  bounds() {
    const [scale, least] = [this.metric.scale ?? 1, (this.metric.least ?? 0) / (this.metric.scale ?? 1)];
    let [x0, x1, y0, y1, positive] = [Infinity, -Infinity, Infinity, -Infinity, Infinity];
    for (const line of this.lines) line.x.forEach((x, i) => {
      if (this.range && (x < this.range[0] || x > this.range[1])) return;
      const y = line.y[i];
      x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
      if (y > 0) positive = Math.min(positive, y);
    });
    if (this.range) [x0, x1] = this.range;
    if (!isFinite(x0)) [x0, x1] = [0, 1];
    if (!isFinite(y0)) [y0, y1] = [0, 1];
    this.log = Boolean(this.metric.log) && y1 > 20 * positive;
    if (this.log) [y0, y1] = [Math.log10(positive), Math.log10(y1)];
    else if (y1 - y0 < least) { // differences far below it are nothing to look at
      const bottom = (y0 + y1 - least) / 2;
      const low = y0 >= 0 && bottom < 0 ? 0 : bottom;
      [y0, y1] = [low, low + least];
    }
    if (y1 === y0) [y0, y1] = y0 ? [y0 - Math.abs(y0) * 0.1, y1 + Math.abs(y1) * 0.1] : [-0.5, 0.5];
    const pad = (y1 - y0) * 0.05;
    Object.assign(this, { x0, x1: x1 === x0 ? x0 + 1 : x1, y0: y0 - pad, y1: y1 + pad, scale });
  }

  px(x) { return LEFT + (x - this.x0) / (this.x1 - this.x0) * (this.width - LEFT - RIGHT); }
  py(y) {
    const at = this.log ? Math.log10(Math.max(y, 1e-300)) : y;
    return this.height - BOTTOM - (at - this.y0) / (this.y1 - this.y0) * (this.height - TOP - BOTTOM);
  }
  step(px) { return this.x0 + (px - LEFT) / (this.width - LEFT - RIGHT) * (this.x1 - this.x0); }

  stroke(context, line, values, width, alpha) {
    context.strokeStyle = context.fillStyle = this.colors(line.color);
    context.lineWidth = width; context.globalAlpha = alpha; context.lineJoin = "round";
    context.setLineDash(line.dash);
    context.beginPath();
    line.x.forEach((x, i) => context.lineTo(this.px(x), this.py(values[i])));
    context.stroke();
    context.setLineDash([]);
    if (line.x.length < 3) line.x.forEach((x, i) => this.dot(context, x, values[i]));
    context.globalAlpha = 1;
  }

  dot(context, x, y) {
    context.beginPath();
    context.arc(this.px(x), this.py(y), 3, 0, 7);
    context.fill();
  }

  axes(context) {
    const ink = this.colors("--muted");
    context.font = "11px system-ui, sans-serif"; context.fillStyle = ink; context.lineWidth = 1;
    const line = (...ends) => stroke(context, ...ends);
    context.textAlign = "right"; context.textBaseline = "middle";
    context.strokeStyle = this.colors("--grid");
    const labels = this.log ? decades(this.y0, this.y1).map((at) => 10 ** at * this.scale)
      : ticks(this.y0 * this.scale, this.y1 * this.scale, 6);
    for (const label of labels) {
      const y = this.py(label / this.scale);
      context.globalAlpha = 0.35;
      line(LEFT, y, this.width - RIGHT, y);
      context.globalAlpha = 1;
      context.fillText(short(label), LEFT - 6, y);
    }
    context.textAlign = "center"; context.textBaseline = "top";
    for (const at of ticks(this.x0, this.x1, Math.max(Math.floor(this.width / 60), 2)).filter((v) => Number.isInteger(v)))
      context.fillText(short(at), Math.min(this.px(at), this.width - 16), this.height - BOTTOM + 5);
    line(LEFT, TOP, LEFT, this.height - BOTTOM);
    line(LEFT, this.height - BOTTOM, this.width - RIGHT, this.height - BOTTOM);
  }

  move(event) {
    const at = this.step(event.offsetX);
    if (this.from !== undefined) { this.mark(at, [this.from, event.offsetX]); hideTip(); return; }
    const near = this.nearest(at);
    if (near === null) return;
    this.hooks.hover(near, this);
    this.mark(near);
    const found = this.at(near).sort((a, b) => b.value - a.value);
    if (!found.length) return hideTip();
    const far = (one) => Math.abs(this.py(one.value) - event.offsetY);
    const closest = found.reduce((a, b) => far(a) <= far(b) ? a : b);
    const from = Math.max(Math.min(found.indexOf(closest) - LISTED / 2, found.length - LISTED), 0);
    const rows = found.slice(from, from + LISTED).map((one) => {
      const swatch = make("i"); swatch.style.background = this.colors(one.line.color);
      const value = short(one.value * this.scale, 5);
      return div(one === closest ? "near" : "", span("", swatch, one.line.name), span("", value));
    });
    const more = found.length - rows.length;
    tip(event, make("b", {}, `step ${near}`), ...rows, more > 0 ? div("muted", `${more} more`) : "");
  }

  nearest(at) { // the step of a value of some line that is nearest
    const near = this.lines.flatMap((line) => around(line.x, at).map((i) => line.x[i]));
    return closest(near.filter((x) => x >= this.x0 && x <= this.x1), at);
  }

  at(step) { // the values of the lines at the step; of a line that was thinned, the nearest one
    const far = (this.x1 - this.x0) / 100;
    return this.lines.flatMap((line) => {
      const near = around(line.x, step).filter((i) => Math.abs(line.x[i] - step) <= far);
      const x = closest(near.map((i) => line.x[i]), step);
      return near.filter((i) => line.x[i] === x).slice(0, 1).map((i) => ({ line, value: line.y[i] }));
    });
  }

  mark(step, drag) { // a line at the step, or the stretch that is dragged over
    const context = clear(this.over, this.width, this.height);
    if (drag) {
      context.fillStyle = this.colors("--accent"); context.globalAlpha = 0.2;
      context.fillRect(Math.min(...drag), TOP, Math.abs(drag[0] - drag[1]), this.height - TOP - BOTTOM);
    } else if (step !== null && step >= this.x0 && step <= this.x1) {
      context.strokeStyle = this.colors("--muted");
      stroke(context, this.px(step), TOP, this.px(step), this.height - BOTTOM);
      for (const { line, value } of this.at(step)) {
        context.fillStyle = this.colors(line.color);
        this.dot(context, step, value);
      }
    }
  }

  release(event) {
    const from = this.from;
    this.from = undefined; this.mark(null);
    if (from === undefined || Math.abs(event.offsetX - from) < 6) return;
    const ends = [from, event.offsetX].map((px) => Math.min(Math.max(this.step(px), this.x0), this.x1)).sort((a, b) => a - b);
    if (ends[1] > ends[0]) this.hooks.zoom(ends);
  }
}

function clear(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  const [wide, high] = [width, height].map((size) => Math.round(size * ratio));
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function stroke(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function around(x, at) { // the places of the last value below `at` and of the first that is not
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1; else high = middle;
  }
  return [low - 1, low].filter((i) => i >= 0 && i < x.length);
}

const closest = (values, at) => values.reduce((a, b) => a !== null && Math.abs(a - at) <= Math.abs(b - at) ? a : b, null);

export function ticks(low, high, count) { // round numbers from `low` to `high`, about `count`
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(last - first + 1, 0) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function decades(low, high) { // exponents of the labels of a logarithmic axis
  const whole = ticks(low, high, Math.min(4, Math.max(Math.floor(high - low), 1))).filter(Number.isInteger);
  if (high - low > 2) return whole;
  const near = [0, 1, 2].flatMap((d) => [1, 2, 5].map((n) => Math.floor(low) + d + Math.log10(n)));
  return near.filter((at) => at >= low && at <= high);
}

export function short(value, digits = 4) { // as a person writes it
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits > 4 ? 3 : 1).replace(/\.?0*e\+?/, "e");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 8, useGrouping: size >= 1e4 });
}
