/* Two rollouts side by side, of one run or of two: what one said and the other did not, and their figures. */

import { get } from "./api.js";
import { diff } from "./diff.js";
import { badge, copyButton, empty, fill, h, number, oneLine, plural, seconds, signed, span, visible } from "./dom.js";
import { message } from "./said.js";
import { address, go, place, placed } from "./routes.js";

export async function compareView({ app, main, parameters, signal }) {
  const sides = ["a", "b"].map((name) => ({ name, ...placed(parameters[name]) }));
  if (sides.some((side) => !side.id)) {
    fill(main, empty("Two rollouts are compared here.", "Choose two in a group, or two steps of the same prompt."));
    return { title: "Compare" };
  }
  const found = await Promise.all(sides.map((side) => get("rollout", { run: side.run, id: side.id, seq: side.seq }, signal)));
  const [left, right] = found.map((each, index) => ({ ...each, ...sides[index], summary: each.summaries.find((one) => one.rollout_id === each.rollout.rollout_id) }));
  const isSame = left.summary.prompt_hash === right.summary.prompt_hash;

  function side(each, other, isLeft) {
    const select = h(
      "select",
      {
        "aria-label": `${isLeft ? "left" : "right"} rollout`,
        on: { change: (event) => go("compare", { ...parameters, [each.name]: place(each.run, event.target.value, each.group.seq) }) },
      },
      each.summaries.map((one) => h("option", { value: one.rollout_id }, `${oneLine(one.rollout_id, 40)} · reward ${number(one.reward)}`)),
    );
    select.value = each.rollout.rollout_id;
    return h(
      "header",
      { class: "side-head" },
      h("p", {}, h("strong", { class: "said" }, oneLine(each.run, 60)), each.group.step === null ? "" : ` · step ${each.group.step}`, " · ", h("a", { href: address("rollout", { run: each.run, id: each.rollout.rollout_id, seq: each.group.seq }) }, "open")),
      select,
    );
  }

  const [leftText, rightText] = [said(left), said(right)];
  const pieces = diff(leftText, rightText);
  const same = pieces.filter((piece) => piece.kind === "same").reduce((sum, piece) => sum + piece.text.length, 0);
  const share = leftText.length + rightText.length ? (2 * same) / (leftText.length + rightText.length) : 1;
  fill(
    main,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, "Compare"),
      h("span", { class: "hint" }, leftText === rightText ? "The texts are the same." : `${Math.round(100 * share)}% of the characters are the same.`),
      h("span", { class: "spacer" }),
      h("button", { type: "button", on: { click: () => go("compare", { ...parameters, a: parameters.b, b: parameters.a }) } }, "Swap"),
      h("a", { class: "button", href: address("prompt", { run: left.run, hash: left.summary.prompt_hash }) }, "All steps of this prompt"),
      copyButton("link", () => location.href),
    ),
    isSame ? null : h("p", { class: "notes" }, "These rollouts are of different prompts."),
    h(
      "section",
      { class: "panel" },
      h("h2", {}, isSame ? "Prompt" : "Prompts"),
      h("div", { class: isSame ? "" : "sides" }, h("div", {}, promptOf(left).map(message)), isSame ? null : h("div", {}, promptOf(right).map(message))),
    ),
    h(
      "div",
      { class: "sides" },
      h("section", { class: "panel side" }, side(left, right, true), h("div", { class: `diff said ${rank(left, right)}`, dir: "auto" }, drawn(pieces, "left"))),
      h("section", { class: "panel side" }, side(right, left, false), h("div", { class: `diff said ${rank(right, left)}`, dir: "auto" }, drawn(pieces, "right"))),
    ),
    table(left, right),
  );
  return {
    title: `Compare ${left.id} and ${right.id}`,
    up: () => address("prompt", { run: left.run, hash: left.summary.prompt_hash }),
  };
}

/** What only one of them said is coloured by its reward, whichever side it stands on. */
function rank(side, other) {
  const [own, others] = [side.rollout.reward, other.rollout.reward];
  return own === null || others === null || own === others ? "" : own > others ? "better" : "worse";
}

function promptOf(side) {
  return side.rollout.prompt_messages || side.group.messages;
}

/** What the policy, tools and environments said, with who said it. */
function said(side) {
  const many = side.rollout.messages.length > 1;
  return side.rollout.messages
    .map((each) => {
      const calls = each.tool_calls.map((call) => `${(call.function || {}).name}(${JSON.stringify((call.function || {}).arguments)})`);
      const content = [each.content, ...calls].filter(Boolean).join("\n");
      return many ? `[${each.role}]\n${content}` : content;
    })
    .join("\n\n");
}

function drawn(pieces, own) {
  const shown = pieces.filter((piece) => piece.kind === "same" || piece.kind === own);
  if (shown.length === 0) {
    return h("span", { class: "hint" }, "(nothing)");
  }
  return shown.map((piece) => (piece.kind === "same" ? visible(piece.text) : h(own === "left" ? "del" : "ins", {}, visible(piece.text))));
}

function table(left, right) {
  const rows = [
    ["status", (side) => badge(side.rollout.status)],
    ["reward", (side) => number(side.rollout.reward)],
    ...[...new Set([left, right].flatMap((side) => Object.keys(side.rollout.rewards)))].map((name) => [`reward · ${oneLine(name, 40)}`, (side) => number(side.rollout.rewards[name])]),
    ["advantage", (side) => signed(side.rollout.advantage)],
    ["group", (side) => [h("a", { href: address("group", { run: side.run, id: side.group.group_id, seq: side.group.seq }) }, String(side.group.group_id)), " ", badge(side.group.status)]],
    ["step", (side) => number(side.group.step)],
    ["length", (side) => plural(side.summary.num_tokens, "token")],
    ["turns", (side) => String(side.summary.num_turns)],
    ["tool calls", (side) => `${side.summary.num_tool_calls}, ${side.summary.num_failed_tool_calls} failed`],
    ["policy versions", (side) => span(side.summary.version_min, side.summary.version_max)],
    ["mean entropy", (side) => number(side.summary.entropy_mean)],
    ["mean logprob", (side) => number(side.summary.logprob_mean)],
    ["importance weight", (side) => number(side.summary.ratio_mean)],
    ["time", (side) => seconds(side.rollout.total_duration_s)],
  ];
  return h(
    "div",
    { class: "scroll-x" },
    h(
      "table",
      { class: "plain" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), h("th", { scope: "col", class: "said" }, oneLine(left.id, 40)), h("th", { scope: "col", class: "said" }, oneLine(right.id, 40)))),
      h("tbody", {}, rows.map(([label, cell]) => h("tr", {}, h("th", { scope: "row" }, label), h("td", {}, cell(left)), h("td", {}, cell(right))))),
    ),
  );
}
