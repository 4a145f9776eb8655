/* How the reward of one prompt moved over the steps of the runs on this page. */

import { address, get, isKnown } from "./api.js";
import { badge, copyLink, empty, fill, h, heading, hint, link, number, oneLine, panel, percent, plural, range, spacer, span, table } from "./dom.js";
import { message } from "./messages.js";

export async function promptView({ app, main, parameters, signal }) {
  const { run, hash } = parameters;
  const names = [...new Set([run, ...app.runs.map((each) => each.name)])].filter((name) => isKnown("prompt", { run: name, hash })).slice(0, Charts.COLORS); // the newest are searched
  const problems = []; // of other runs
  const groupsOf = async (name) => {
    try {
      return (await get("prompt", { run: name, hash }, signal)).groups.map((group) => ({ ...group, run: name }));
    } catch (error) {
      if (name === run) {
        throw error;
      }
      problems.push(`${name}: ${error.message}`);
      return [];
    }
  };
  const groups = (await Promise.all(names.map(groupsOf))).flat();
  const up = () => app.list || address("groups", { run });
  if (groups.length === 0) {
    fill(main, empty("No group has this prompt.", link(up(), "Back")));
    return { title: "Prompt" };
  }
  const [{ run: first, group_id: id, seq }] = groups;
  const { prompt } = await get("group", { run: first, id, seq }, signal);
  const isMany = new Set(groups.map((each) => each.run)).size > 1;
  const row = (each) => [
    ...(isMany ? [oneLine(each.run, 40)] : []),
    badge(each.status),
    number(each.step),
    link(address("group", { run: each.run, id: each.group_id, seq: each.seq }), String(each.group_id)),
    number(each.reward_mean),
    range(each.reward_min, each.reward_max),
    number(each.num_tokens_mean, 1),
    percent(each.num_truncated / each.size),
    span(each.version_min, each.version_max),
  ];
  const heads = [...(isMany ? ["run"] : []), "status", "#step", "#group", "#reward", "#min – max", "#length", "#truncated", "#versions"];
  const chart = h("div", {});
  fill(
    main,
    heading("Same prompt", hint(plural(groups.length, "group")), spacer(), copyLink()),
    panel(prompt.map((each) => message(each))),
    groups.length > 1 ? panel(chart) : null,
    table(heads, groups.map(row)),
    groups.length > 1 ? null : h("p", { class: "hint" }, "The prompt was used once."),
    problems.map((each) => h("p", { class: "hint said" }, each)),
  );
  const drawn = groups.length > 1 ? drawChart(chart, groups) : null;
  return { title: "Same prompt", up, leave: () => drawn?.destroy() };
}

function drawChart(element, groups) {
  const runs = [...new Set(groups.map((each) => each.run))];
  const series = runs.flatMap((name) => {
    const own = groups.filter((each) => each.run === name && each.step !== null && each.reward_mean !== null).sort((a, b) => a.step - b.step);
    const values = (field) => own.map((each) => each[field]);
    const label = runs.length > 1 ? oneLine(name, 40) : "mean, lowest to highest";
    const band = [values("reward_min"), values("reward_max")];
    return own.length ? [{ label, x: values("step"), values: values("reward_mean"), band, points: true }] : [];
  });
  if (series.length === 0) {
    fill(element, hint("No step has used this prompt yet."));
    return null;
  }
  return Charts.line(element, { title: "reward of this prompt by step", height: 160, group: null, series });
}
