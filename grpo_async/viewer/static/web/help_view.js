/* What a query may say, from the same table as the command line's, and the keys. */

import { address, get } from "./api.js";
import { fill, h, heading, link, panel, table } from "./dom.js";

const KEYS = {
  "/": "write a query",
  "j k": "next, previous row (rollout: turn)",
  Enter: "open the marked row",
  Esc: "back: rollout, group, list, all runs",
  h: "all runs",
  r: "show new rows",
  "[ ]": "previous, next rollout of the group",
  c: "color the tokens by the next value",
  m: "tokens or trace",
  "← →": "on a token: previous, next",
  "1 … 5": "overview, curves, groups, rollouts, settings",
  "?": "this page",
};

export async function helpView({ app, main, parameters, signal }) {
  const { sections } = await get("help", {}, signal);
  const { run } = parameters;
  const query = (text) => link(address("rollouts", { run, q: text }), h("code", {}, text));
  const keys = Object.entries(KEYS).map(([key, what]) => [key.split(" ").map((each) => [h("kbd", {}, each), " "]), what]);
  const row = ([syntax, meaning], isQuery) => [isQuery ? query(syntax) : h("code", {}, syntax), meaning];
  fill(
    main,
    heading("Queries and keys"),
    panel(h("h2", {}, "Keys"), table(null, keys, { isNamed: true, className: "help" })),
    sections.map(([title, rows], at) =>
      panel(h("h2", {}, title), table(null, rows.map((each) => row(each, at === 0)), { isNamed: true, className: "help" })),
    ),
  );
  return { title: "Help", up: () => app.list || address("groups", { run }) };
}
