/* Prompts, messages and tool calls, as people read them. */

import { button, copyButton, h, oneLine, text, visible } from "./dom.js";

const FOLD_CHARACTERS = 6000; // a longer text shows its beginning first

/** The prompt of a rollout, which an environment's reset may have changed. */
export function promptOf(group, rollout) {
  return rollout.reset_messages || group.messages;
}

/** 'add({"a": 1})' of a tool call in a message. */
function callText(call) {
  const { name = "", arguments: given = {} } = call.function || {};
  return `${name}(${JSON.stringify(given)})`;
}

/** One message: who, and what. */
export function message(each) {
  const who = each.name ? `${each.role} ${oneLine(each.name, 60)}` : each.role;
  return h(
    "section",
    { class: `message message-${["policy", "tool", "environment"].includes(each.origin) ? each.origin : "other"}` },
    h("header", {}, h("strong", {}, visible(who)), h("span", { class: "hint spacer" }, each.origin), copyButton("text", () => each.content)),
    each.content || !each.tool_calls.length ? longText(each.content) : null,
    each.tool_calls.map((call) => h("pre", { class: "said" }, visible(callText(call)))),
  );
}

export function longText(content) {
  if (content.length <= FOLD_CHARACTERS) {
    return content === "" ? h("p", { class: "hint" }, "(empty)") : text(content, "block");
  }
  const box = h("div", {}, text(content.slice(0, FOLD_CHARACTERS), "block"));
  const showAll = () => box.replaceChildren(text(content, "block"));
  box.append(button(`Show all ${content.length.toLocaleString("en-US")} characters`, showAll));
  return box;
}

/** One tool call, folded: name, outcome and time in the line; arguments and result inside. */
export function toolCall(call) {
  const given = JSON.stringify(call.arguments, null, 2);
  const part = (title, content, shown) =>
    h("div", { class: "tool-body" }, h("header", {}, h("h4", {}, title), copyButton(title.toLowerCase(), () => content)), shown);
  return h(
    "details",
    { class: `tool${call.failed ? " bad" : ""}` },
    h(
      "summary",
      {},
      h("code", {}, visible(call.name || "(no name)")),
      h("span", { class: "cut hint spacer" }, oneLine(JSON.stringify(call.arguments), 120)),
      call.failed ? h("span", { class: "badge" }, "failed") : null,
      h("span", { class: "hint" }, Charts.duration(call.duration_s)),
    ),
    part("Arguments", given, h("pre", { class: "said" }, visible(given))),
    part(call.failed ? "Error" : "Result", call.result, longText(call.result)),
  );
}
