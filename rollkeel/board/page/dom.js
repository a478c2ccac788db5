// Elements, the tooltip, and questions to the server. Text of runs becomes text nodes, never markup.
export function make(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const div = (className, ...children) => make("div", { className }, ...children);
export const span = (className, ...children) => make("span", { className }, ...children);
export const empty = (text) => make("p", { className: "empty" }, text);
export const problem = (text) => make("p", { className: "problem" }, text);
export const bullets = (lines) => make("ul", {}, ...lines.map((line) => make("li", {}, line)));

export function button(text, act, props = {}) {
  const element = make("button", props, ...[text].flat());
  element.addEventListener("click", act);
  return element;
}

let box = null;
export function tip(event, ...children) {
  box ??= document.body.appendChild(make("div", { className: "tip", role: "tooltip" }));
  box.replaceChildren(...children.filter((child) => child !== ""));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  box.style.left = `${Math.max(left, 4)}px`;
  box.style.top = `${Math.max(Math.min(event.clientY + 12, innerHeight - height - 6), 4)}px`;
}
export function hideTip() { if (box) box.hidden = true; }

// The answer; throws an Error with the server's line. Values may be lists.
export async function ask(what, values = {}) {
  const pairs = Object.entries(values).flatMap(([name, value]) => [value].flat().map((one) => [name, one]));
  const answer = await fetch(`/api/${what}?${new URLSearchParams(pairs)}`).catch(() => null);
  if (!answer) throw new Error("the board does not answer");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}
