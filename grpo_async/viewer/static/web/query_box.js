/* The query: a text box that suggests fields and values, and below it the server's message about a mistake. */

import { button, fill, h } from "./dom.js";

export class QueryBox {
  /** `names`: further fields of this run, {name, help}. `onChange` is called with the text that was entered. */
  constructor({ app, names, value, onChange }) {
    this.entries = entries(app, names);
    this.onChange = onChange;
    this.input = h("input", {
      id: "query",
      type: "text",
      value,
      placeholder: "e.g. reward<0.2 and truncated",
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      list: "suggestions",
      "aria-describedby": "query-problem",
      on: { input: () => this.suggest(), keydown: (event) => event.key === "Escape" && this.input.blur() },
    });
    this.list = h("datalist", { id: "suggestions" });
    this.problem = h("div", { id: "query-problem", class: "bad", role: "alert" });
    const enter = h("button", { type: "submit", class: "primary" }, "Filter");
    this.element = h(
      "form",
      { class: "query", role: "search", on: { submit: (event) => (event.preventDefault(), this.enter()) } },
      h("label", { for: "query", class: "visually-hidden" }, "Query"),
      h("div", { class: "row" }, this.input, enter, button("Clear", () => this.set(""))),
      this.list,
      this.problem,
    );
  }

  set(text) {
    this.input.value = text;
    this.enter();
  }

  enter() {
    this.onChange(this.input.value.trim());
  }

  /** An error of the server; null: none. */
  show(error) {
    if (!error) {
      this.input.removeAttribute("aria-invalid");
      fill(this.problem);
      return;
    }
    this.input.setAttribute("aria-invalid", "true");
    this.input.focus(); // what is typed next corrects the query instead of acting as a key of the page
    fill(this.problem, h("p", { class: "level" }, error.message));
  }

  /** The query with each field or word in the place of what is being written; the browser shows those that go on from it. */
  suggest() {
    const text = this.input.value;
    const [word] = /[A-Za-z_][\w.]*$/.exec(text) || [""];
    const isQuoted = (text.match(/'/g) || []).length % 2 === 1;
    const fitting = word && !isQuoted ? this.entries.filter(({ name }) => name.toLowerCase().startsWith(word.toLowerCase())) : [];
    const before = text.slice(0, text.length - word.length);
    fill(this.list, fitting.map(({ name, help }) => h("option", { value: before + name }, help)));
  }
}

function entries(app, names) {
  const values = app.names.flatMap(({ name, help, values: known }) => known.map((value) => ({ name: `${name} = '${value}'`, help })));
  return [...names, ...app.names, ...values];
}

/** What a query calls an entry of a map: rewards['format']. */
export const mapEntry = (map, name) => `${map}['${name.replaceAll("'", "''")}']`;
