/* Elements, text and numbers. Text of models, data and tools only ever goes through `text`, never through markup. */

/** An element: h("a", {href, class, on: {click}}, "text", child, [children]). null and false children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) {
        element.addEventListener(event, listener);
      }
    } else if (name === "class") {
      element.className = value;
    } else if (name === "vars") {
      for (const [variable, set] of Object.entries(value)) {
        element.style.setProperty(variable, set);
      }
    } else if (name === "value" || name === "checked" || name === "disabled" || name === "open") {
      element[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) {
      continue;
    }
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** Control characters as pictures and direction overrides as escapes: shown, never obeyed. */
export function visible(text) {
  return String(text)
    .replace(/\r\n/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g, (found) => {
      const code = found.charCodeAt(0);
      if (code < 0x20) {
        return String.fromCharCode(0x2400 + code);
      }
      return code === 0x7f ? "\u2421" : `\\x${code.toString(16)}`;
    })
    .replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Text of unknown origin, on as many lines as it has. */
export function text(content, className = "") {
  return h("span", { class: `said ${className}`.trim(), dir: "auto" }, visible(content));
}

export function oneLine(content, limit = 240) {
  const flat = visible(content).replace(/\s+/g, " ").trim();
  return flat.length > limit ? `${flat.slice(0, limit - 1)}…` : flat;
}

/** 0.123456 -> "0.123", 1234567 -> "1,234,567", null -> "–". */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) {
    return "–";
  }
  if (Number.isInteger(value)) {
    return value.toLocaleString("en-US").replace("-", "−");
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.5 * 10 ** -digits || size >= 1e7)) {
    return value.toExponential(2).replace("-", "−").replace("e−", "e-");
  }
  return value.toFixed(size >= 1000 ? 0 : digits).replace("-", "−");
}

export function signed(value, digits = 3) {
  return value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${number(100 * share, share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function seconds(value) {
  if (value === null || value === undefined) {
    return "–";
  }
  if (value >= 120) {
    return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  }
  return value >= 0.1 || value === 0 ? `${value.toFixed(value >= 10 ? 1 : 2)} s` : `${(1000 * value).toPrecision(2)} ms`;
}

export function span(low, high) {
  if (low === null || low === undefined) {
    return "–";
  }
  return low === high ? String(low) : `${low}–${high}`;
}

export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}

export function when(unix) {
  return unix ? new Date(1000 * unix).toLocaleString() : "–";
}

const STATUS_WORDS = {
  trained: "used by an optimizer step",
  filtered: "nothing to learn from: all rewards equal, or none",
  stale: "too old when it was wanted",
  failed: "an error, or too few rollouts survived",
  cancelled: "given up; its prompt is issued again",
  evaluated: "held-out prompt: nothing is learned from it",
  finished: "ended by itself",
  truncated: "ended by a limit",
};

export function badge(status) {
  const known = status in STATUS_WORDS;
  return h("span", { class: `badge ${known ? `badge-${status}` : ""}`, title: STATUS_WORDS[status] }, status);
}

/** A button that copies what `content` gives; it says so for a moment. */
export function copyButton(label, content) {
  const button = h("button", { type: "button", class: "quiet", title: `Copy ${label}` }, `Copy ${label}`);
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    const words = await copy(content()) ? "Copied" : "Copying is not allowed here";
    button.textContent = words;
    announce(words);
    setTimeout(() => {
      button.textContent = `Copy ${label}`;
    }, 1200);
  });
  return button;
}

async function copy(content) {
  try {
    await navigator.clipboard.writeText(content);
    return true;
  } catch {
    return false; // not a secure context: an address that is neither loopback nor https
  }
}

/** To screen readers. */
export function announce(words) {
  document.getElementById("say").textContent = words;
}

/** What a view shows where there is nothing. */
export function empty(heading, ...more) {
  return h("div", { class: "empty" }, h("p", { class: "empty-heading" }, heading), more.length ? h("p", {}, ...more) : null);
}

export function figure(label, value, title) {
  return h("div", { class: "figure", title }, h("dt", {}, label), h("dd", {}, value));
}
