/* The tables of groups and of rollouts: query, quick filters, rows that are asked for by pages. */

import { address, get, go, report } from "./api.js";
import { columnsOf } from "./columns.js";
import { button, empty, fill, h, hiddenHeading, movers, number, part, plural } from "./dom.js";
import { QueryBox } from "./query_box.js";

const PAGE = 100;
const QUICK = {
  groups: ["trained", "filtered", "stale", "failed", "truncated", "group_std = 0"],
  rollouts: ["truncated", "failed", "stale", "filtered", "unscored", "clipped"],
};

export function explorerView(kind) {
  return async ({ app, main, parameters, signal }) => {
    const { run, q } = parameters;
    const title = kind === "groups" ? "Groups" : "Rollouts";
    const sort = parameters.sort || "-seq";
    let until = null; // rows up to this seq: what a run writes meanwhile moves nothing
    const place = h("div", {});
    const counts = h("span", { class: "hint", role: "status" });
    const news = h("span", { role: "status" });
    const notes = part(drawNotes);
    const leaveTo = (changes) => go(kind, { run, q, sort: parameters.sort, ...changes });
    const ask = (offset) =>
      get(kind, report ? { run } : { run, q, sort, until, offset, limit: PAGE, count: offset === 0 }, signal);

    const box = report ? null : new QueryBox({ value: q || "", onChange: (text) => leaveTo({ q: text }) });
    const over = h("div", { class: "row" }, counts, news);
    const filters = box && [box.element, quick(kind, app, q, leaveTo)];
    fill(main, hiddenHeading(title), notes.element, filters, over, place);

    async function start() {
      let answer;
      try {
        answer = await ask(0);
      } catch (error) {
        if (error.status !== 400) {
          throw error;
        }
        box.show(error);
        fill(place, empty("This list cannot be shown.", button("Show everything", () => go(kind, { run }))));
        return;
      }
      until = answer.until;
      const { rollouts, groups } = answer.counts;
      const found = `${plural(rollouts, "rollout")} in ${plural(groups, "group")}`;
      const which = report ? `${number(answer.rows.length)} of the best and the worst` : kind === "groups" && q ? "the groups with a matching rollout" : "";
      fill(counts, h("strong", {}, found), which && `: ${which}`);
      draw(answer.rows, kind === "groups" ? groups : rollouts);
    }

    function draw(first, total) {
      if (!first.length) {
        const all = button("Show everything", () => box.set(""));
        const soon = "They appear here as soon as the run has written the first group.";
        fill(place, q ? empty("Nothing matches.", all) : empty("No rollouts yet.", soon));
        return;
      }
      const columns = columnsOf(kind, first);
      const body = h("tbody", {}, first.map((row) => rowOf(row, columns)));
      const more = button("Show more", async () => {
        body.append(...(await ask(body.rows.length)).rows.map((row) => rowOf(row, columns)));
        more.hidden = report || body.rows.length >= total;
      });
      more.hidden = report || first.length >= total;
      const head = h("thead", {}, h("tr", {}, columns.map(header)));
      fill(place, h("div", { class: "scroll-x" }, h("table", { class: "plain rows", "aria-label": title }, head, body)), more);
      if (app.sorts) {
        app.sorts = false;
        place.querySelector("[aria-sort] button")?.focus(); // it is another button than the one that was clicked
      }
    }

    const classOf = ({ numeric, grows, from = 0 }) => `from-${from} ${numeric ? "numeric" : grows ? "cut" : ""}`;

    function header(column) {
      const { label, title: help, sort: by } = column;
      const isDown = sort === `-${by}`;
      const isUp = sort === by;
      const order = isDown ? "descending" : isUp ? "ascending" : null;
      const shown = `${label}${isDown ? " ↓" : isUp ? " ↑" : ""}`;
      const click = () => ((app.sorts = true), leaveTo({ sort: isDown ? by : `-${by}` }));
      const inner = by && !report ? button(shown, click, { title: help }) : h("span", { title: help }, shown);
      return h("th", { scope: "col", "aria-sort": order, class: classOf(column) }, inner);
    }

    function rowOf(row, columns) {
      const { seq, group_id: group, rollout_id: id } = row;
      const href = kind === "groups" ? address("group", { run, id: group, seq }) : address("rollout", { run, id, seq });
      const cell = (column) => h("td", { class: classOf(column) }, column.link ? h("a", { href }, column.cell(row)) : column.cell(row));
      const click = ({ target }) => {
        if (!target.closest("a") && !String(getSelection())) {
          location.hash = href;
        }
      };
      return h("tr", { on: { click } }, columns.map(cell));
    }

    const showNewest = async () => {
      if (news.firstChild) {
        until = null;
        fill(news);
        await start();
      }
    };
    await start();
    return {
      title,
      keys: { ...movers(place, "tbody a"), r: showNewest },
      /** New rows are announced, never pushed under the eyes of somebody who reads. */
      onStatus(found) {
        notes.show(found.notes);
        const more = until === null ? 0 : found.until - until;
        if (more > 0) {
          fill(news, button(`${plural(more, "new group")} · show (r)`, showNewest, { class: "chip", "aria-pressed": "true" }));
        }
      },
    };
  };
}

function quick(kind, app, q, leaveTo) {
  const chip = (term) => {
    const is = q === term;
    const title = app.names.find(({ name }) => name === term)?.help || "all rewards of the group are equal";
    return button(term, () => leaveTo({ q: is ? null : term }), { class: "chip", title, "aria-pressed": String(is) });
  };
  return h("div", { class: "row quick", role: "group", "aria-label": "Common queries" }, QUICK[kind].map(chip));
}

function drawNotes([first, ...rest]) {
  const more = rest.length ? h("ul", {}, rest.map((each) => h("li", {}, each))) : null;
  const all = `${plural(rest.length + 1, "note")} on this store: ${first}`;
  return first ? h("details", { class: "lined filled warning said" }, h("summary", {}, all), more) : null;
}
