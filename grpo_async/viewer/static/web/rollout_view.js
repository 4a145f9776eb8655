/* One rollout, turn by turn: its tokens in colors, its tool calls folded, its statistics at the side. */

import { address, get, isKnown, memory, note, report } from "./api.js";
import {
  badge, button, copyButton, fill, h, heading, hint, link, named, number, oneLine, percent, plural, select, signed,
  spacer, span, statistics, text, visible,
} from "./dom.js";
import { endedBy, longText, message, parseError, toolCall, trace } from "./messages.js";
import { MODES } from "./token_colors.js";
import { Tokens, turnPlaces } from "./tokens.js";

const FEW_TOKENS = 60; // of a tool's answer, which then stands unfolded

export async function rolloutView({ main, parameters, signal }) {
  const { run, id, seq } = parameters;
  const { group, prompt, rollout, root, tree, summaries, tokens: data } = await get("rollout", { run, id, seq }, signal);
  const at = summaries.findIndex((each) => each.rollout_id === root);
  const summary = summaries[at];
  const tokens = new Tokens(data, rollout.advantage);
  const modes = Object.keys(MODES);
  // what differs from token to token says most; one of several turns is read first
  const usual = data.trainer_logprobs ? "log_ratio" : data.entropies ? "entropy" : "probability";
  let color = [parameters.color, memory.get("color"), usual].find((each) => modes.includes(each));
  let isTrace = (parameters.show || memory.get("show") || (rollout.turns.length > 1 ? "trace" : "tokens")) === "trace";
  const body = h("div", {});
  const tools = h("div", { class: "row token-tools" });
  let turnChosen = -1;

  const remember = () => note("rollout", { run, id, seq, color, show: isTrace ? "trace" : "tokens" });
  const colorBy = (mode) => {
    color = colors.value = mode;
    memory.set("color", mode);
    tokens.color(mode);
    remember();
  };
  const colors = select({ id: "color" }, modes.map((name) => [name, MODES[name].label]), color, colorBy);
  const showTrace = (wanted) => {
    isTrace = wanted;
    memory.set("show", wanted ? "trace" : "tokens");
    remember();
    drawBody();
  };

  function drawBody() {
    tokens.hide(); // the token that it is about goes
    const toggle = (label, wanted) => button(label, () => showTrace(wanted), { class: "chip", "aria-pressed": String(isTrace === wanted) });
    const legend = isTrace ? null : [h("label", { for: "color" }, "Color by"), colors, tokens.legend];
    fill(tools, toggle("Tokens", false), toggle("Trace", true), legend);
    if (isTrace) {
      fill(body, h("div", { class: "panel" }, prompt.map((each) => message(each)), trace(rollout)));
    } else {
      tokens.spans.clear();
      fill(body, drawTurns());
      tokens.color(color);
    }
  }

  function drawTurns() {
    const places = turnPlaces(rollout.turns, data.mask);
    const read = data.prompt_texts && data.prompt_texts.join("");
    return [
      h(
        "details",
        { class: "panel turn", open: prompt.length === 1 && prompt[0].content.length < 600 },
        h("summary", {}, h("h2", {}, "Prompt ", hint(plural(data.prompt_ids.length, "token")))),
        prompt.map((each) => message(each)),
        read && h("details", { class: "small" }, h("summary", {}, "As the model read it"), h("pre", { class: "said" }, visible(read)), copyButton("text", () => read)),
      ),
      data.texts_missing ? h("p", { class: "hint" }, data.texts_missing) : null,
      rollout.turns.map((turn, index) => drawTurn(turn, index, places[index])),
      rollout.turns.length === 0 ? h("p", { class: "empty" }, "Nothing was generated.") : null,
    ];
  }

  /** The calls of all branches; each branch is a link to its own page. */
  function drawTree() {
    const line = (each) =>
      h(
        "li",
        { class: "small", vars: { "--depth": each.depth } },
        each.is_path ? link(address("rollout", { run, id: each.rollout_id, seq: group.seq }), oneLine(each.text)) : oneLine(each.text),
      );
    return h("details", { class: "panel", open: true }, h("summary", {}, h("h2", {}, "Calls in all branches")), h("ul", { class: "call-tree bare" }, tree.map(line)));
  }

  function drawTurn(turn, index, { first, sampled, last }) {
    const level = turn.finish_reason === "stop" ? "" : "warning";
    return h(
      "section",
      { class: "panel turn", id: `turn-${index}`, "aria-label": `turn ${index + 1}` },
      h(
        "header",
        { class: "row small" },
        h("h2", {}, `Turn ${index + 1}`),
        hint(plural(turn.num_tokens, "token")),
        h("span", { class: `badge ${level}`, title: "why its generation ended" }, endedBy(turn)),
        hint(`generated in ${Charts.duration(turn.generation_duration_s)}`),
        turn.tool_calls.length ? hint(`tools ${Charts.duration(turn.tool_execution_duration_s)}`) : null,
        spacer(),
        data.texts ? copyButton("text", () => data.texts.slice(first, sampled).join("")) : null,
      ),
      parseError(turn),
      tokens.block(first, sampled, `tokens of turn ${index + 1}`),
      turn.tool_calls.map((call) => toolCall(call)),
      last > sampled
        ? h(
            "details",
            { class: "small", open: last - sampled <= FEW_TOKENS },
            h("summary", { class: "hint" }, `${plural(last - sampled, "token")} that followed, not sampled by the policy`),
            tokens.block(sampled, last, `tokens after turn ${index + 1}`),
          )
        : null,
    );
  }

  const beside = (by) => (isKnown("rollout", { run, id: summaries[at + by]?.rollout_id, seq: group.seq }) ? summaries[at + by] : undefined);
  const goTo = (by) => {
    const neighbor = beside(by);
    if (neighbor) {
      location.hash = address("rollout", { run, id: neighbor.rollout_id, seq: group.seq, color });
    }
  };
  const moveTurn = (by) => {
    turnChosen = Math.max(0, Math.min(rollout.turns.length - 1, turnChosen + by));
    document.getElementById(`turn-${turnChosen}`)?.scrollIntoView({ block: "start" });
  };
  const groupAddress = address("group", { run, id: group.group_id, seq: group.seq });

  fill(
    main,
    heading(
      ["Rollout ", text(rollout.rollout_id)],
      badge(rollout.status),
      rollout.parent ? hint("a branch of ", link(address("rollout", { run, id: root, seq: group.seq }), oneLine(root)), ", ") : null,
      hint("of ", link(groupAddress, `group ${group.group_id}`), " ", badge(group.status)),
      spacer(),
      button("‹", () => goTo(-1), { disabled: !beside(-1), title: "previous rollout of its group ([)" }),
      `${at + 1} of ${summaries.length}`,
      button("›", () => goTo(1), { disabled: !beside(1), title: "next rollout of its group (])" }),
    ),
    rollout.error ? h("div", { class: "level bad" }, longText(rollout.error)) : null,
    h("div", { class: "columns" }, h("div", {}, tools, body, tree.length ? drawTree() : null), aside({ run, group, rollout, summary, ids: data.completion_ids })),
    tokens.tip,
  );
  drawBody();

  return {
    title: `Rollout ${oneLine(rollout.rollout_id, 60)}`,
    keys: {
      c: () => !isTrace && colorBy(modes[(modes.indexOf(color) + 1) % modes.length]),
      m: () => showTrace(!isTrace),
      "[": () => goTo(-1),
      "]": () => goTo(1),
      j: () => moveTurn(1),
      k: () => moveTurn(-1),
    },
    up: () => groupAddress,
  };
}

/** Statistics of a rollout, and where to go from it. */
function aside({ run, group, rollout, summary, ids }) {
  const section = (title, content) => (content ? h("section", {}, h("h3", {}, title), content) : null);
  const lengths = {
    sampled: number(summary.num_tokens),
    "with tool results": number(summary.num_completion_tokens),
    prompt: number(summary.num_prompt_tokens),
    "policy versions": span(summary.version_min, summary.version_max),
    staleness: number(summary.staleness),
    "mean logprob": number(summary.logprob_mean),
    "lowest logprob": number(summary.logprob_min),
    "mean entropy": number(summary.entropy_mean),
    "importance weight": summary.ratio_mean === null ? "–" : `${number(summary.ratio_mean)} (${number(summary.ratio_min, 2)} to ${number(summary.ratio_max, 2)})`,
    mismatch: number(summary.mismatch_mean),
    clipped: percent(summary.clipped_fraction),
    "masked out": percent(summary.masked_fraction),
  };
  const times = {
    started: summary.started_at ? new Date(1000 * summary.started_at).toLocaleString() : "–",
    total: Charts.duration(rollout.total_duration_s),
    generation: Charts.duration(summary.generation_duration_s),
    tools: Charts.duration(summary.tool_duration_s),
  };
  const of = rollout.parent ? ` of ${oneLine(summary.rollout_id)}` : ""; // the summary is not the branch's
  return h(
    "aside",
    { class: "panel", "aria-label": "Statistics" },
    statistics([
      ["reward", number(rollout.reward)],
      ["advantage", signed(rollout.advantage)],
      ["step", number(group.step)],
      ["group's mean", number(summary.group_reward_mean)],
    ]),
    section("Reward by part", named(rollout.rewards, (value) => number(value))),
    section(`Tokens${of}`, named(lengths, String)),
    section(`Time${of}`, named(times, String)),
    section("Extra data from rewards", named(rollout.extra)),
    section("Dataset columns", named(group.columns)),
    report ? null : h("p", {}, link(address("groups", { run, q: `prompt_hash = '${summary.prompt_hash}'`, sort: "seq" }), "Same prompt in other steps")),
    copyButton("ids", () => JSON.stringify(ids)),
  );
}
