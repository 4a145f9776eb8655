/* The metrics of one run or several, each in a chart of its own; all share the cursor. */

import { get } from "./api.js";
import { append, copyButton, empty, fill, h, oneLine, plural } from "./dom.js";
import { address, go } from "./routes.js";

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
const FORMATS = { share: "percent", s: "seconds", seconds: "seconds", bytes: "bytes" };

export async function curvesView({ app, main, parameters, signal }) {
  const { run, pick } = parameters;
  const runs = [run, ...(parameters.with ? parameters.with.split(",") : [])].filter((name, index, all) => name && all.indexOf(name) === index);
  const found = await Promise.all(runs.map((name) => get("metrics", { run: name }, signal)));
  const names = [...new Set(found.flatMap((each) => each.names))].sort();
  const known = Object.assign({}, ...found.map((each) => each.known));
  const usual = USUAL.filter((name) => names.includes(name));
  const rewards = names.filter((name) => /^rewards\/.*\/mean$/.test(name));
  const shown = (pick ? pick.split(",") : [...usual.slice(0, 1), ...(rewards.length > 1 ? rewards : []), ...usual.slice(1)]).filter((name) => names.includes(name));
  const plots = h("div", { class: "curves" });
  const charts = [];
  const leave = () => charts.splice(0).forEach((chart) => chart.destroy());
  const to = (changes) => go("curves", { run, pick, with: parameters.with, ...changes });

  const others = app.runs.map((each) => each.name).filter((name) => name !== run);
  const beside = others.map((name) =>
    h(
      "label",
      { class: "check" },
      h("input", {
        type: "checkbox",
        checked: runs.includes(name),
        on: { change: (event) => to({ with: (event.target.checked ? [...runs.slice(1), name] : runs.slice(1).filter((each) => each !== name)).join(",") }) },
      }),
      ` ${oneLine(name, 40)}`,
    ),
  );
  const filter = h("input", { type: "search", id: "metric-filter", placeholder: "find a metric", autocomplete: "off", on: { input: () => drawPicker() } });
  const list = h("div", { class: "picker-list" });
  const chosen = new Set(shown);

  function drawPicker() {
    const wanted = filter.value.toLowerCase();
    fill(
      list,
      names
        .filter((name) => name.toLowerCase().includes(wanted))
        .map((name) =>
          h(
            "label",
            { class: "check", title: known[name] && known[name].help },
            h("input", {
              type: "checkbox",
              checked: chosen.has(name),
              on: {
                change: (event) => {
                  chosen[event.target.checked ? "add" : "delete"](name);
                  to({ pick: [...chosen].join(",") });
                },
              },
            }),
            ` ${oneLine(name, 80)}`,
          ),
        ),
    );
  }

  if (names.length === 0) {
    fill(main, h("h1", { class: "visually-hidden" }, "Curves"), empty("No metrics yet.", "They appear after the first optimizer step."));
    return { title: "Curves" };
  }
  fill(
    main,
    h("h1", { class: "visually-hidden" }, "Curves"),
    h(
      "div",
      { class: "heading" },
      h("details", { class: "picker", open: Boolean(parameters.open) }, h("summary", {}, `${plural(shown.length, "metric")} of ${names.length}`), h("label", { for: "metric-filter", class: "visually-hidden" }, "Find a metric"), filter, list),
      pick ? h("button", { type: "button", on: { click: () => to({ pick: null }) } }, "The usual ones") : null,
      beside.length ? h("fieldset", { class: "beside" }, h("legend", {}, "Beside it"), beside) : null,
      h("span", { class: "spacer" }),
      copyButton("link", () => location.href),
    ),
    plots,
  );
  drawPicker();
  app.list = address("curves", parameters);
  let drawnSteps = null; // of this run's metrics: the heartbeat counts the same

  async function draw() {
    const answers = await Promise.all(runs.map((name) => get("metrics", { run: name, names: shown.join(",") }, signal)));
    leave();
    fill(plots);
    drawnSteps = answers[0].steps.length;
    for (const name of shown) {
      const about = known[name] || {};
      const place = h("section", { class: "panel plot", title: about.help || "" });
      append(plots, [place]);
      const series = answers
        .map((answer, index) => ({ label: runs.length > 1 ? oneLine(runs[index], 30) : "value", x: answer.steps, values: answer.series[name] || [] }))
        .filter((each) => each.values.some((value) => value !== null));
      charts.push(Charts.line(place, { title: name, unit: [about.help, about.unit && about.unit !== "share" ? `(${about.unit})` : ""].filter(Boolean).join(" "), xLabel: "step", height: 150, group: "curves", format: FORMATS[about.unit], series }));
    }
  }
  await draw();
  return {
    title: "Curves",
    leave,
    onPulse(beat) {
      // curves grow to the right: drawn anew they move nothing that is read
      if (beat.metrics !== drawnSteps) {
        draw().catch(() => {}); // the next heartbeat tries again
      }
    },
  };
}
