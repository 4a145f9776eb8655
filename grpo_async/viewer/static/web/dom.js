/* Elements, text and numbers. Text of models, data and tools only ever becomes text nodes, never markup. */

/** An element: h("a", {href, class, on: {click}}, "text", child, [children]). null and false children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name === "on") {
      Object.entries(value).forEach(([event, listener]) => element.addEventListener(event, listener));
    } else if (name === "vars") {
      Object.entries(value).forEach(([variable, set]) => element.style.setProperty(variable, set));
    } else if (["value", "checked", "disabled", "open"].includes(name)) {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  return append(element, children);
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : visible(child));
    }
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** As `fill`, where they are not the children already: an element that stays keeps its focus and what is folded in it. */
export function arrange(element, wanted) {
  if (wanted.length !== element.children.length || wanted.some((each, at) => each !== element.children[at])) {
    element.replaceChildren(...wanted);
  }
}

/** Gives keys that move the focus: j and ArrowDown to the next of these links, k and ArrowUp to the previous one. */
export function movers(place, selector) {
  const move = (by) => () => {
    const links = [...place.querySelectorAll(selector)];
    const at = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
  };
  return { j: move(1), k: move(-1), ArrowDown: move(1), ArrowUp: move(-1) };
}

/** A part of a page that is drawn again only when its data has changed: what is open, focused or selected in it stays. */
export function part(draw, element = h("div", { class: "part" })) {
  let drawn = null;
  const show = (data) => {
    const now = JSON.stringify(data);
    if (now !== drawn) {
      drawn = now;
      fill(element, draw(data, element));
    }
  };
  return { element, show };
}

// -- text and numbers

/** Control characters as pictures and direction overrides as escapes: shown, never obeyed. */
export function visible(text) {
  const hex = (character, digits) => character.charCodeAt(0).toString(16).padStart(digits, "0");
  return String(text)
    .replace(/\r\n/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (found) => String.fromCharCode(0x2400 + found.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(/[\u0080-\u009f]/g, (found) => `\\x${hex(found, 2)}`)
    .replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (found) => `\\u${hex(found, 4)}`);
}

/** Text of unknown origin, on as many lines as it has. */
export function text(content, className = "") {
  return h("span", { class: `said ${className}`.trim(), dir: "auto" }, visible(content));
}

export function oneLine(content, limit = 240) {
  const flat = visible(content).trim().replace(/\s*\n\s*/g, " ↵ ").replace(/\s+/g, " ");
  return flat.length > limit ? `${flat.slice(0, limit - 1)}…` : flat;
}

const isMissing = (value) => value === null || value === undefined || Number.isNaN(value);

/** 0.123456 -> "0.123", 1234567 -> "1,234,567", null -> "–". */
export function number(value, digits = 3) {
  if (isMissing(value)) {
    return "–";
  }
  if (Number.isInteger(value)) {
    return value.toLocaleString("en-US").replace("-", "−");
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return value.toExponential(2).replace("-", "−").replace("e−", "e-");
  }
  if (size !== 0 && size < 0.5 * 10 ** -digits) {
    return String(Number(value.toPrecision(2))).replace("-", "−");
  }
  return value.toFixed(size >= 1000 ? 0 : digits).replace("-", "−");
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function percent(fraction) {
  return isMissing(fraction) ? "–" : `${number(100 * fraction, fraction > 0 && fraction < 0.1 ? 1 : 0)}%`;
}

/** 3, 5 -> "3–5"; 3, 3 -> "3". */
export function span(low, high) {
  return isMissing(low) ? "–" : low === high ? String(low) : `${low}–${high}`;
}

export function range(low, high) {
  return isMissing(low) ? "–" : `${number(low, 2)} – ${number(high, 2)}`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

// -- parts of a page

export function button(label, onClick, props = {}) {
  return h("button", { type: "button", on: { click: onClick }, ...props }, label);
}

export function link(href, ...children) {
  return h("a", { href }, ...children);
}

export function panel(...children) {
  return h("section", { class: "panel" }, ...children);
}

export function heading(title, ...children) {
  return h("div", { class: "row heading" }, h("h1", {}, title), ...children);
}

/** A heading for screen readers, of views whose tab says the same. */
export function hiddenHeading(title) {
  return h("h1", { class: "visually-hidden" }, title);
}

export function spacer() {
  return h("span", { class: "spacer" });
}

export function hint(...children) {
  return h("span", { class: "hint" }, ...children);
}

/** `options`: [value, label] pairs. */
export function select(props, options, value, onChange) {
  const on = { change: (event) => onChange(event.target.value) };
  const element = h("select", { ...props, on }, options.map(([each, label]) => h("option", { value: each }, label)));
  element.value = value;
  return element;
}

export function checkbox(label, checked, onChange, props = {}) {
  const box = h("input", { type: "checkbox", checked, on: { change: (event) => onChange(event.target.checked) }, ...props });
  return h("label", { class: "check" }, box, ` ${label}`);
}

/** A table in a frame that scrolls. `heads`: names of the columns, "#" before those of numbers; null: no head. A cell is what `h` takes
    as children. `isNamed`: the first cell of a row is its name. */
export function table(heads, rows, { label = null, isNamed = false, className = "" } = {}) {
  const numeric = (heads || []).map((name) => (name.startsWith("#") ? "numeric" : null));
  const head = heads && h("tr", {}, heads.map((name, at) => h("th", { scope: "col", class: numeric[at] }, name.replace(/^#/, ""))));
  const cell = (content, at) => (isNamed && at === 0 ? h("th", { scope: "row" }, content) : h("td", { class: numeric[at] }, content));
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: `plain ${className}`.trim(), "aria-label": label },
      head && h("thead", {}, head),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))),
    ),
  );
}

/** A text as it is, any other value as JSON. */
export const textOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** A list of names and values of unknown origin; null where there is none. */
export function named(values, format = textOf) {
  const entries = Object.entries(values || {});
  const pair = ([name, value]) => [h("dt", {}, visible(name)), h("dd", { class: "said" }, visible(format(value) ?? "–"))];
  return entries.length ? h("dl", { class: "named" }, entries.map(pair)) : null;
}

/** [label, value, title] triples as tiles. */
export function statistics(rows) {
  const tile = ([label, value, title]) => h("div", { title }, h("dt", {}, label), h("dd", {}, value));
  return h("dl", { class: "statistics" }, rows.map(tile));
}

const STATUSES = {
  trained: ["good", "used by an optimizer step"],
  filtered: ["", "nothing to learn from: all rewards equal, or none"],
  stale: ["warning", "too old when the trainer needed it, or bound to be"],
  failed: ["bad", "an error, too few rollouts survived, or the update was not finite"],
  cancelled: ["", "the run ended first; a resume issues its prompt again"],
  evaluated: ["info", "held-out prompt: nothing is learned from it"],
  finished: ["good", "ended on its own"],
  truncated: ["warning", "stopped by a limit"],
};

export function badge(status, given = null) {
  const [level, title] = STATUSES[status] || ["", null];
  return h("span", { class: `badge ${given ?? level}`.trim(), title }, status);
}

/** A button that copies what `content` gives; it says so for a moment. */
export function copyButton(label, content) {
  const element = button(`Copy ${label}`, async (event) => {
    event.stopPropagation();
    let outcome = "Copied";
    try {
      await navigator.clipboard.writeText(content());
    } catch {
      outcome = "Copying is not allowed here"; // not a secure context: an address that is neither loopback nor https
    }
    element.textContent = outcome;
    announce(outcome);
    setTimeout(() => (element.textContent = `Copy ${label}`), 1200);
  });
  element.className = `quiet copy-${label}`;
  return element;
}

/** To screen readers. */
export function announce(message) {
  document.getElementById("say").textContent = message;
}

/** Of `count` runs, those that are compared; null: all. */
export function compared(count) {
  return count > Charts.COLORS ? hint(`the first ${Charts.COLORS} of ${count} runs`) : null;
}

/** What a view shows where there is nothing. */
export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", {}, h("strong", {}, title)), more.length ? h("p", {}, ...more) : null);
}
