/* What a query may say, from the same table as the command line's, and the keys. */

import { address, get } from "./api.js";
import { fill, h, heading, link, panel, table } from "./dom.js";

const KEYS = {
  "/": "write a query",
  "j k": "next, previous row (rollout: turn)",
  Enter: "open the marked row",
  Esc: "back: rollout, group, list, all runs",
  h: "all runs",
  "g G": "first, last row",
  r: "show new rows",
  "[ ]": "previous, next rollout of the group",
  c: "color the tokens by the next value",
  m: "tokens or trace",
  "← →": "on a token: previous, next",
  "1 … 8": "overview, curves, before and after, groups, rollouts, prompts, logs, settings",
  "?": "this page",
};

export async function helpView({ app, main, parameters, signal }) {
  const { sections } = await get("help", {}, signal);
  const { run } = parameters;
  const query = (text) => link(address("rollouts", { run, q: text }), h("code", {}, text));
  const keys = Object.entries(KEYS).map(([key, what]) => [key.split(" ").map((each) => [h("kbd", {}, each), " "]), what]);
  const row = ({ syntax, meaning, example }) =>
    example === syntax ? [query(example), meaning] : [h("code", {}, syntax), [meaning, " ", example ? query(example) : null]];
  fill(
    main,
    heading("Queries and keys"),
    panel(h("h2", {}, "Keys"), table(null, keys, { isNamed: true, className: "help" })),
    sections.map((section) => panel(h("h2", {}, section.title), table(null, section.rows.map(row), { isNamed: true, className: "help" }))),
  );
  return { title: "Help", up: () => app.list || address("groups", { run }) };
}
