/* A table of any length: rows of one height, of which only those near the window exist; they come from the server by pages.

   new Grid({label, columns, count, sort, at, load(offset, limit) -> rows, href(row), onSort(sort), onMove(top), onError(error)})
   Columns: {label, title, sort, numeric, width, from (px of the window from which it is shown), link, cell(row)}. */

import { append, button, fill, h } from "./dom.js";

const PAGE = 100;
const SPARE = 8; // rows beyond the window
const MAX_ROWS = 400_000; // browsers draw nothing taller than some 30 million pixels
const WAIT_MS = 40; // of scrolling, before a page is asked for

export class Grid {
  constructor(options) {
    Object.assign(this, options);
    this.length = Math.min(this.count, MAX_ROWS);
    this.pages = new Map();
    this.chosen = -1;
    this.body = h("div", { class: "grid-rows", role: "rowgroup" });
    this.head = h("div", { class: "grid-head", role: "row" });
    this.element = h(
      "div",
      { class: "grid", role: "grid", tabindex: "0", "aria-label": this.label, "aria-rowcount": this.count + 1, on: { scroll: () => this.onScroll() } },
      h("div", { class: "grid-head-group", role: "rowgroup" }, this.head),
      this.body,
    );
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.element);
  }

  /** To be called when the element is in the page. */
  start() {
    this.rowHeight = parseFloat(getComputedStyle(this.element).getPropertyValue("--row"));
    this.layout();
    this.element.scrollTop = this.at * this.rowHeight;
    this.draw();
  }

  layout() {
    const width = this.element.clientWidth;
    this.visible = this.columns.filter((column) => width >= (column.from || 0));
    this.element.style.setProperty("--columns", this.visible.map((column) => column.width).join(" "));
    this.body.style.height = `${this.length * this.rowHeight}px`;
    fill(this.head, this.visible.map((column) => this.header(column)));
    this.draw();
  }

  header({ label, title, sort, numeric }) {
    const isDown = this.sort === `-${sort}`;
    const isUp = this.sort === sort;
    const sorted = isDown ? "descending" : isUp ? "ascending" : sort ? "none" : null;
    const shown = `${label}${isDown ? " ↓" : isUp ? " ↑" : ""}`;
    const inner = sort ? button(shown, () => this.onSort(isDown ? sort : `-${sort}`), { title }) : h("span", { title }, shown);
    return h("div", { role: "columnheader", "aria-sort": sorted, class: numeric ? "numeric" : null }, inner);
  }

  onScroll() {
    this.draw();
    this.onMove(Math.round(this.element.scrollTop / this.rowHeight));
  }

  draw() {
    const shown = this.element.clientHeight || 400;
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - SPARE);
    const last = Math.min(this.length, Math.ceil((this.element.scrollTop + shown) / this.rowHeight) + SPARE);
    const rows = [];
    for (let index = first; index < last; index += 1) {
      rows.push(this.row(index));
    }
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.index : null;
    this.body.replaceChildren(...rows);
    if (focused !== null) {
      this.body.querySelector(`a[data-index="${focused}"]`)?.focus({ preventScroll: true });
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.want(first, last), this.pages.size === 0 ? 0 : WAIT_MS);
  }

  /** The row at a place if it has come. */
  rowAt(index) {
    const page = this.pages.get(Math.floor(index / PAGE));
    return Array.isArray(page) ? page[index % PAGE] : undefined;
  }

  row(index) {
    const row = this.rowAt(index);
    const isChosen = index === this.chosen;
    const element = h("div", {
      class: isChosen ? "grid-row chosen" : "grid-row",
      role: "row",
      id: `row-${index}`,
      "aria-rowindex": index + 2,
      "aria-selected": String(isChosen),
    });
    element.style.top = `${index * this.rowHeight}px`;
    if (!row) {
      return append(element, [h("div", { role: "gridcell", class: "hint" }, "…")]);
    }
    const href = this.href(row);
    element.addEventListener("click", (event) => {
      if (!event.target.closest("a, button") && !String(getSelection())) {
        location.hash = href;
      }
    });
    const cell = ({ cell: content, link, numeric }) =>
      h(
        "div",
        { role: "gridcell", class: numeric ? "numeric" : null },
        link ? h("a", { href, "data-index": index }, content(row)) : content(row),
      );
    return append(element, this.visible.map(cell));
  }

  want(first, last) {
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) {
      if (!this.pages.has(page)) {
        this.read(page);
      }
    }
  }

  async read(page) {
    this.pages.set(page, "asked");
    try {
      this.pages.set(page, await this.load(page * PAGE, PAGE));
      this.draw();
    } catch (error) {
      this.pages.delete(page);
      if (error.name !== "AbortError") {
        this.onError(error);
      }
    }
  }

  /** Moves the mark of the keyboard by `by` rows. */
  move(by) {
    const { element, rowHeight } = this;
    const top = Math.ceil(element.scrollTop / rowHeight);
    const start = this.chosen < 0 ? top - (by > 0 ? 1 : 0) : this.chosen;
    this.chosen = Math.max(0, Math.min(this.length - 1, start + by));
    const room = element.clientHeight - this.head.offsetHeight - rowHeight;
    const place = this.chosen * rowHeight;
    element.scrollTop = Math.max(place - room, Math.min(element.scrollTop, place));
    this.draw();
    element.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    element.focus({ preventScroll: true }); // a screen reader reads the row that its focus points to
  }

  open() {
    const row = this.rowAt(this.chosen);
    if (row) {
      location.hash = this.href(row);
    }
  }

  leave() {
    clearTimeout(this.timer);
    this.watcher.disconnect();
  }
}
