/* One run as a whole: whether it learns and why not, its main curves, a held-out prompt before and after. It follows a run that goes on. */

import { address, get, reportAddress } from "./api.js";
import { badge, copyLink, fill, h, heading, hint, link, panel, spacer, statistics } from "./dom.js";
import { pair, told } from "./change_view.js";

const MAIN = ["held-out", "reward", "lengths", "entropy", "zero-variance", "ratio"]; // plots; the first four that there are

export async function runView({ app, main, parameters, signal }) {
  const { run } = parameters;
  const charts = [];
  const leave = () => charts.splice(0).forEach((chart) => chart.destroy());
  let found = null;
  let state = null; // of the last pulse

  async function draw() {
    const asked = [get("run", { run }, signal), get("curves", { run }, signal), get("change", { run, limit: 1 }, signal).catch(() => ({ rows: [] }))];
    const [answer, { chapters }, change] = await Promise.all(asked);
    found = answer;
    leave();
    const top = main.scrollTop;
    const plots = new Map(chapters.flatMap((chapter) => chapter.plots).map((plot) => [plot.name, plot]));
    const chosen = MAIN.filter((name) => plots.has(name)).slice(0, 4);
    const places = chosen.map(() => h("section", { class: "panel" }));
    fill(
      main,
      heading(
        run,
        badge(found.status, found.level),
        hint(found.outcome),
        spacer(),
        h("a", { class: "button", href: reportAddress(run), target: "_blank", rel: "noopener" }, "Report"),
        copyLink(),
      ),
      h("p", { class: `verdict lined filled said ${found.verdict.level}`, "data-verdict": found.verdict.key }, found.verdict.text),
      found.error ? h("pre", { class: "lined filled bad said" }, found.error) : null,
      places.length ? h("div", { class: "tiles overview" }, places) : null,
      change.rows.length
        ? [h("div", { class: "row heading" }, h("h2", {}, "The same held-out prompt before and after"), link(address("change", { run }), told(change.counts))), change.rows.map(pair)]
        : null,
      h("h2", {}, "What the numbers say"),
      h("ul", { class: "findings" }, found.findings.map((each) => finding(each, run))),
      panel(h("h3", {}, "What bounds its speed"), h("p", { class: "said" }, found.advice)),
      panel(statistics(found.statistics.map(([label, value, note]) => [label, value, note]))),
      found.problems.length ? panel(h("h3", {}, "What is missing"), h("ul", {}, found.problems.map((each) => h("li", { class: "said" }, each)))) : null,
    );
    places.forEach((place, at) => {
      const { kind, ...options } = plots.get(chosen[at]).options;
      charts.push(Charts[kind](place, { ...options, height: 150, group: "run" }));
    });
    main.scrollTop = top;
  }

  await draw();
  app.list = address("run", { run });
  return {
    title: "Overview",
    leave,
    onPulse({ metrics, num_evaluations: evaluations, status }) {
      const isOther = metrics !== found.metrics || evaluations !== found.num_evaluations || (state !== null && status.state !== state);
      state = status.state;
      if (isOther) {
        draw().catch(() => {}); // the next pulse tries again
      }
    },
  };
}

function finding(each, run) {
  const rollouts = each.query === null ? null : link(address("groups", { run, q: each.query, sort: each.sort }), "See the rollouts");
  return h(
    "li",
    { class: `lined panel ${each.level}` },
    h("p", {}, h("span", { class: "badge" }, each.word), " ", h("strong", {}, each.what)),
    h("p", { class: "said" }, `${each.text} ${each.do} `, rollouts),
  );
}
