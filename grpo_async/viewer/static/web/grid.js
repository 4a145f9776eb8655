/* A table of any length: rows of one height, of which only those near the window exist; they come from the server by pages.

   new Grid({columns, count, load(offset, limit) -> rows, href(row), sort, onSort, at, onMove})
   Columns: {name, label, title, sort, numeric, width, from (px of the window from which it is shown), cell(row)}. */

import { append, fill, h } from "./dom.js";

const PAGE = 100;
const SPARE = 8; // rows beyond the window
const MOST = 400_000; // browsers draw nothing taller than some 30 million pixels
const WAIT_MS = 40; // of scrolling, before a page is asked for

export class Grid {
  constructor(options) {
    Object.assign(this, options);
    this.pages = new Map();
    this.chosen = -1;
    this.body = h("div", { class: "grid-rows", role: "rowgroup" });
    this.head = h("div", { class: "grid-head", role: "row" });
    this.box = h(
      "div",
      { class: "grid", role: "grid", tabindex: "0", "aria-label": this.label, on: { scroll: () => this.onScroll() } },
      h("div", { class: "grid-head-group", role: "rowgroup" }, this.head),
      this.body,
    );
    this.element = this.box;
    this.watcher = new ResizeObserver(() => this.layout());
    this.watcher.observe(this.box);
  }

  get length() {
    return Math.min(this.count, MOST);
  }

  /** Everything anew: another query or order. */
  reset({ count, sort, at = 0 }) {
    this.count = count;
    this.sort = sort;
    this.pages.clear();
    this.chosen = -1;
    this.box.removeAttribute("aria-activedescendant");
    this.layout();
    this.box.scrollTop = at * this.rowHeight();
    this.draw();
  }

  rowHeight() {
    return parseFloat(getComputedStyle(this.box).getPropertyValue("--row")) || 32;
  }

  layout() {
    const width = this.box.clientWidth;
    this.visible = this.columns.filter((column) => width >= (column.from || 0));
    this.box.style.setProperty("--columns", this.visible.map((column) => column.width).join(" "));
    this.box.setAttribute("aria-rowcount", String(this.count + 1));
    this.body.style.height = `${this.length * this.rowHeight()}px`;
    fill(
      this.head,
      this.visible.map((column) => this.header(column)),
    );
    this.draw();
  }

  header(column) {
    const key = column.sort;
    const isDown = this.sort === `-${key}`;
    const isUp = this.sort === key;
    const sorted = isDown ? "descending" : isUp ? "ascending" : key ? "none" : null;
    const label = [column.label, isDown ? " ↓" : isUp ? " ↑" : ""].join("");
    const inner = key
      ? h(
          "button",
          { type: "button", title: column.title, on: { click: () => this.onSort(isDown ? key : `-${key}`) } },
          label,
        )
      : h("span", { title: column.title }, label);
    return h("div", { role: "columnheader", "aria-sort": sorted, class: column.numeric ? "numeric" : null }, inner);
  }

  onScroll() {
    this.draw();
    this.onMove(Math.round(this.box.scrollTop / this.rowHeight()));
  }

  draw() {
    const height = this.rowHeight();
    const shown = this.box.clientHeight || 400;
    const first = Math.max(0, Math.floor(this.box.scrollTop / height) - SPARE);
    const last = Math.min(this.length, Math.ceil((this.box.scrollTop + shown) / height) + SPARE);
    const rows = [];
    for (let index = first; index < last; index += 1) {
      rows.push(this.row(index, height));
    }
    const focused = document.activeElement && this.body.contains(document.activeElement) ? document.activeElement.dataset.index : null;
    this.body.replaceChildren(...rows);
    if (focused !== null) {
      const again = this.body.querySelector(`[data-index="${focused}"] a, a[data-index="${focused}"]`);
      if (again) {
        again.focus({ preventScroll: true });
      }
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.want(first, last), this.pages.size === 0 ? 0 : WAIT_MS);
  }

  row(index, height) {
    const page = this.pages.get(Math.floor(index / PAGE));
    const row = Array.isArray(page) ? page[index % PAGE] : null;
    const element = h("div", {
      class: `grid-row${index === this.chosen ? " chosen" : ""}${row ? "" : " waiting"}${row && row.superseded ? " superseded" : ""}`,
      role: "row",
      id: `row-${index}`,
      "aria-rowindex": index + 2,
      "aria-selected": String(index === this.chosen),
    });
    element.style.top = `${index * height}px`;
    if (!row) {
      return append(element, [h("div", { role: "gridcell" }, "…")]);
    }
    const link = this.href(row);
    element.addEventListener("click", (event) => {
      if (!event.target.closest("a, button") && !String(getSelection())) {
        location.hash = link;
      }
    });
    return append(
      element,
      this.visible.map((column) => {
        const content = column.cell(row);
        return h(
          "div",
          { role: "gridcell", class: `${column.numeric ? "numeric" : ""} ${column.class || ""}`.trim() },
          column.link ? h("a", { href: link, "data-index": index }, content) : content,
        );
      }),
    );
  }

  async want(first, last) {
    const wanted = [];
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) {
      if (!this.pages.has(page)) {
        wanted.push(page);
      }
    }
    const pages = this.pages;
    await Promise.all(
      wanted.map(async (page) => {
        pages.set(page, "asked");
        try {
          pages.set(page, await this.load(page * PAGE, PAGE));
        } catch (error) {
          pages.delete(page);
          if (error.name !== "AbortError") {
            this.onError(error);
          }
          return;
        }
        this.draw();
      }),
    );
  }

  /** Moves the mark of the keyboard by `by` rows. */
  move(by) {
    if (this.length === 0) {
      return;
    }
    const height = this.rowHeight();
    const top = Math.ceil(this.box.scrollTop / height);
    const start = this.chosen < 0 ? top - (by > 0 ? 1 : 0) : this.chosen;
    this.chosen = Math.max(0, Math.min(this.length - 1, start + by));
    const space = this.box.clientHeight - this.head.offsetHeight - height;
    const place = this.chosen * height;
    if (place < this.box.scrollTop) {
      this.box.scrollTop = place;
    } else if (place > this.box.scrollTop + space) {
      this.box.scrollTop = place - space;
    }
    this.draw();
    this.box.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    this.box.focus({ preventScroll: true }); // a screen reader reads the row that its focus points to
  }

  open() {
    const page = this.pages.get(Math.floor(this.chosen / PAGE));
    const row = Array.isArray(page) ? page[this.chosen % PAGE] : null;
    if (row) {
      location.hash = this.href(row);
    }
  }

  leave() {
    clearTimeout(this.timer);
    this.watcher.disconnect();
  }
}
