/* One prompt over the steps of all runs that are open here: how its reward moved, and two of its groups to compare. */

import { get } from "./api.js";
import { badge, copyButton, empty, fill, h, number, oneLine, percent, plural, span } from "./dom.js";
import { message } from "./said.js";
import { address, place } from "./routes.js";

export async function promptView({ app, main, parameters, signal }) {
  const { run, hash, superseded } = parameters;
  const names = app.runs.map((each) => each.name);
  const others = names.filter((name) => name !== run);
  const found = await Promise.all(
    [run, ...others].map(async (name) => (await get("prompt", { run: name, hash, superseded }, signal)).groups.map((group) => ({ ...group, run: name }))),
  );
  const groups = found.flat();
  if (groups.length === 0) {
    fill(main, empty("No group has this prompt.", h("a", { href: app.list || address("groups", { run }) }, "Back")));
    return { title: "Prompt" };
  }
  const { group } = await get("group", { run: groups[0].run, id: groups[0].group_id, seq: groups[0].seq }, signal);
  const isMany = new Set(groups.map((each) => each.run)).size > 1;
  const key = (each) => `${each.run}:${each.seq}`;
  let [left, right] = [key(groups[0]), key(groups[groups.length - 1])];
  const link = h("button", { type: "button", class: "primary", disabled: groups.length < 2, on: { click: () => compare() } }, "Compare left and right");

  /** The best rollout of each of the two. */
  async function compare() {
    const best = await Promise.all(
      [left, right].map(async (chosen) => {
        const of = groups.find((each) => key(each) === chosen);
        const { summaries } = await get("group", { run: of.run, id: of.group_id, seq: of.seq }, signal);
        const first = [...summaries].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity))[0];
        return place(of.run, first.rollout_id, of.seq);
      }),
    );
    location.hash = address("compare", { run, a: best[0], b: best[1] });
  }

  const radio = (name, each, isChosen, choose) =>
    h("td", {}, h("input", { type: "radio", name, checked: isChosen, "aria-label": `${name}: step ${each.step ?? "none"}, group ${each.group_id}`, on: { change: choose } }));
  const rows = groups.map((each) =>
    h(
      "tr",
      {},
      radio("left", each, key(each) === left, () => (left = key(each))),
      radio("right", each, key(each) === right, () => (right = key(each))),
      isMany ? h("td", { class: "said" }, oneLine(each.run, 40)) : null,
      h("td", { class: "numeric" }, number(each.step)),
      h("td", { class: "numeric" }, h("a", { href: address("group", { run: each.run, id: each.group_id, seq: each.seq, superseded }) }, String(each.group_id))),
      h("td", {}, badge(each.status)),
      h("td", { class: "numeric" }, number(each.reward_mean)),
      h("td", { class: "numeric" }, each.reward_min === null ? "–" : `${number(each.reward_min, 2)} – ${number(each.reward_max, 2)}`),
      h("td", { class: "numeric" }, number(each.num_tokens_mean, 1)),
      h("td", { class: "numeric" }, percent(each.num_truncated / each.size)),
      h("td", { class: "numeric" }, span(each.version_min, each.version_max)),
    ),
  );
  const columns = ["left", "right", ...(isMany ? ["run"] : []), "step", "group", "status", "reward", "min – max", "length", "truncated", "versions"];
  const chart = h("div", { class: "plot" });
  fill(
    main,
    h("div", { class: "heading" }, h("h1", {}, "Same prompt"), h("span", { class: "hint" }, plural(groups.length, "group")), h("span", { class: "spacer" }), copyButton("link", () => location.href)),
    h("section", { class: "panel" }, group.messages.map(message)),
    groups.length > 1 ? h("section", { class: "panel" }, chart) : null,
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "plain" },
        h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col", class: ["left", "right", "run", "status"].includes(name) ? null : "numeric" }, name)))),
        h("tbody", {}, rows),
      ),
    ),
    groups.length > 1
      ? h("p", {}, link, h("span", { class: "hint" }, " the best rollout of each"))
      : h("p", { class: "hint" }, "The prompt was used once. Start the inspector with several runs to compare them."),
  );
  const drawn = groups.length > 1 ? drawChart(chart, groups) : null;
  return {
    title: "Same prompt",
    up: () => app.list || address("groups", { run }),
    leave: () => drawn && drawn.destroy(),
  };
}

function drawChart(place, groups) {
  const runs = [...new Set(groups.map((each) => each.run))];
  const series = runs.map((name) => {
    const own = groups.filter((each) => each.run === name && each.step !== null && each.reward_mean !== null).sort((a, b) => a.step - b.step);
    return {
      label: runs.length > 1 ? oneLine(name, 40) : "mean, lowest to highest",
      x: own.map((each) => each.step),
      values: own.map((each) => each.reward_mean),
      band: [own.map((each) => each.reward_min), own.map((each) => each.reward_max)],
      points: true,
    };
  }).filter((each) => each.x.length > 0);
  if (series.length === 0) {
    fill(place, h("p", { class: "hint" }, "No step has used this prompt yet."));
    return null;
  }
  return Charts.line(place, { title: "reward of this prompt by step", xLabel: "step", height: 160, group: null, series });
}
