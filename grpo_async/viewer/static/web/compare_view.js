/* Two rollouts side by side, of one run or of two: what one said and the other did not, and their statistics. */

import { address, get, go, place, placed } from "./api.js";
import {
  badge, button, copyLink, empty, fill, h, heading, hint, link, number, oneLine, panel, percent, plural, select, signed, spacer, span,
  table, visible,
} from "./dom.js";
import { message, promptOf } from "./messages.js";

export async function compareView({ main, parameters, signal }) {
  const asked = ["a", "b"].map((name) => ({ name, ...placed(parameters[name]) }));
  if (asked.some((side) => !side.id)) {
    fill(main, empty("Two rollouts are compared here.", "Choose two in a group, or two steps of the same prompt."));
    return { title: "Compare" };
  }
  const [{ run, id, seq }, other] = asked;
  const question = { run, id, seq, other_run: other.run, other_id: other.id, other_seq: other.seq };
  const found = await get("compare", question, signal);
  const sides = found.sides.map((side, at) => {
    const summary = side.summaries.find((each) => each.rollout_id === side.rollout.rollout_id);
    return { ...asked[at], ...side, summary };
  });
  const [left, right] = sides;
  const isSame = left.summary.prompt_hash === right.summary.prompt_hash;
  const { pieces, same } = found;
  const prompts = sides.map((side) => h("div", {}, promptOf(side.group, side.rollout).map((each) => message(each))));

  const choose = (side) => {
    const rollouts = side.summaries.map((each) => [each.rollout_id, `${oneLine(each.rollout_id, 40)} · reward ${number(each.reward)}`]);
    const take = (id) => go("compare", { ...parameters, [side.name]: place(side.run, id, side.group.seq) });
    return select({ "aria-label": `${side === left ? "left" : "right"} rollout` }, rollouts, side.rollout.rollout_id, take);
  };
  const shown = (side, other, kind) => {
    const { run, rollout, group } = side;
    const open = link(address("rollout", { run, id: rollout.rollout_id, seq: group.seq }), "open");
    const step = group.step === null ? "" : ` · step ${group.step}`;
    return panel(
      h("p", {}, h("strong", { class: "said" }, oneLine(run, 60)), step, " · ", open, " ", choose(side)),
      h("div", { class: `diff said ${rank(rollout, other.rollout)}`, dir: "auto" }, marked(pieces, kind)),
    );
  };
  fill(
    main,
    heading(
      "Compare",
      hint(same === 1 ? "The texts are the same." : `${percent(same)} of the characters are the same.`),
      spacer(),
      button("Swap", () => go("compare", { ...parameters, a: parameters.b, b: parameters.a })),
      h("a", { class: "button", href: address("prompt", { run: left.run, hash: left.summary.prompt_hash }) }, "All steps of this prompt"),
      copyLink(),
    ),
    isSame ? null : h("p", { class: "lined filled warning" }, "These rollouts are of different prompts."),
    panel(h("h2", {}, isSame ? "Prompt" : "Prompts"), isSame ? prompts[0] : h("div", { class: "sides" }, prompts)),
    h("div", { class: "sides" }, shown(left, right, "left"), shown(right, left, "right")),
    statisticsOf(sides),
  );
  return { title: `Compare ${left.id} and ${right.id}`, up: () => address("prompt", { run: left.run, hash: left.summary.prompt_hash }) };
}

/** What only one of them said is colored by its reward, whichever side it stands on. */
function rank({ reward: own }, { reward: other }) {
  return own === null || other === null || own === other ? "" : own > other ? "good" : "bad";
}

function marked(pieces, own) {
  const shown = pieces.filter(([kind]) => kind === "same" || kind === own);
  const tag = own === "left" ? "del" : "ins";
  const piece = ([kind, text]) => (kind === "same" ? visible(text) : h(tag, {}, visible(text)));
  return shown.length ? shown.map(piece) : hint("(nothing)");
}

function statisticsOf(sides) {
  const parts = [...new Set(sides.flatMap(({ rollout }) => Object.keys(rollout.rewards)))];
  const groupOf = ({ run, group }) => [link(address("group", { run, id: group.group_id, seq: group.seq }), String(group.group_id)), " ", badge(group.status)];
  const rows = {
    status: ({ rollout }) => badge(rollout.status),
    reward: ({ rollout }) => number(rollout.reward),
    ...Object.fromEntries(parts.map((name) => [`reward · ${oneLine(name, 40)}`, ({ rollout }) => number(rollout.rewards[name])])),
    advantage: ({ rollout }) => signed(rollout.advantage),
    group: groupOf,
    step: ({ group }) => number(group.step),
    length: ({ summary }) => plural(summary.num_tokens, "token"),
    turns: ({ summary }) => String(summary.num_turns),
    "tool calls": ({ summary }) => `${summary.num_tool_calls}, ${summary.num_failed_tool_calls} failed`,
    "policy versions": ({ summary }) => span(summary.version_min, summary.version_max),
    "mean entropy": ({ summary }) => number(summary.entropy_mean),
    "mean logprob": ({ summary }) => number(summary.logprob_mean),
    "importance weight": ({ summary }) => number(summary.ratio_mean),
    time: ({ rollout }) => Charts.duration(rollout.total_duration_s),
  };
  const cells = Object.entries(rows).map(([label, cell]) => [label, ...sides.map(cell)]);
  return table(["", ...sides.map((side) => oneLine(side.id, 40))], cells, { isNamed: true });
}
