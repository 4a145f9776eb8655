/* Where to look first: the best and worst rollouts, and the prompts whose reward moved most between steps. */

import { get } from "./api.js";
import { QueryBox } from "./query_box.js";
import { badge, empty, fill, h, number, oneLine, plural, signed } from "./dom.js";
import { address, go } from "./routes.js";

export async function promptsView({ app, main, parameters, signal }) {
  const { run, q } = parameters;
  const box = new QueryBox({ app, names: [], value: q || "", onChange: (text) => go("prompts", { run, q: text }) });
  const place = h("div", { class: "extremes" });
  fill(main, h("h1", { class: "visually-hidden" }, "Prompts"), box.element, place);
  app.list = address("prompts", { run, q });
  let found;
  try {
    found = await get("extremes", { run, q, k: 12 }, signal);
  } catch (error) {
    if (error.status !== 400) {
      throw error;
    }
    box.show(error);
    fill(place, empty("The query cannot be read.", "The mistake is marked above."));
    return { title: "Prompts" };
  }
  if (!found.best.length && !found.worst.length && !found.improved.length) {
    fill(place, empty("Nothing to compare yet.", "Scored rollouts are needed."));
    return { title: "Prompts" };
  }
  fill(
    place,
    changes("Most improved prompts", "first occurrence against the last", found.improved, run),
    changes("Most worsened prompts", "first occurrence against the last", found.worsened, run),
    rollouts("Best rollouts", found.best, run),
    rollouts("Worst rollouts", found.worst, run),
  );
  return { title: "Prompts" };
}

function changes(title, hint, found, run) {
  const row = (each) =>
    h(
      "tr",
      {},
      h("td", { class: "cut-cell" }, h("a", { href: address("prompt", { run, hash: each.prompt_hash }) }, oneLine(each.last.prompt_preview, 160) || "(empty)")),
      h("td", { class: "numeric" }, `${number(each.first.reward_mean, 2)} → ${number(each.last.reward_mean, 2)}`),
      h("td", { class: `numeric ${each.change > 0 ? "up" : "down"}` }, signed(each.change, 2)),
      h("td", { class: "numeric" }, `${number(each.first.step)} → ${number(each.last.step)}`),
    );
  return panel(title, hint, found, ["prompt", "mean reward", "change", "step"], row, "No prompt was seen twice.");
}

function rollouts(title, found, run) {
  const row = (each) =>
    h(
      "tr",
      {},
      h("td", { class: "cut-cell" }, h("a", { href: address("rollout", { run, id: each.rollout_id, seq: each.seq }) }, oneLine(each.prompt_preview, 90) || each.rollout_id), h("br"), h("span", { class: "hint" }, oneLine(each.completion_preview, 160))),
      h("td", { class: "numeric" }, number(each.reward)),
      h("td", {}, badge(each.status)),
      h("td", { class: "numeric" }, number(each.step)),
    );
  return panel(title, "", found, ["prompt and completion", "reward", "status", "step"], row, "None.");
}

function panel(title, hint, found, names, row, nothing) {
  return h(
    "section",
    { class: "panel" },
    h("h2", {}, title, hint ? h("small", {}, hint) : null),
    found.length
      ? h(
          "table",
          { class: "plain fixed", "aria-label": `${title}: ${plural(found.length, "row")}` },
          h("thead", {}, h("tr", {}, names.map((name, index) => h("th", { scope: "col", class: index && name !== "status" ? "numeric" : null }, name)))),
          h("tbody", {}, found.map(row)),
        )
      : h("p", { class: "hint" }, nothing),
  );
}
