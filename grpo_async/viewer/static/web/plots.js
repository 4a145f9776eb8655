/* Charts by name, each in its panel. A live update finds them again, so that they keep their zoom and what was switched off. */

import { arrange, h } from "./dom.js";

const HEIGHT = 150;

export class Plots {
  /** `group`: of charts that share their cursor and their zoom. */
  constructor(group) {
    this.group = group;
    this.panels = new Map(); // name -> {element, chart}
  }

  /** `plots` as the server gives them, in `place`. */
  show(place, plots) {
    const panels = plots.map((plot) => this.panel(plot));
    arrange(place, panels.map(({ element }) => element));
    plots.forEach(({ options }, at) => {
      const all = { ...options, height: HEIGHT, group: this.group };
      const { element, chart } = panels[at];
      if (chart) {
        chart.update(all);
      } else {
        panels[at].chart = Charts.line(element, all); // in the page by now: it has a width
      }
    });
  }

  panel({ name, metrics }) {
    if (!this.panels.has(name)) {
      const title = Object.entries(metrics).map(([metric, help]) => `${metric}: ${help}`).join("\n");
      this.panels.set(name, { element: h("section", { class: "panel", title }), chart: null });
    }
    return this.panels.get(name);
  }

  leave() {
    this.panels.forEach(({ chart }) => chart.destroy());
    this.panels.clear();
  }
}
