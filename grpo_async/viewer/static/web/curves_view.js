/* The plots of one run, or of several laid over each other; all share the cursor. */

import { address, besides, get, go, memory, note } from "./api.js";
import { button, checkbox, copyLink, empty, fill, h, hiddenHeading, oneLine, plural, select, spacer } from "./dom.js";

const AXES = [["step", "by step"], ["time", "by time"], ["tokens", "by tokens"]];
const FEW = 12; // runs that can be ticked without being looked for

export async function curvesView({ app, main, parameters, signal }) {
  const { run } = parameters;
  const title = "Curves";
  const others = parameters.with ? parameters.with.split(",").filter((name) => name !== run) : [];
  const settings = Object.fromEntries(["x", "smooth", "log"].map((name) => [name, parameters[name] ?? memory.get(name)]));
  const addressed = () => ({ run, with: besides(others), find: filter.value, ...settings });
  const plots = h("div", {});
  const charts = [];
  const leave = () => charts.splice(0).forEach((chart) => chart.destroy());
  let found = null;

  const change = (name, value) => {
    settings[name] = value;
    memory.set(name, value);
    note("curves", addressed());
    if (name === "x") {
      read();
    } else {
      draw();
    }
  };
  const filter = h("input", {
    type: "search", "aria-label": "Find a plot", placeholder: "find a plot or a metric", autocomplete: "off", value: parameters.find || "",
    on: { input: () => (note("curves", addressed()), draw()) },
  });
  const smooth = h("input", {
    type: "range", min: "0", max: "0.98", step: "0.02", "aria-label": "Smoothing", value: settings.smooth || "0",
    on: { input: (event) => change("smooth", Number(event.target.value) ? event.target.value : "") },
  });
  const tick = (name, isOn) => go("curves", { ...addressed(), with: besides(isOn ? [...others, name] : others.filter((each) => each !== name)) });
  const boxes = (names) => names.map((name) => checkbox(oneLine(name, 40), others.includes(name), (isOn) => tick(name, isOn)));
  const near = app.runs.map((each) => each.name).filter((name) => name !== run && !others.includes(name));
  const beside = h("details", { class: "picker" }, h("summary", {}, others.length ? `beside ${plural(others.length, "other run")}` : "lay others over it"), h("div", { class: "picker-list tiles" }, boxes([...others, ...near])));
  fill(
    main,
    hiddenHeading(title),
    h(
      "div",
      { class: "row heading" },
      filter,
      select({ "aria-label": "Horizontal axis" }, AXES, settings.x || "step", (x) => change("x", x === "step" ? "" : x)),
      h("label", { class: "check" }, "smooth ", smooth),
      checkbox("logarithmic", settings.log === "1", (isOn) => change("log", isOn ? "1" : "")),
      near.length + others.length <= FEW ? boxes([...others, ...near]) : beside,
      spacer(),
      copyLink(),
    ),
    plots,
  );
  app.list = address("curves", parameters);

  function draw() {
    const wanted = filter.value.toLowerCase();
    const fits = ({ options, metrics }) => [options.title, ...Object.keys(metrics)].some((name) => name.toLowerCase().includes(wanted));
    const chapters = [...found.chapters, { title: "Further metrics", plots: found.others, isFolded: !wanted }];
    const top = main.scrollTop;
    leave();
    fill(plots);
    for (const { title: name, plots: all, isFolded } of chapters) {
      const shown = wanted ? all.filter(fits) : all;
      if (shown.length) {
        const tiles = h("div", { class: "tiles curves" });
        const chapter = h("details", { open: !isFolded }, h("summary", {}, h("h2", {}, name, isFolded ? ` (${shown.length})` : "")), tiles);
        const fillOnce = () => chapter.open && !tiles.firstChild && shown.forEach((plot) => drawIn(tiles, plot));
        plots.append(chapter);
        fillOnce();
        chapter.addEventListener("toggle", fillOnce);
      }
    }
    main.scrollTop = top;
    if (!plots.firstChild) {
      fill(plots, wanted ? empty("No plot has that name.", button("Show all", () => ((filter.value = ""), draw()))) : empty("No metrics yet.", "They appear after the first optimizer step."));
    }
  }

  function drawIn(tiles, { options: { kind, ...options }, metrics }) {
    const place = h("section", { class: "panel", title: Object.entries(metrics).map(([name, help]) => `${name}: ${help}`).join("\n") });
    const how = { xLabel: found.axis, smooth: Number(settings.smooth) || 0, log: settings.log === "1" || options.log };
    tiles.append(place);
    charts.push(Charts[kind](place, { ...options, ...how, height: 150, group: "curves" }));
  }

  async function read() {
    found = await get("curves", { run, beside: others.join(","), axis: settings.x || "step" }, signal);
    draw();
  }

  await read();
  return {
    title,
    leave,
    onPulse({ metrics }) {
      // curves grow to the right: drawn anew they move nothing that is read, and what the pointer is over stays as it is
      if (metrics !== found.metrics && !plots.matches(":hover")) {
        read().catch(() => {}); // the next pulse tries again
      }
    },
  };
}
