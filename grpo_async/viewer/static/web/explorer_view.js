/* The tables of groups and of rollouts: query, charts that filter, rows. */

import { address, get, go, note } from "./api.js";
import { columnsOf } from "./columns.js";
import { button, empty, fill, h, hiddenHeading, number, part, plural, wrongQuery } from "./dom.js";
import { Grid } from "./grid.js";
import { QueryBox, mapEntry, withTerm } from "./query_box.js";

const QUICK = {
  groups: ["trained", "filtered", "stale", "failed", "truncated", "group_std=0"],
  rollouts: ["truncated", "failed", "stale", "filtered", "unscored", "clipped"],
};

export function explorerView(kind) {
  return async (context) => {
    const explorer = new Explorer(kind, context);
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
    const move = (by) => () => this.grid && this.grid.move(by);
    this.keys = {
      ...{ j: move(1), k: move(-1), ArrowDown: move(1), ArrowUp: move(-1), PageDown: move(15), PageUp: move(-15) },
      ...{ g: move(-1e9), G: move(1e9) },
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
    this.box = new QueryBox({ app: this.app, names, value: this.parameters.q || "", onChange: (q) => this.leaveTo({ q }) });
    this.notes = part(drawNotes);
    this.notes.show(this.summary.notes);
    this.news = h("span", { role: "status" });
    this.counts = h("span", { class: "hint", role: "status" });
    this.plots = h("div", { class: "plots" });
    this.place = h("div", { class: "grid-place" });
    const over = h("div", { class: "row" }, this.counts, this.news);
    fill(this.main, hiddenHeading(this.title), this.notes.element, this.box.element, this.quick(), this.chartBox(), over, this.place);
    this.read(await rows);
  }

  parametersNow(changes = {}) {
    const { run, q, charts } = this.parameters;
    return { run, q, sort: this.sort === "-seq" ? null : this.sort, charts, ...changes };
  }

  leaveTo(changes) {
    go(this.kind, this.parametersNow(changes));
  }

  question(changes = {}) {
    const { run, q } = this.parameters;
    return { run, q, until: this.until, ...changes };
  }

  /** `answer`: the first page with its numbers, or the error that came instead. */
  read(answer) {
    if (answer instanceof Error) {
      if (answer.status !== 400) {
        throw answer;
      }
      this.box.show(answer);
      this.chartDetails.hidden = true;
      fill(this.place, wrongQuery());
      return;
    }
    const { counts } = answer;
    this.until = String(answer.until);
    this.total = this.kind === "groups" ? counts.groups : counts.rollouts;
    const all = this.summary.counts;
    const of = this.parameters.q ? ` of ${number(all.rollouts)} in ${number(all.groups)}` : "";
    fill(this.counts, h("strong", {}, `${plural(counts.rollouts, "rollout")} in ${plural(counts.groups, "group")}`), of);
    this.chartDetails.hidden = this.total === 0;
    this.drawCharts(); // takes its space at once, so that the rows below do not move when the charts come
    if (this.total > 0) {
      this.showGrid(answer.rows);
    } else if (this.parameters.q) {
      fill(this.place, empty("Nothing matches.", button("Show everything", () => this.box.set(""))));
    } else {
      fill(this.place, empty("No rollouts yet.", "They appear here as soon as the run has written the first group."));
    }
  }

  showGrid(firstRows) {
    const { run } = this.parameters;
    const load = async (offset, limit) =>
      offset === 0 ? firstRows : (await get(this.kind, this.question({ sort: this.sort, offset, limit }), this.signal)).rows;
    const href = ({ seq, group_id, rollout_id }) =>
      this.kind === "groups"
        ? address("group", { run, id: group_id, seq })
        : address("rollout", { run, id: rollout_id, seq });
    this.grid = new Grid({
      label: this.title,
      columns: columnsOf(this.kind, this.summary.reward_names),
      count: this.total,
      sort: this.sort,
      at: Number(this.parameters.at) || 0,
      load,
      href,
      onSort: (sort) => this.leaveTo({ sort }),
      onMove: (top) => this.onMove(top),
      onError: (error) => this.box.show(error),
    });
    fill(this.place, this.grid.element);
    this.grid.start();
  }

  /** Where one reads is in the address, with the rows it counts: a link or the back key shows the same rows again. */
  onMove(top) {
    clearTimeout(this.moving);
    this.moving = setTimeout(() => {
      note(this.kind, this.parametersNow(top > 0 ? { at: top, until: this.until } : {}));
    }, 200);
  }

  quick() {
    const chip = (term) => {
      const is = (this.parameters.q || "") === term;
      const title = this.app.names.find(({ name }) => name === term)?.help || "all rewards of the group are equal";
      return button(term, () => this.leaveTo({ q: is ? null : term }), { class: "chip", title, "aria-pressed": String(is) });
    };
    return h("div", { class: "row quick", role: "group", "aria-label": "Common queries" }, QUICK[this.kind].map(chip));
  }

  chartBox() {
    const isOpen = this.parameters.charts ? this.parameters.charts === "1" : window.innerWidth >= 700 && window.innerHeight >= 600;
    const box = h("details", { class: "chart-box", open: isOpen }, h("summary", { class: "hint small" }, "Charts: click or drag to filter"), this.plots);
    box.addEventListener("toggle", () => {
      this.drawCharts();
      if (box.open !== isOpen || this.parameters.charts) {
        this.parameters.charts = box.open ? "1" : "0";
        note(this.kind, this.parametersNow());
      }
    });
    this.chartDetails = box;
    return box;
  }

  drawCharts() {
    if (!this.chartDetails.open || !this.total || this.plots.firstChild) {
      return;
    }
    const draw = (work) => {
      const place = h("div", { class: "panel" });
      const onError = (error) => error.name === "AbortError" || fill(place, empty("No chart", error.message));
      work(place).catch(onError);
      return place;
    };
    const histogram = (field, bins) => async (place) => {
      const { edges, counts, num_null: missing } = await get("histogram", this.question({ field, bins }), this.signal);
      const onTake = (term) => this.narrow(field, term(field));
      this.charts.push(Charts.histogram(place, { title: field, xLabel: field, label: "rollouts", height: 104, edges, counts, missing, onTake }));
    };
    fill(this.plots, draw(histogram("reward", 24)), draw(histogram("staleness", 12)), draw((place) => this.drawSteps(place)));
  }

  async drawSteps(place) {
    const { steps } = await get("steps", this.question(), this.signal);
    const known = steps.filter((each) => each.step !== null && each.reward_mean !== null);
    if (known.length === 0) {
      fill(place, h("h2", {}, "reward by step"), empty("No step yet"));
      return;
    }
    const values = (name) => known.map((each) => each[name]);
    const chart = Charts.line(place, {
      title: this.parameters.q ? "mean reward by step, matching groups" : "mean reward by step, all groups",
      x: values("step"),
      height: 104,
      group: null,
      series: [{ label: "mean, 10–90%", values: values("reward_mean"), band: [values("reward_q10"), values("reward_q90")] }],
      onSelect: (step) => this.narrow("step", `step=${step}`),
    });
    this.charts.push(chart);
  }

  narrow(field, term) {
    this.leaveTo({ q: withTerm(this.parameters.q || "", field, term) });
  }

  /** New rows are announced, never pushed under the eyes of somebody who reads. */
  onStatus(found) {
    this.notes.show(found.notes);
    const more = found.until - Number(this.until);
    if (this.until !== null && more > 0 && !this.parameters.at) {
      const show = button(`${plural(more, "new group")} · show (r)`, () => this.showNewest(), { class: "chip", "aria-pressed": "true" });
      fill(this.news, show);
    }
  }

  async showNewest() {
    if (this.news.firstChild) {
      this.leave();
      this.until = null;
      note(this.kind, this.parametersNow());
      await this.start();
    }
  }

  leave() {
    clearTimeout(this.moving);
    this.charts.splice(0).forEach((chart) => chart.destroy());
    this.grid?.leave();
    this.grid = null;
  }
}

function drawNotes([first, ...rest]) {
  const more = rest.length ? h("ul", {}, rest.map((each) => h("li", {}, each))) : null;
  const all = `${plural(rest.length + 1, "note")} on this store: ${first}`;
  return first ? h("details", { class: "lined filled warning said" }, h("summary", {}, all), more) : null;
}
