/* The query: a text box, and below it the server's message about a mistake. */

import { button, fill, h } from "./dom.js";

export class QueryBox {
  /** `onChange` is called with the text that was entered. */
  constructor({ value, onChange }) {
    this.onChange = onChange;
    this.input = h("input", {
      id: "query",
      type: "text",
      value,
      placeholder: "e.g. reward<0.2 and truncated",
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      "aria-describedby": "query-problem",
    });
    this.problem = h("div", { id: "query-problem", class: "bad", role: "alert" });
    const enter = h("button", { type: "submit", class: "primary" }, "Filter");
    this.element = h(
      "form",
      { class: "query", role: "search", on: { submit: (event) => (event.preventDefault(), this.enter()) } },
      h("label", { for: "query", class: "visually-hidden" }, "Query"),
      h("div", { class: "row" }, this.input, enter, button("Clear", () => this.set(""))),
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
}
