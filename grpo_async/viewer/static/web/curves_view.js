/* The metrics of one run or several, each in a chart of its own; all share the cursor. */

import { address, get, go } from "./api.js";
import { button, checkbox, copyLink, empty, fill, h, hiddenHeading, oneLine, plural, spacer } from "./dom.js";

const USUAL = [
  "reward",
  "reward_std",
  "frac_reward_zero_std",
  "completions/mean_length",
  "completions/clipped_ratio",
  "entropy",
  "kl",
  "grad_norm",
  "sampling/sampling_logp_difference/mean",
  "sampling/importance_sampling_ratio/mean",
  "clip_ratio/region_mean",
  "async/staleness_mean",
  "perf/trained_tokens_per_s",
  "perf/generated_tokens_per_s",
  "pipeline/trainer_idle_ratio",
  "pipeline/generator_idle_ratio",
];
const FORMATS = { share: "percent", fraction: "percent", s: "seconds", seconds: "seconds", bytes: "bytes" };

export async function curvesView({ app, main, parameters, signal }) {
  const { run, pick } = parameters;
  const title = "Curves";
  const runs = [...new Set([run, ...(parameters.with ? parameters.with.split(",") : [])])];
  const found = await Promise.all(runs.map((name) => get("metrics", { run: name }, signal)));
  const names = [...new Set(found.flatMap((each) => each.names))].sort();
  const known = Object.assign({}, ...found.map((each) => each.known));
  if (names.length === 0) {
    fill(main, hiddenHeading(title), empty("No metrics yet.", "They appear after the first optimizer step."));
    return { title };
  }
  const rewards = names.filter((name) => /^rewards\/.*\/mean$/.test(name));
  const usual = [USUAL[0], ...(rewards.length > 1 ? rewards : []), ...USUAL.slice(1)];
  const shown = (pick ? pick.split(",") : usual).filter((name) => names.includes(name));
  const plots = h("div", { class: "tiles curves" });
  const charts = [];
  const leave = () => charts.splice(0).forEach((chart) => chart.destroy());
  const to = (changes) => go("curves", { run, pick, with: parameters.with, ...changes });
  const toggled = (list, name, isOn) => (isOn ? [...list, name] : list.filter((each) => each !== name)).join(",");

  const list = h("div", { class: "picker-list tiles" });
  const filter = h("input", { type: "search", "aria-label": "Find a metric", placeholder: "find a metric", autocomplete: "off", on: { input: () => drawPicker() } });
  function drawPicker() {
    const wanted = names.filter((name) => name.toLowerCase().includes(filter.value.toLowerCase()));
    const box = (name) => checkbox(oneLine(name, 80), shown.includes(name), (isOn) => to({ pick: toggled(shown, name, isOn) }), { title: known[name].help });
    fill(list, wanted.map(box));
  }

  const others = app.runs.map((each) => each.name).filter((name) => name !== run);
  const beside = others.map((name) => checkbox(oneLine(name, 40), runs.includes(name), (isOn) => to({ with: toggled(runs.slice(1), name, isOn) })));
  fill(
    main,
    hiddenHeading(title),
    h(
      "div",
      { class: "row heading" },
      h("details", { class: "picker" }, h("summary", {}, `${plural(shown.length, "metric")} of ${names.length}`), filter, list),
      pick ? button("The usual ones", () => to({ pick: null })) : null,
      beside.length ? h("div", { class: "row", role: "group", "aria-label": "Beside it" }, "Beside it: ", beside) : null,
      spacer(),
      copyLink(),
    ),
    plots,
  );
  drawPicker();
  app.list = address("curves", parameters);
  let drawnSteps = null; // of this run's metrics: the pulse counts the same

  async function draw() {
    const answers = await Promise.all(runs.map((name) => get("metrics", { run: name, names: shown.join(",") }, signal)));
    leave();
    fill(plots);
    drawnSteps = answers[0].steps.length;
    for (const name of shown) {
      const { help = "", unit = "" } = known[name];
      const place = h("section", { class: "panel", title: help });
      plots.append(place);
      const series = answers
        .map((answer, index) => ({ label: runs.length > 1 ? oneLine(runs[index], 30) : "value", x: answer.steps, values: answer.series[name] }))
        .filter((each) => each.values.some((value) => value !== null));
      const about = FORMATS[unit] === "percent" || !unit ? help : `${help} (${unit})`;
      charts.push(Charts.line(place, { title: name, unit: about, height: 150, group: "curves", format: FORMATS[unit], series }));
    }
  }
  await draw();
  return {
    title,
    leave,
    onPulse(pulse) {
      // curves grow to the right: drawn anew they move nothing that is read
      if (pulse.metrics !== drawnSteps) {
        draw().catch(() => {}); // the next pulse tries again
      }
    },
  };
}
