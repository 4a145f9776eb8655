/* One group: its prompt, and its rollouts side by side. */

import { get } from "./api.js";
import { badge, copyButton, figure, fill, h, number, oneLine, percent, plural, seconds, signed, span } from "./dom.js";
import { message, named, toolCall } from "./said.js";
import { address, go, note, place } from "./routes.js";

const ORDERS = {
  index: ["in their order", (a, b) => a.rollout_index - b.rollout_index],
  best: ["best first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["worst first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest first", (a, b) => b.num_tokens - a.num_tokens],
};

export async function groupView({ app, main, parameters, signal }) {
  const { run, id, seq, superseded } = parameters;
  const { summary, group, rollouts, summaries } = await get("group", { run, id, seq, superseded }, signal);
  const cards = h("div", { class: "cards" });
  let order = parameters.order in ORDERS ? parameters.order : "index";
  let chosen = -1;
  const taken = new Set();
  const compare = h("button", { type: "button", disabled: true, on: { click: () => goCompare() } }, "Compare two");

  const byId = new Map(rollouts.map((each) => [each.rollout_id, each]));
  const sorted = () => [...summaries].sort(ORDERS[order][1]);

  function goCompare() {
    const [a, b] = [...taken];
    go("compare", { run, a: place(run, a, group.seq), b: place(run, b, group.seq) });
  }

  function draw() {
    fill(
      cards,
      sorted().map((each, index) => card(each, byId.get(each.rollout_id), index)),
    );
  }

  function card(each, rollout, index) {
    const link = address("rollout", { run, id: each.rollout_id, seq: group.seq, superseded });
    const box = h("input", {
      type: "checkbox",
      checked: taken.has(each.rollout_id),
      "aria-label": `compare ${each.rollout_id}`,
      on: {
        change: (event) => {
          taken[event.target.checked ? "add" : "delete"](each.rollout_id);
          compare.disabled = taken.size !== 2;
        },
      },
    });
    const said = rollout ? rollout.messages : [];
    const calls = rollout ? rollout.turns.flatMap((turn) => turn.tool_calls) : [];
    return h(
      "article",
      { class: `card${index === chosen ? " chosen" : ""}`, "aria-label": `rollout ${each.rollout_id}` },
      h(
        "header",
        {},
        h("a", { href: link, class: "card-id" }, oneLine(each.rollout_id, 60)),
        badge(each.status),
        h("label", { class: "check" }, box, " compare"),
      ),
      h(
        "div",
        { class: "card-figures" },
        h("span", { class: "card-reward", title: "reward" }, number(each.reward)),
        h("span", { class: each.advantage > 0 ? "up" : each.advantage < 0 ? "down" : "hint", title: "advantage" }, `adv. ${signed(each.advantage, 2)}`),
        h("span", { class: "hint" }, plural(each.num_tokens, "token")),
        each.num_tool_calls ? h("span", { class: "hint" }, plural(each.num_tool_calls, "tool call")) : null,
        each.staleness ? h("span", { class: "hint" }, `stale ${each.staleness}`) : null,
      ),
      Object.keys(each.rewards).length > 1 ? named(each.rewards, (value) => number(value)) : null,
      each.error ? h("p", { class: "problem said" }, oneLine(each.error, 600)) : null,
      h("div", { class: "card-text" }, said.map(message), calls.map(toolCall)),
    );
  }

  const select = h(
    "select",
    {
      id: "order",
      on: {
        change: (event) => {
          order = event.target.value;
          note("group", { ...parameters, order: order === "index" ? null : order });
          draw();
        },
      },
    },
    Object.entries(ORDERS).map(([name, [label]]) => h("option", { value: name }, label)),
  );
  select.value = order;
  const scored = summaries.filter((each) => each.reward !== null).sort(ORDERS.best[1]);
  const own = rollouts.map((each) => each.prompt_messages).filter(Boolean);
  const prompt = own.length === rollouts.length && own.length > 0 ? own[0] : group.messages;
  fill(
    main,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, `Group ${group.group_id}`),
      badge(group.status),
      summary.superseded ? h("span", { class: "badge" }, "superseded") : null,
      h("span", { class: "spacer" }),
      h("a", { class: "button", href: address("prompt", { run, hash: summary.prompt_hash, superseded }) }, "Same prompt in other steps"),
      copyButton("link", () => location.href),
    ),
    h(
      "dl",
      { class: "figures" },
      figure("step", number(group.step)),
      figure("reward", number(summary.reward_mean), "mean of its rollouts"),
      figure("std", number(summary.reward_std), "standard deviation of the rewards"),
      figure("lowest, highest", summary.reward_min === null ? "–" : `${number(summary.reward_min, 2)}, ${number(summary.reward_max, 2)}`),
      figure("length", number(summary.num_tokens_mean, 1), "mean of the tokens that the policy sampled"),
      figure("truncated", percent(summary.num_truncated / summary.size)),
      figure("staleness", number(summary.staleness)),
      figure("versions", span(summary.version_min, summary.version_max)),
      figure("time", seconds(summary.total_duration_s), "of the longest rollout"),
    ),
    h("section", { class: "panel" }, h("h2", {}, "Prompt ", h("small", {}, String(group.prompt_id))), prompt.map(message), named(group.columns)),
    h(
      "div",
      { class: "heading" },
      h("h2", {}, plural(summaries.length, "rollout")),
      h("label", { for: "order", class: "visually-hidden" }, "Order"),
      select,
      h("span", { class: "spacer" }),
      scored.length > 1
        ? h(
            "a",
            { class: "button", href: address("compare", { run, a: place(run, scored[0].rollout_id, group.seq), b: place(run, scored[scored.length - 1].rollout_id, group.seq) }) },
            "Compare best and worst",
          )
        : null,
      compare,
    ),
    cards,
  );
  draw();

  const move = (by) => {
    chosen = Math.max(0, Math.min(summaries.length - 1, chosen + by));
    [...cards.children].forEach((each, index) => each.classList.toggle("chosen", index === chosen));
    cards.children[chosen].scrollIntoView({ block: "nearest" });
  };
  return {
    title: `Group ${group.group_id}`,
    keys: {
      j: () => move(1),
      k: () => move(-1),
      Enter: (event) => {
        if (event.target.closest("a, button, summary") || chosen < 0) {
          return false;
        }
        go("rollout", { run, id: sorted()[chosen].rollout_id, seq: group.seq, superseded });
        return true;
      },
    },
    up: () => app.list || address("groups", { run }),
  };
}
