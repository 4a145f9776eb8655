/* Prompts, messages and tool calls, as people read them: who said what, and below it the calls with their results. */

import { button, copyButton, h, hint, oneLine, plural, text, textOf, visible } from "./dom.js";

const FOLD_CHARACTERS = 6000; // a longer text shows its beginning first
const SPEAKERS = ["tool", "environment"]; // else its role says who wrote it

/** What was said in a rollout, turn by turn: each answer of the policy with its calls, and their results in them. */
export function trace(rollout) {
  const turns = [...rollout.turns];
  const answered = new Set(); // ids of calls whose result stands in them
  return rollout.messages.map((each) => {
    if (each.origin !== "policy" || !turns.length) {
      return answered.has(each.tool_call_id) ? null : message(each);
    }
    const turn = turns.shift();
    const made = new Map(turn.tool_calls.map((call) => [call.tool_call_id, call]));
    made.forEach((_, id) => answered.add(id));
    const asked = each.tool_calls.filter((call) => !made.has(call.id)).map(callNotMade);
    const since = turn.started_at && rollout.started_at ? turn.started_at - rollout.started_at : 0;
    const start = since > 0.01 ? `starts at ${Charts.duration(since)}, ` : "";
    const end = endedBy(turn) === "stop" ? "" : `, ended by ${endedBy(turn)}`;
    return message(each, {
      about: `${start}${plural(turn.num_tokens, "token")} in ${Charts.duration(turn.generation_duration_s)}${end}`,
      below: [
        parseError(turn),
        turn.tool_calls.map((call) => toolCall(call, true)),
        asked,
      ],
    });
  });
}

/** Why the generation of a turn ended: length, stop, or with the stop string: stop "\\nQ:". */
export function endedBy({ finish_reason: reason, stop_reason: stop }) {
  return oneLine(stop ? `${reason} ${JSON.stringify(stop)}` : reason, 60);
}

export function parseError({ parse_error: error }) {
  return error ? h("p", { class: "level bad said" }, `Tool calls were not parsed: ${oneLine(error, 400)}`) : null;
}

/** One message: who, and what. `below`: what belongs to it. */
export function message(each, { about = "", below = null } = {}) {
  const speaker = SPEAKERS.includes(each.origin) ? each.origin : each.role;
  const isSilent = each.content === "" && (below || each.tool_calls.length);
  return h(
    "section",
    { class: `message message-${each.origin}` },
    h("header", {}, h("strong", {}, visible(speaker)), each.name ? h("code", {}, oneLine(each.name, 60)) : null, h("span", { class: "hint spacer" }, about), copyButton("text", () => each.content)),
    isSilent ? null : longText(each.content),
    below || each.tool_calls.map(callNotMade),
  );
}

/** A call as the policy wrote it: 'add({"a": 1})'; what has no such form stands as it is. */
function callNotMade(call) {
  const { name, arguments: given } = call.function || {};
  return h("pre", { class: "said" }, visible(name ? `${name}(${textOf(given ?? {})})` : JSON.stringify(call)), " ", hint("not executed"));
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

/** One tool call: name, arguments and time in the line; arguments and result inside. An agent's call has no time. */
export function toolCall(call, isOpen = false) {
  const given = JSON.stringify(call.arguments, null, 2);
  const part = (title, content, shown) =>
    h("div", { class: "tool-body" }, h("header", {}, h("h4", { class: "spacer" }, title), copyButton(title.toLowerCase(), () => content)), shown);
  return h(
    "details",
    { class: `tool${call.failed ? " bad" : ""}`, open: isOpen },
    h(
      "summary",
      {},
      h("code", {}, visible(call.name || "(no name)")),
      h("span", { class: "cut hint spacer" }, oneLine(JSON.stringify(call.arguments), 120)),
      call.failed ? h("span", { class: "badge" }, "failed") : null,
      call.failed === null ? null : hint(Charts.duration(call.duration_s)),
    ),
    given.length > 80 ? part("Arguments", given, h("pre", { class: "said" }, visible(given))) : null,
    part(call.failed ? "Error" : "Result", call.result, longText(call.result)),
  );
}
