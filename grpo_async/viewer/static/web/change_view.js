/* The same held-out prompts before and after training, side by side. */

import { address, get, go, report } from "./api.js";
import { badge, button, copyLink, empty, fill, h, heading, hint, link, number, oneLine, panel, plural, select, spacer, text, textOf } from "./dom.js";
import { longText } from "./messages.js";

const PAGE = 12;

export async function changeView({ main, parameters, signal }) {
  const { run, first, last } = parameters;
  const title = "Before and after";
  const ask = (offset) => get("change", { run, first, last, offset, limit: PAGE }, signal);
  const found = await ask(0);
  if (!found.rows.length) {
    const how = "A run with an evaluation section evaluates before and after its training, and every evaluation.every_steps steps.";
    fill(main, empty(found.steps.length < 2 ? "A comparison needs two evaluations." : "The two evaluations have no prompt in common.", how));
    return { title };
  }
  const [from, to] = found.asked;
  const steps = found.steps.map((step) => [String(step), `step ${step}`]);
  const part = report ? `; ${plural(found.rows.length, "prompt")} shown` : "";
  const choose = (name, value) => select({ "aria-label": name }, steps, String(value), (step) => go("change", { ...parameters, first: from, last: to, [name]: step }));
  const list = h("div", { class: "pairs" }, found.rows.map(pair));
  const more = button("Show more", async () => {
    list.append(...(await ask(list.children.length)).rows.map(pair));
    more.hidden = list.children.length >= found.total;
  });
  more.hidden = found.rows.length >= found.total;
  fill(
    main,
    heading(title, report ? `step ${from} vs. step ${to}` : [choose("first", from), "vs.", choose("last", to)], hint(`${found.outcome} (${found.order}${part})`), spacer(), copyLink()),
    list,
    more,
  );
  return { title };
}

/** One prompt, and what was said to it in two evaluations; a row of /api/change. */
export function pair({ prompt, columns, sides }) {
  const [before, after] = sides;
  const level = (side, other) => (side.reward === null || other.reward === null || side.reward === other.reward ? "" : side.reward > other.reward ? "good" : "bad");
  const side = (each, other) =>
    h(
      "div",
      { class: `lined said ${level(each, other)}` },
      h(
        "header",
        { class: "row small" },
        h("strong", {}, `step ${each.step}`),
        h("span", { class: `badge ${level(each, other)}` }, `reward ${number(each.reward)}`),
        each.status === "finished" ? null : badge(each.status),
        hint(plural(each.num_tokens, "token")),
        spacer(),
        link(address("rollout", { run: each.run, id: each.id, seq: each.seq }), "open"),
      ),
      longText(each.text),
    );
  const known = Object.entries(columns).map(([name, value]) => hint(`${oneLine(name, 40)} = ${oneLine(textOf(value), 120)}`));
  return panel(
    h("div", { class: "row" }, text(prompt, "block"), known),
    h("div", { class: "sides" }, side(before, after), side(after, before)),
  );
}
