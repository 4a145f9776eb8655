/* The plots of one run, or of several laid over each other; all share the cursor. */

import { get, joined, note, split } from "./api.js";
import { Plots } from "./plots.js";
import { arrange, button, compared, empty, fill, h, hiddenHeading } from "./dom.js";

export async function curvesView({ main, parameters, signal }) {
  const { run } = parameters;
  const title = "Curves";
  const others = split(parameters.with).filter((name) => name !== run);
  const addressed = () => ({ run, with: joined(others), find: filter.value });
  const place = h("div", {});
  const plots = new Plots("curves");
  const folds = new Map(); // of chapters, by their titles
  let found = null;

  const filter = h("input", {
    type: "search", "aria-label": "Find a plot", placeholder: "find a plot or a metric", autocomplete: "off", value: parameters.find || "",
    on: { input: () => (note("curves", addressed()), draw()) },
  });
  fill(
    main,
    hiddenHeading(title),
    h("div", { class: "row heading" }, filter, compared(others.length + 1)),
    place,
  );

  function draw() {
    const wanted = filter.value.toLowerCase();
    const fits = ({ options, metrics }) => [options.title, ...Object.keys(metrics)].some((name) => name.toLowerCase().includes(wanted));
    const chapters = [...found.chapters, { title: "Further metrics", plots: found.others, isFolded: !wanted }];
    const shown = chapters.map((chapter) => ({ ...chapter, plots: chapter.plots.filter(fits) })).filter((chapter) => chapter.plots.length).map(fold);
    const nothing = () =>
      wanted ? empty("No plot matches.", button("Show all", () => ((filter.value = ""), draw()))) : empty("No metrics yet.", "They appear after the first optimizer step.");
    arrange(place, shown.length ? shown.map(({ element }) => element) : [nothing()]);
    shown.forEach(fillFold);
  }

  /** The fold of a chapter stays from one drawing to the next, as somebody opened or closed it. */
  function fold(chapter) {
    const key = `${chapter.title} ${Boolean(chapter.isFolded)}`;
    if (!folds.has(key)) {
      const made = { count: h("span", {}), tiles: h("div", { class: "tiles curves" }) };
      const summary = h("summary", {}, h("h2", {}, chapter.title, made.count));
      made.element = h("details", { open: !chapter.isFolded, on: { toggle: () => fillFold(made) } }, summary, made.tiles);
      folds.set(key, made);
    }
    return Object.assign(folds.get(key), { chapter });
  }

  /** Charts are drawn when their chapter is opened. */
  function fillFold({ element, count, tiles, chapter }) {
    fill(count, chapter.isFolded ? ` (${chapter.plots.length})` : "");
    if (element.open) {
      plots.show(tiles, chapter.plots);
    }
  }

  async function read() {
    found = await get("curves", { run, compare_with: joined(others) }, signal);
    draw();
  }

  await read();
  return {
    title,
    leave: () => plots.leave(),
    onStatus({ metrics }) {
      if (metrics !== found.metrics) {
        read().catch(() => {}); // the next poll tries again
      }
    },
  };
}
