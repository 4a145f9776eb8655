/* Messages and tool calls, as people read them. */

import { copyButton, h, oneLine, seconds, text, visible } from "./dom.js";

const FOLD_CHARACTERS = 6000; // a longer text shows its beginning first

/** One message: who, and what. */
export function message(each) {
  const who = each.name ? `${each.role} ${oneLine(each.name, 60)}` : each.role;
  return h(
    "section",
    { class: `message message-${origin(each.origin)}` },
    h("header", {}, h("span", { class: "role" }, visible(who)), h("span", { class: "origin" }, each.origin), copyButton("text", () => each.content)),
    each.content || !each.tool_calls.length ? longText(each.content) : null,
    each.tool_calls.map((call) => {
      const asked = call.function || {};
      return h("pre", { class: "call-line" }, `${visible(asked.name ?? "")}(${visible(JSON.stringify(asked.arguments ?? {}))})`);
    }),
  );
}

function origin(name) {
  return ["prompt", "policy", "tool", "environment"].includes(name) ? name : "other";
}

export function longText(content) {
  if (content === "") {
    return h("p", { class: "hint" }, "(empty)");
  }
  if (content.length <= FOLD_CHARACTERS) {
    return text(content, "block");
  }
  const box = h("div", {}, text(content.slice(0, FOLD_CHARACTERS), "block"));
  const more = h(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          box.replaceChildren(text(content, "block"));
          more.remove();
        },
      },
    },
    `Show all ${content.length.toLocaleString("en-US")} characters`,
  );
  return h("div", {}, box, more);
}

/** One tool call, folded: name, outcome and time in the line; arguments and result inside. */
export function toolCall(call) {
  const args = JSON.stringify(call.arguments, null, 2);
  return h(
    "details",
    { class: `tool${call.failed ? " tool-failed" : ""}` },
    h(
      "summary",
      {},
      h("code", {}, visible(call.name || "(no name)")),
      h("span", { class: "tool-arguments" }, oneLine(JSON.stringify(call.arguments), 120)),
      call.failed ? h("span", { class: "badge badge-failed" }, "failed") : null,
      h("span", { class: "tool-time" }, seconds(call.duration_s)),
    ),
    h("div", { class: "tool-body" }, h("header", {}, h("h4", {}, "Arguments"), copyButton("arguments", () => args)), h("pre", { class: "said" }, visible(args))),
    h("div", { class: "tool-body" }, h("header", {}, h("h4", {}, call.failed ? "Error" : "Result"), copyButton("result", () => call.result)), longText(call.result)),
  );
}

/** A table of names and values of unknown origin. */
export function named(values, format = (value) => (typeof value === "string" ? value : JSON.stringify(value))) {
  const entries = Object.entries(values || {});
  if (entries.length === 0) {
    return null;
  }
  return h(
    "dl",
    { class: "named" },
    entries.map(([name, value]) => [h("dt", {}, visible(name)), h("dd", { class: "said" }, visible(format(value) ?? "–"))]),
  );
}
