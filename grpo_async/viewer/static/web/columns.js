/* The columns of the two tables, and from which width on (px) each is shown. */

import { badge, number, oneLine, percent, seconds, signed, span } from "./dom.js";

const MOST_REWARDS = 4;

export function columnsOf(kind, rewardNames) {
  return kind === "groups" ? GROUPS : rolloutColumns(rewardNames);
}

const numeric = (name, label, cell, more = {}) => ({ name, label, sort: name, numeric: true, width: "4.6rem", cell, ...more });

const GROUPS = [
  numeric("step", "step", (row) => number(row.step), { width: "3.2rem" }),
  numeric("id", "group", (row) => String(row.group_id), { width: "4.6rem", link: true }),
  { name: "status", label: "status", width: "5.4rem", from: 480, cell: (row) => badge(row.status) },
  { name: "prompt", label: "prompt", width: "minmax(7rem, 1fr)", class: "cut", cell: (row) => oneLine(row.prompt_preview, 300) },
  numeric("reward", "reward", (row) => number(row.reward_mean), { title: "mean reward of its rollouts" }),
  numeric("std", "std", (row) => number(row.reward_std), { title: "standard deviation of its rewards", from: 700 }),
  numeric("max", "min – max", (row) => (row.reward_min === null ? "–" : `${number(row.reward_min, 2)} – ${number(row.reward_max, 2)}`), {
    width: "6.6rem",
    title: "lowest and highest reward; sorts by the highest",
    from: 1000,
  }),
  numeric("size", "size", (row) => (row.num_matching < row.size ? `${row.num_matching} of ${row.size}` : String(row.size)), {
    width: "4.8rem",
    title: "rollouts of the group; of those, how many match",
    from: 860,
  }),
  numeric("length", "length", (row) => number(row.num_tokens_mean, 1), { title: "mean of the tokens that the policy sampled", from: 440 }),
  numeric("truncated", "trunc", (row) => (row.num_truncated ? percent(row.num_truncated / row.size) : "–"), {
    width: "3.8rem",
    title: "share of truncated rollouts",
    from: 920,
  }),
  numeric("tool_calls", "tools", (row) => tools(row), { width: "4.6rem", title: "tool calls, and those that failed", from: 1080 }),
  numeric("staleness", "stale", (row) => number(row.staleness), { width: "4.4rem", title: "updates between its oldest token and its use", from: 640 }),
  numeric("duration", "time", (row) => seconds(row.total_duration_s), { width: "5rem", title: "of its longest rollout", from: 1160 }),
];

function rolloutColumns(rewardNames) {
  const parts = rewardNames.length > 1 ? rewardNames.slice(0, MOST_REWARDS) : [];
  return [
    numeric("step", "step", (row) => number(row.step), { width: "3.8rem", from: 440 }),
    { name: "id", label: "rollout", width: "6rem", link: true, sort: "id", class: "cut", cell: (row) => oneLine(row.rollout_id, 60) },
    { name: "status", label: "status", width: "5.4rem", from: 480, cell: (row) => badge(row.status) },
    { name: "prompt", label: "prompt", width: "minmax(6rem, 2fr)", class: "cut", from: 760, cell: (row) => oneLine(row.prompt_preview, 300) },
    {
      name: "completion",
      label: "completion",
      width: "minmax(7rem, 3fr)",
      class: "cut",
      cell: (row) => (row.error ? `error: ${oneLine(row.error, 300)}` : oneLine(row.completion_preview, 300)),
    },
    numeric("reward", "reward", (row) => number(row.reward)),
    ...parts.map((name) =>
      numeric(`reward.${name}`, oneLine(name, 20), (row) => number(row.rewards[name]), { width: "6rem", from: 1300, class: "cut" }),
    ),
    numeric("advantage", "adv.", (row) => signed(row.advantage, 2), { width: "4.4rem", title: "advantage", from: 640 }),
    numeric("length", "length", (row) => number(row.num_tokens), { width: "4.6rem", title: "tokens that the policy sampled", from: 440 }),
    numeric("turns", "turns", (row) => String(row.num_turns), { width: "4rem", from: 1320 }),
    numeric("tool_calls", "tools", (row) => tools(row), { width: "4.6rem", title: "tool calls, and those that failed", from: 1020 }),
    numeric("staleness", "stale", (row) => number(row.staleness), { width: "4.2rem", title: "updates between its oldest token and its use", from: 860 }),
    numeric("entropy", "entropy", (row) => number(row.entropy_mean), { width: "5rem", title: "mean entropy of its tokens, nats", from: 1400 }),
    numeric("ratio_max", "max. ratio", (row) => number(row.ratio_max, 2), { width: "5.6rem", title: "highest importance weight of a token", from: 1500 }),
  ];
}

function tools(row) {
  if (!row.num_tool_calls) {
    return "–";
  }
  return row.num_failed_tool_calls ? `${row.num_tool_calls} (${row.num_failed_tool_calls} ✗)` : String(row.num_tool_calls);
}

export function versions(row) {
  return span(row.version_min, row.version_max);
}
