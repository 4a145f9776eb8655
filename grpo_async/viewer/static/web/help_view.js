/* What a query may say, from the same table as the command line's, and the keys. */

import { get } from "./api.js";
import { fill, h } from "./dom.js";
import { address } from "./routes.js";

const KEYS = [
  ["/", "write a query"],
  ["j k", "next, previous row (rollout: turn)"],
  ["Enter", "open the marked row"],
  ["Esc", "back: rollout, group, list"],
  ["g G", "first, last row"],
  ["r", "show what was written since"],
  ["[ ]", "previous, next rollout of the group"],
  ["c", "colour the tokens by the next figure"],
  ["m", "tokens or messages"],
  ["← →", "on a token: the one before, the next"],
  ["1 … 5", "groups, rollouts, prompts, curves, timeline"],
  ["?", "this page"],
];

function query(run, text) {
  return h("a", { href: address("rollouts", { run, q: text }) }, h("code", {}, text));
}

export async function helpView({ app, main, parameters, signal }) {
  const { sections } = await get("help", {}, signal);
  const { run } = parameters;
  fill(
    main,
    h("div", { class: "heading" }, h("h1", {}, "Queries and keys")),
    h("section", { class: "panel" }, h("h2", {}, "Keys"), h("dl", { class: "keys" }, KEYS.map(([key, words]) => [h("dt", {}, key.split(" ").map((each) => h("kbd", {}, each))), h("dd", {}, words)]))),
    sections.map((section) =>
      h(
        "section",
        { class: "panel" },
        h("h2", {}, section.title),
        h(
          "table",
          { class: "plain help-table" },
          h(
            "tbody",
            {},
            section.rows.map((row) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, row.example === row.syntax ? query(run, row.example) : h("code", {}, row.syntax)),
                h("td", {}, row.meaning, row.example && row.example !== row.syntax ? h("span", { class: "example" }, query(run, row.example)) : null),
              ),
            ),
          ),
        ),
      ),
    ),
  );
  return { title: "Help", up: () => app.list || address("groups", { run }) };
}
