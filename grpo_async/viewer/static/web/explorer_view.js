/* The tables of groups and of rollouts: query, charts that filter, rows. */

import { get } from "./api.js";
import { bars } from "./bars.js";
import { columnsOf } from "./columns.js";
import { append, empty, fill, h, number, plural } from "./dom.js";
import { Grid } from "./grid.js";
import { QueryBox, mapEntry, withTerm } from "./query_box.js";
import { address, go, note } from "./routes.js";

const QUICK = {
  groups: ["trained", "filtered", "stale", "failed", "truncated", "group.std=0"],
  rollouts: ["truncated", "failed", "stale", "filtered", "unscored", "clipped"],
};

export function explorerView(kind) {
  return async ({ app, main, parameters, signal }) => {
    const explorer = new Explorer(kind, { app, main, parameters, signal });
    await explorer.start();
    return explorer;
  };
}

class Explorer {
  constructor(kind, { app, main, parameters, signal }) {
    Object.assign(this, { kind, app, main, parameters, signal });
    this.title = kind === "groups" ? "Groups" : "Rollouts";
    this.sort = parameters.sort || "-seq";
    this.until = parameters.until || null;
    this.charts = [];
    this.keys = {
      j: () => this.grid && this.grid.move(1),
      k: () => this.grid && this.grid.move(-1),
      ArrowDown: () => this.grid && this.grid.move(1),
      ArrowUp: () => this.grid && this.grid.move(-1),
      PageDown: () => this.grid && this.grid.move(15),
      PageUp: () => this.grid && this.grid.move(-15),
      g: () => this.grid && this.grid.move(-1e9),
      G: () => this.grid && this.grid.move(1e9),
      Enter: (event) => (event.target.closest("a, button, summary") ? false : this.grid && this.grid.open()),
      r: () => this.showNewest(),
    };
  }

  async start() {
    const { run } = this.parameters;
    const rows = get(this.kind, this.question({ sort: this.sort, offset: 0, limit: 100, count: 1 }), this.signal).catch((error) => error);
    this.summary = await get("summary", { run }, this.signal);
    const names = [
      ...this.summary.reward_names.map((name) => ({ name: mapEntry("rewards", name), help: "a part of the reward" })),
      ...this.summary.column_names.map((name) => ({ name: mapEntry("columns", name), help: "a column of the data" })),
    ];
    this.box = new QueryBox({
      app: this.app,
      names,
      value: this.parameters.q || "",
      onChange: (q) => this.leaveTo({ q }),
    });
    this.notes = h("div", {});
    this.said = null;
    this.drawNotes(this.summary.notes);
    this.news = h("div", { class: "news", role: "status" });
    this.counts = h("p", { class: "counts", role: "status" });
    this.plots = h("div", { class: "plots" });
    this.place = h("div", { class: "grid-place" });
    fill(
      this.main,
      h("h1", { class: "visually-hidden" }, this.title),
      this.notes,
      this.box.element,
      this.quick(),
      this.chartBox(),
      h("div", { class: "over-grid" }, this.counts, this.news, this.supersededBox()),
      this.place,
    );
    this.read(await rows);
  }

  parametersNow(changes = {}) {
    const { run, q, superseded, charts } = this.parameters;
    return { run, q, sort: this.sort === "-seq" ? null : this.sort, superseded, charts, ...changes };
  }

  leaveTo(changes) {
    go(this.kind, this.parametersNow(changes));
  }

  question(changes = {}) {
    const { run, q, superseded } = this.parameters;
    return { run, q, superseded, until: this.until, ...changes };
  }

  /** `answer`: the first page with its numbers, or the error that came instead. */
  read(answer) {
    if (answer instanceof Error) {
      if (answer.status !== 400) {
        throw answer;
      }
      this.box.show(answer);
      this.total = 0;
      this.chartDetails.hidden = true;
      fill(this.place, empty("The query cannot be read.", "The mistake is marked above."));
      fill(this.counts);
      return;
    }
    this.until = String(answer.until);
    this.box.show(null);
    this.total = this.kind === "groups" ? answer.counts.groups : answer.counts.rollouts;
    this.say(answer.counts);
    this.app.list = address(this.kind, this.parametersNow());
    this.drawCharts(); // takes its room at once, so that the rows below do not move when the charts come
    if (this.total === 0) {
      fill(this.place, this.nothing());
    } else {
      this.makeGrid(answer.rows);
    }
  }

  say(counts) {
    const { q } = this.parameters;
    const all = this.parameters.superseded ? this.summary.counts_with_superseded : this.summary.counts;
    const words = `${plural(counts.rollouts, "rollout")} in ${plural(counts.groups, "group")}`;
    fill(this.counts, h("strong", {}, words), q ? ` of ${number(all.rollouts)} in ${number(all.groups)}` : "");
  }

  nothing() {
    if (this.parameters.q) {
      return empty("Nothing matches.", h("button", { type: "button", on: { click: () => this.box.set("") } }, "Show everything"));
    }
    return empty("No rollouts yet.", "They appear here as soon as the run has written the first group.");
  }

  makeGrid(firstRows) {
    const at = Number(this.parameters.at) || 0;
    const columns = columnsOf(this.kind, this.summary.reward_names);
    const load = (offset, limit) => {
      if (offset === 0 && firstRows) {
        return Promise.resolve(firstRows);
      }
      return get(this.kind, this.question({ sort: this.sort, offset, limit }), this.signal).then((answer) => answer.rows);
    };
    const { run, superseded } = this.parameters;
    this.grid = new Grid({
      label: this.title,
      columns,
      count: this.total,
      sort: this.sort,
      load,
      href: (row) =>
        this.kind === "groups"
          ? address("group", { run, id: row.group_id, seq: row.seq, superseded })
          : address("rollout", { run, id: row.rollout_id, seq: row.seq, superseded }),
      onSort: (sort) => this.leaveTo({ sort }),
      onMove: (top) => this.onMove(top),
      onError: (error) => this.box.show(error),
    });
    fill(this.place, this.grid.element);
    this.grid.reset({ count: this.total, sort: this.sort, at });
  }

  /** Where one reads is in the address, with the rows it counts: a link or the back key shows the same rows again. */
  onMove(top) {
    clearTimeout(this.moving);
    this.moving = setTimeout(() => {
      const parameters = this.parametersNow(top > 0 ? { at: top, until: this.until } : {});
      note(this.kind, parameters);
      this.app.list = address(this.kind, parameters);
    }, 200);
  }

  quick() {
    const active = this.parameters.q || "";
    return h(
      "div",
      { class: "quick", role: "group", "aria-label": "Often asked" },
      QUICK[this.kind].map((term) => {
        const is = active === term;
        return h(
          "button",
          { type: "button", class: "chip", "aria-pressed": String(is), on: { click: () => this.leaveTo({ q: is ? null : term }) } },
          term,
        );
      }),
    );
  }

  supersededBox() {
    const [counted, all] = [this.summary.counts, this.summary.counts_with_superseded];
    if (counted.rollouts === all.rollouts) {
      return null;
    }
    const box = h("input", {
      type: "checkbox",
      checked: Boolean(this.parameters.superseded),
      on: { change: (event) => this.leaveTo({ superseded: event.target.checked ? 1 : null }) },
    });
    return h("label", { class: "check" }, box, ` with ${number(all.rollouts - counted.rollouts)} superseded by a resume`);
  }

  chartBox() {
    const isOpen = this.parameters.charts ? this.parameters.charts === "1" : window.innerWidth >= 700 && window.innerHeight >= 600;
    const box = h("details", { class: "chart-box", open: isOpen }, h("summary", {}, "Charts: click or drag to filter"), this.plots);
    box.addEventListener("toggle", () => {
      if (box.open && !this.drawn && this.total > 0) {
        this.drawCharts();
      }
      if (box.open !== isOpen || this.parameters.charts) {
        this.parameters.charts = box.open ? "1" : "0";
        note(this.kind, this.parametersNow());
      }
    });
    this.chartDetails = box;
    return box;
  }

  async drawCharts() {
    if (!this.chartDetails.open || this.total === 0) {
      this.chartDetails.hidden = this.total === 0;
      return;
    }
    this.chartDetails.hidden = false;
    this.drawn = true;
    const places = ["reward", "staleness", "steps"].map(() => h("div", { class: "plot" }));
    fill(this.plots, places);
    const histogram = async (place, field, bins, format) => {
      const found = await get("histogram", this.question({ field, bins }), this.signal);
      fill(place, bars({ title: field, histogram: found, format, onTake: (term) => this.take(field, term) }));
    };
    const problem = (place) => (error) => {
      if (error.name !== "AbortError") {
        fill(place, empty("No chart", error.message));
      }
    };
    await Promise.all([
      histogram(places[0], "reward", 24, number).catch(problem(places[0])),
      histogram(places[1], "staleness", 12, number).catch(problem(places[1])),
      this.drawSteps(places[2]).catch(problem(places[2])),
    ]);
  }

  async drawSteps(place) {
    const { steps } = await get("steps", this.question(), this.signal);
    const known = steps.filter((each) => each.step !== null && each.reward_mean !== null);
    if (known.length === 0) {
      fill(place, h("section", { class: "bars" }, h("div", { class: "bars-head" }, h("h2", {}, "reward by step")), empty("No step yet")));
      return;
    }
    const box = h("div");
    fill(place, box);
    const chart = Charts.line(box, {
      title: this.parameters.q ? "mean reward by step, of what matches" : "mean reward by step, all groups",
      x: known.map((each) => each.step),
      xLabel: "step",
      height: 104,
      group: null,
      series: [
        {
          label: "mean, 10–90%",
          values: known.map((each) => each.reward_mean),
          band: [known.map((each) => each.reward_q10), known.map((each) => each.reward_q90)],
        },
      ],
      onSelect: (step) => this.leaveTo({ q: withTerm(this.parameters.q || "", "step", `step=${step}`) }),
    });
    this.charts.push(chart);
  }

  take(field, term) {
    this.leaveTo({ q: withTerm(this.parameters.q || "", field, term(field)) });
  }

  /** New rows are told, never pushed under the eyes of somebody who reads. */
  onPulse(beat) {
    this.drawNotes(beat.notes);
    const more = beat.until - Number(this.until);
    if (this.until === null || !(more > 0) || this.parameters.at) {
      return;
    }
    fill(
      this.news,
      h("button", { type: "button", class: "news-button", on: { click: () => this.showNewest() } }, `${plural(more, "new group")} · show (r)`),
    );
  }

  /** A note that says the same as before stays as it is: it may be open. */
  drawNotes(found) {
    const said = found.join("\n");
    if (said !== this.said) {
      this.said = said;
      fill(this.notes, notes(found));
    }
  }

  showNewest() {
    if (this.news.firstChild) {
      this.leave();
      this.grid = null;
      this.until = null;
      fill(this.news);
      note(this.kind, this.parametersNow());
      this.start();
    } else {
      return false;
    }
    return true;
  }

  leave() {
    clearTimeout(this.moving);
    this.charts.splice(0).forEach((chart) => chart.destroy());
    if (this.grid) {
      this.grid.leave();
    }
  }
}

function notes(found) {
  if (found.length === 0) {
    return null;
  }
  return append(h("div", { class: "notes", role: "note" }), [
    found.length === 1
      ? h("p", { class: "said" }, found[0])
      : h("details", {}, h("summary", {}, plural(found.length, "note"), ` on this store: ${found[0]}`), h("ul", {}, found.slice(1).map((each) => h("li", { class: "said" }, each)))),
  ]);
}
