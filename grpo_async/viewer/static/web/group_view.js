/* One group: its prompt, and its rollouts side by side. */

import { address, get, report } from "./api.js";
import {
  badge, fill, h, heading, hint, link, named, number, oneLine, panel, percent, plural, range, signed, spacer,
  span, statistics,
} from "./dom.js";
import { message, trace } from "./messages.js";

export async function groupView({ app, main, parameters, signal }) {
  const { run, id, seq } = parameters;
  const { summary, group, prompt, rollouts, summaries } = await get("group", { run, id, seq }, signal);
  const cards = h("div", { class: "tiles" });
  const byId = new Map(rollouts.map((each) => [each.rollout_id, each]));
  let chosen = -1;

  const rolloutAddress = (each) => address("rollout", { run, id: each.rollout_id, seq: group.seq });

  function card(each, index) {
    const rollout = byId.get(each.rollout_id);
    const level = each.advantage > 0 ? "good" : each.advantage < 0 ? "bad" : "";
    return h(
      "article",
      { class: `panel card${index === chosen ? " chosen" : ""}`, "aria-label": `rollout ${each.rollout_id}` },
      h("header", { class: "row" }, h("strong", {}, link(rolloutAddress(each), oneLine(each.rollout_id, 60))), badge(each.status)),
      h(
        "div",
        { class: "row small" },
        h("strong", { class: "card-reward" }, `reward ${number(each.reward)}`),
        h("span", { class: `level ${level}` }, `advantage ${signed(each.advantage, 2)}`),
        hint(plural(each.num_tokens, "token")),
        each.num_tool_calls ? hint(plural(each.num_tool_calls, "tool call")) : null,
        each.staleness ? hint(`staleness ${plural(each.staleness, "step")}`) : null,
      ),
      Object.keys(each.rewards).length > 1 ? named(each.rewards, (value) => number(value)) : null,
      each.error ? h("p", { class: "level bad said" }, oneLine(each.error, 600)) : null,
      h("div", { class: "card-text" }, trace(rollout)),
    );
  }

  fill(
    main,
    heading(
      `Group ${group.group_id}`,
      badge(group.status),
      spacer(),
      report ? null : h("a", { class: "button", href: address("groups", { run, q: `prompt_hash = '${summary.prompt_hash}'`, sort: "seq" }) }, "Same prompt in other steps"),
    ),
    statistics([
      ["step", number(group.step)],
      ["reward", number(summary.reward_mean), "mean of its rollouts"],
      ["std", number(summary.reward_std), "standard deviation of the rewards"],
      ["lowest – highest", range(summary.reward_min, summary.reward_max)],
      ["length", number(summary.num_tokens_mean, 1), "mean of the tokens that the policy sampled"],
      ["truncated", percent(summary.num_truncated / summary.size)],
      ["staleness", summary.staleness === null ? "–" : plural(summary.staleness, "step")],
      [summary.version_min === summary.version_max ? "policy version" : "policy versions", span(summary.version_min, summary.version_max)],
      ["time", Charts.duration(summary.total_duration_s), "of the longest rollout"],
    ]),
    panel(
      h("h2", {}, "Prompt ", hint(String(group.prompt_id))),
      prompt.map((each) => message(each)),
      named(group.columns),
    ),
    h("h2", { class: "heading" }, plural(summaries.length, "rollout")),
    cards,
  );
  fill(cards, summaries.map(card));

  const move = (by) => {
    chosen = Math.min(summaries.length - 1, Math.max(0, chosen + by)); // -1: it has no rollouts
    [...cards.children].forEach((each, index) => each.classList.toggle("chosen", index === chosen));
    cards.children[chosen]?.scrollIntoView({ block: "nearest" });
  };
  const open = (event) => {
    if (event.target.closest("a, button, summary") || chosen < 0) {
      return false;
    }
    location.hash = rolloutAddress(summaries[chosen]);
    return true;
  };
  return {
    title: `Group ${group.group_id}`,
    keys: { j: () => move(1), k: () => move(-1), Enter: open },
    up: () => app.list || address("groups", { run }),
  };
}
