/* One run as a whole: whether it learns and why not, its main curves. It follows a running run. */

import { address, get, report, reportAddress, traceAddress } from "./api.js";
import { arrange, badge, h, heading, hint, link, panel, part, spacer, statistics, table } from "./dom.js";
import { Plots } from "./plots.js";

export async function runView({ main, parameters, signal }) {
  const { run } = parameters;
  const plots = new Plots("run");
  const head = part(({ status, level, outcome, verdict, error }) => [
    heading(
      run,
      badge(status, level),
      hint(outcome),
      spacer(),
      report ? null : [
        h("a", { class: "button", href: reportAddress(run), download: `${run}.html`, title: "This page as a file, with its data" }, "Report"),
        h("a", { class: "button", href: traceAddress(run), download: `${run}.trace.json.gz`, title: "Open the file at ui.perfetto.dev" }, "Timeline"),
      ],
    ),
    h("p", { class: `verdict lined filled said ${verdict.level}`, "data-verdict": verdict.key }, verdict.text),
    error ? h("pre", { class: "lined filled bad said" }, error) : null,
  ]);
  const place = h("div", { class: "tiles overview" });
  const findings = part((all) => [h("h2", {}, "What the numbers say"), h("ul", { class: "findings bare" }, all.map((each) => finding(each, run)))]);
  const foot = part(({ statistics: numbers, problems }) => [
    panel(statistics(numbers)),
    problems.length ? panel(h("h3", {}, "What is missing"), h("ul", {}, problems.map((each) => h("li", { class: "said" }, each)))) : null,
  ]);
  const evaluations = part((tables) => tables.map(({ caption, head, rows }) => panel(h("h3", {}, caption), table(head, rows, { label: caption, isNamed: true }))));
  const made = h("p", { class: "hint said" }, report && `Made ${report.made}, from ${report.folders.join(", ")}.`);
  let found = null;
  let state = null; // of the last poll

  async function draw() {
    found = await get("run", { run }, signal);
    const { status, level, outcome, verdict, error, problems } = found;
    head.show({ status, level, outcome, verdict, error });
    findings.show(found.findings);
    foot.show({ statistics: found.statistics, problems });
    evaluations.show(found.evaluations);
    arrange(main, [head.element, place, findings.element, foot.element, evaluations.element, made]);
    plots.show(place, found.plots);
  }

  await draw();
  return {
    title: "Overview",
    leave: () => plots.leave(),
    onStatus({ metrics, num_evaluations: evaluations, status }) {
      const isOther = metrics !== found.metrics || evaluations !== found.num_evaluations || (state !== null && status.state !== state);
      state = status.state;
      if (isOther) {
        draw().catch(() => {}); // the next poll tries again
      }
    },
  };
}

function finding(each, run) {
  const rollouts = each.query === null || report ? null : link(address("groups", { run, q: each.query, sort: each.sort }), "See the rollouts");
  const plot = each.plot === null ? null : link(address("curves", { run, find: each.plot }), "See the plot");
  return h(
    "li",
    { class: `panel lined ${each.level}` },
    h("p", {}, h("span", { class: "badge" }, each.severity), " ", h("strong", {}, each.title)),
    h("p", { class: "said" }, `${each.text} ${each.fix} `, plot, " ", rollouts),
    report && each.command ? h("p", { class: "said" }, h("code", {}, each.command)) : null,
  );
}
