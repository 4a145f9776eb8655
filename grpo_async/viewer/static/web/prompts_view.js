/* Where to look first: the best and worst rollouts, and the prompts whose reward moved most between steps. */

import { address, get, go, report } from "./api.js";
import { badge, empty, fill, h, hiddenHeading, hint, link, number, oneLine, panel, plural, signed, table, wrongQuery } from "./dom.js";
import { QueryBox } from "./query_box.js";

export async function promptsView({ app, main, parameters, signal }) {
  const { run, q } = parameters;
  const title = "Prompts";
  const box = new QueryBox({ app, names: [], value: q || "", onChange: (text) => go("prompts", { run, q: text }) });
  const place = h("div", { class: "tiles extremes" });
  fill(main, hiddenHeading(title), report ? null : box.element, place);
  let found;
  try {
    found = await get("extremes", { run, q, k: 12 }, signal);
  } catch (error) {
    if (error.status !== 400) {
      throw error;
    }
    box.show(error);
    fill(place, wrongQuery());
    return { title };
  }
  if (!found.best.length && !found.worst.length && !found.improved.length) {
    fill(place, empty("Nothing to compare yet.", "Scored rollouts are needed."));
    return { title };
  }
  fill(
    place,
    changes("Most improved prompts", found.improved, run),
    changes("Prompts that got worse", found.worsened, run),
    rollouts("Best rollouts", found.best, run),
    rollouts("Worst rollouts", found.worst, run),
  );
  return { title };
}

function changes(title, found, run) {
  const row = ({ prompt_hash: hash, first, last, change }) => [
    link(address("prompt", { run, hash }), oneLine(last.prompt_preview, 160) || "(empty)"),
    `${number(first.reward_mean, 2)} → ${number(last.reward_mean, 2)}`,
    h("span", { class: `level ${change > 0 ? "good" : "bad"}` }, signed(change, 2)),
    `${number(first.step)} → ${number(last.step)}`,
  ];
  const nothing = "No prompt that was seen more than once.";
  return list([title, " ", hint("first vs. last occurrence")], title, ["prompt", "#mean reward", "#change", "#step"], found.map(row), nothing);
}

function rollouts(title, found, run) {
  const row = (each) => [
    [
      link(address("rollout", { run, id: each.rollout_id, seq: each.seq }), oneLine(each.prompt_preview, 90) || each.rollout_id),
      h("br"),
      hint(oneLine(each.completion_preview, 160)),
    ],
    badge(each.status),
    number(each.reward),
    number(each.step),
  ];
  return list(title, title, ["prompt and completion", "status", "#reward", "#step"], found.map(row), "None.");
}

function list(heading, title, heads, rows, nothing) {
  const label = `${title}: ${plural(rows.length, "row")}`;
  return panel(h("h2", {}, heading), rows.length ? table(heads, rows, { label, className: "texts" }) : h("p", { class: "hint" }, nothing));
}
