/* One run as a whole: whether it learns and why not, its main curves. It follows a running run. */

import { address, download, get, joined, report, reportAddress } from "./api.js";
import { arrange, badge, button, fill, h, heading, hint, link, number, oneLine, panel, part, spacer, statistics, table } from "./dom.js";
import { Plots } from "./plots.js";

export async function runView({ app, main, parameters, signal }) {
  const { run } = parameters;
  const plots = new Plots("run");
  const head = part(({ status, level, outcome, verdict, error }) => [
    heading(
      run,
      badge(status, level),
      hint(outcome),
      spacer(),
      report ? null : button("Report", () => download(reportAddress(run), `${run}.html`), { title: "This page as a file, with its data" }),
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
  const rollout = (id) => link(address("rollout", { run, id }), oneLine(id));
  const tables = part((all) =>
    all.map(({ caption, head, rows, of_rollouts: isLinked }) =>
      panel(h("h3", {}, caption), table(head, isLinked ? rows.map(([id, ...rest]) => [rollout(id), ...rest]) : rows, { label: caption, isNamed: true })),
    ),
  );
  const relatives = part(() => family(app.runs, run));
  const made = h("p", { class: "hint said" }, report && `Made ${report.made}, from ${report.folder}.`);
  let found = null;
  let state = null; // of the last poll

  async function draw() {
    found = await get("run", { run }, signal);
    const { status, level, outcome, verdict, error, problems } = found;
    head.show({ status, level, outcome, verdict, error });
    findings.show(found.findings);
    foot.show({ statistics: found.statistics, problems });
    tables.show(found.tables);
    relatives.show(app.runs.map(({ name, fork }) => [name, fork]));
    arrange(main, [head.element, relatives.element, place, findings.element, foot.element, tables.element, made]);
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

/** The runs that were forked from each other, as a tree with what each changed and came to: "with-cispo, from step 6: loss.type dapo →
    cispo, held out 0.975"; null for a run without relatives. */
function family(runs, run) {
  const known = new Map(runs.map((each) => [each.name, each]));
  const ancestors = [run];
  for (let parent = known.get(run)?.fork?.parent; parent && !ancestors.includes(parent); parent = known.get(parent)?.fork?.parent) {
    ancestors.push(parent);
  }
  const members = [];
  const tree = (name, step) => {
    members.push(name);
    const children = runs.filter(({ name: child, fork }) => fork?.parent === name && !members.includes(child));
    const label = name === run ? h("strong", {}, oneLine(name)) : known.has(name) ? link(address("run", { run: name }), oneLine(name)) : oneLine(name);
    const below = children.map((child) => tree(child.name, child.fork.step));
    const about = hint();
    if (known.has(name) && (children.length || step !== undefined)) {
      const told = ({ changes, held_out: held }) => [changes && `: ${changes}`, held && `, held out ${number(held[1])}`];
      get(report ? "run" : "card", { run: name }).then((card) => fill(about, told(card)), () => {});
    }
    return h("li", {}, label, step === undefined ? null : hint(`, from step ${step}`), about, below.length ? h("ul", {}, below) : null);
  };
  const drawn = h("ul", { "aria-label": "Family" }, tree(ancestors.at(-1)));
  const others = members.filter((name) => name !== run && known.has(name));
  const links = [["curves", "Curves of the family"], ["config", "Settings that differ"]].map(([view, label]) => link(address(view, { run, with: joined(others) }), label));
  return members.length > 1 ? panel(h("h3", {}, "Family"), drawn, others.length ? h("div", { class: "row" }, links) : null) : null;
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
