/* The columns of the two tables, and from which width on (px) each is shown (page.css has a rule for each width). */

import { badge, number, oneLine, percent, range, signed } from "./dom.js";

const MAX_REWARDS = 4;
const STALENESS = "optimizer steps between its oldest token and its use";

/** `rows`: the first ones, which say what the reward is made of. */
export function columnsOf(kind, rows) {
  return kind === "groups" ? GROUPS : rolloutColumns([...new Set(rows.flatMap((row) => Object.keys(row.rewards)))]);
}

/** What a query calls a part of the reward: rewards['format']. */
const rewardPart = (name) => `rewards['${name.replaceAll("'", "''")}']`;

const numeric = (sort, label, cell, more = {}) => ({ label, sort, numeric: true, cell, ...more });
const status = { label: "status", from: 480, cell: (row) => badge(row.status) };
const tools = numeric("tool_calls", "tools", toolCalls, { title: "tool calls, and those that failed", from: 1100 });

const GROUPS = [
  numeric("step", "step", (row) => number(row.step)),
  numeric("id", "group", (row) => String(row.group_id), { link: true }),
  status,
  { label: "prompt", grows: true, cell: (row) => oneLine(row.prompt_preview, 300) },
  numeric("reward", "reward", (row) => number(row.reward_mean), { title: "mean reward of its rollouts" }),
  numeric("std", "std", (row) => number(row.reward_std), { title: "standard deviation of its rewards", from: 700 }),
  numeric("max", "min – max", (row) => range(row.reward_min, row.reward_max), { title: "lowest and highest reward; sorts by the highest", from: 1100 }),
  numeric("size", "size", (row) => (row.num_matching < row.size ? `${row.num_matching} of ${row.size}` : String(row.size)), { title: "rollouts of the group; of those, how many match", from: 900 }),
  numeric("length", "length", (row) => number(row.num_tokens_mean, 1), { title: "mean of the tokens that the policy sampled", from: 480 }),
  numeric("truncated", "truncated", (row) => (row.num_truncated ? percent(row.num_truncated / row.size) : "–"), { title: "fraction of truncated rollouts", from: 900 }),
  tools,
  numeric("staleness", "staleness", (row) => number(row.staleness), { title: STALENESS, from: 700 }),
  numeric("duration", "time", (row) => Charts.duration(row.total_duration_s), { title: "of its longest rollout", from: 1100 }),
];

function rolloutColumns(rewardNames) {
  const parts = rewardNames.length > 1 ? rewardNames.slice(0, MAX_REWARDS) : [];
  return [
    numeric("step", "step", (row) => number(row.step), { from: 480 }),
    { label: "rollout", link: true, sort: "id", cell: (row) => oneLine(row.rollout_id, 60) },
    status,
    { label: "prompt", grows: true, from: 700, cell: (row) => oneLine(row.prompt_preview, 300) },
    { label: "completion", grows: true, cell: (row) => oneLine(row.error ? `error: ${row.error}` : row.completion_preview, 300) },
    numeric("reward", "reward", (row) => number(row.reward)),
    ...parts.map((name) => numeric(rewardPart(name), oneLine(name, 20), (row) => number(row.rewards[name]), { from: 1300 })),
    numeric("advantage", "advantage", (row) => signed(row.advantage, 2), { from: 700 }),
    numeric("length", "length", (row) => number(row.num_tokens), { title: "tokens that the policy sampled", from: 480 }),
    numeric("turns", "turns", (row) => String(row.num_turns), { from: 1300 }),
    tools,
    numeric("staleness", "staleness", (row) => number(row.staleness), { title: STALENESS, from: 900 }),
    numeric("entropy", "entropy", (row) => number(row.entropy_mean), { title: "mean entropy of its tokens, nats", from: 1500 }),
    numeric("ratio_max", "max. ratio", (row) => number(row.ratio_max, 2), { title: "highest importance weight of a token", from: 1500 }),
  ];
}

function toolCalls(row) {
  if (!row.num_tool_calls) {
    return "–";
  }
  return row.num_failed_tool_calls ? `${row.num_tool_calls} (${row.num_failed_tool_calls} ✗)` : String(row.num_tool_calls);
}
