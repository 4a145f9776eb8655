/* The query: a text box with suggestions of fields and words, and the server's words under it where there is a mistake. */

import { button, fill, h } from "./dom.js";

const MOST_SUGGESTIONS = 9;

export class QueryBox {
  /** `names`: further fields of this run, {name, help}. `onChange` is called with the text that was entered. */
  constructor({ app, names, value, onChange }) {
    this.entries = entries(app, names);
    this.onChange = onChange;
    this.chosen = -1;
    this.shown = [];
    this.input = h("input", {
      id: "query",
      type: "text",
      value,
      placeholder: "e.g. reward<0.2 and truncated",
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      role: "combobox",
      "aria-expanded": "false",
      "aria-autocomplete": "list",
      "aria-controls": "suggestions",
      "aria-describedby": "query-problem",
      on: {
        input: () => this.suggest(),
        keydown: (event) => this.onKey(event),
        blur: () => setTimeout(() => this.close(), 150),
        click: () => this.suggest(),
      },
    });
    this.list = h("ul", { id: "suggestions", role: "listbox", class: "floating bare", hidden: true, "aria-label": "Fields and words" });
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
    this.close();
    this.onChange(this.input.value.trim());
  }

  /** An error of the server, with a caret under the place; null: none. */
  show(error) {
    if (!error) {
      this.input.removeAttribute("aria-invalid");
      fill(this.problem);
      return;
    }
    this.input.setAttribute("aria-invalid", "true");
    this.input.focus(); // what is typed next corrects the query instead of acting as a key of the page
    this.input.setSelectionRange(this.input.value.length, this.input.value.length);
    const carets = `${" ".repeat(error.position)}${"^".repeat(error.length || 1)}`;
    const where = Number.isInteger(error.position) ? h("pre", { "aria-hidden": "true" }, `${this.input.value}\n${carets}`) : null;
    const offers = error.suggestions.map((name) => [button(name, () => this.replace(error, name), { class: "chip" }), " "]);
    const problem = offers.length ? error.message.split("; did you mean ")[0] : error.message;
    fill(this.problem, where, h("p", { class: "level" }, problem, offers.length ? [". Did you mean ", offers] : null));
  }

  replace(error, name) {
    const text = this.input.value;
    this.set(text.slice(0, error.position) + name + text.slice(error.position + error.length));
  }

  suggest() {
    const { start, word } = this.word();
    const lower = word.toLowerCase();
    const rank = ({ name }) => (name.toLowerCase().startsWith(lower) ? 0 : 1);
    this.shown = lower
      ? this.entries
          .filter(({ name }) => name.toLowerCase().includes(lower) && name !== word)
          .sort((left, right) => rank(left) - rank(right))
          .slice(0, MOST_SUGGESTIONS)
      : [];
    this.start = start;
    this.chosen = -1;
    this.draw();
  }

  /** What is being written at the caret, if it could be a field. */
  word() {
    const before = this.input.value.slice(0, this.input.selectionStart);
    const found = /[A-Za-z_][\w.]*$/.exec(before);
    const isQuoted = (before.match(/'/g) || []).length % 2 === 1;
    return found && !isQuoted ? { start: found.index, word: found[0] } : { start: before.length, word: "" };
  }

  draw() {
    const isOpen = this.shown.length > 0;
    this.list.hidden = !isOpen;
    this.input.setAttribute("aria-expanded", String(isOpen));
    this.input.removeAttribute("aria-activedescendant");
    if (this.chosen >= 0) {
      this.input.setAttribute("aria-activedescendant", `suggestion-${this.chosen}`);
    }
    fill(
      this.list,
      this.shown.map((entry, index) =>
        h(
          "li",
          {
            id: `suggestion-${index}`,
            role: "option",
            "aria-selected": String(index === this.chosen),
            on: { mousedown: (event) => (event.preventDefault(), this.take(index)) },
          },
          h("code", {}, entry.name),
          h("span", { class: "hint" }, entry.help),
        ),
      ),
    );
  }

  take(index) {
    const end = this.input.selectionStart;
    const { name } = this.shown[index];
    this.input.value = this.input.value.slice(0, this.start) + name + this.input.value.slice(end);
    this.input.selectionStart = this.input.selectionEnd = this.start + name.length;
    this.close();
    this.input.focus();
  }

  close() {
    this.shown = [];
    this.draw();
  }

  onKey(event) {
    const last = this.shown.length - 1;
    if (event.key === "Escape") {
      if (last >= 0) {
        this.close();
      } else {
        this.input.blur();
      }
    } else if (event.key === "ArrowDown" && last >= 0) {
      this.chosen = this.chosen >= last ? 0 : this.chosen + 1;
      this.draw();
    } else if (event.key === "ArrowUp" && last >= 0) {
      this.chosen = this.chosen <= 0 ? last : this.chosen - 1;
      this.draw();
    } else if (event.key === "Tab" && last >= 0 && !event.shiftKey) {
      this.take(Math.max(0, this.chosen));
    } else if (event.key === "Enter" && this.chosen >= 0) {
      this.take(this.chosen);
    } else {
      return;
    }
    event.preventDefault();
  }
}

function entries(app, names) {
  const values = app.names.flatMap(({ name, help, values: known }) => known.map((value) => ({ name: `${name} = '${value}'`, help })));
  return [...names, ...app.names, ...values];
}

/** `query` and one more term. Terms of the same field that stand alone at the end are replaced: a second click moves the range. */
export function withTerm(query, field, term) {
  const escaped = field.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const value = "[^\\s()'\"]+";
  const old = new RegExp(`^(?:(.*?) and )?${escaped}(?:>=|=)${value}(?: and ${escaped}<=?${value})?$`);
  const found = old.exec(query);
  const rest = found && !isJoinedByOr(found[1] || "") ? found[1] || "" : query;
  if (!rest) {
    return term;
  }
  return isJoinedByOr(rest) ? `(${rest}) and ${term}` : `${rest} and ${term}`;
}

/** Whether an `or` stands outside all parentheses and quotes: what is added by `and` would belong to its right side only. */
function isJoinedByOr(query) {
  let depth = 0;
  for (const [piece] of query.matchAll(/'[^']*'?|"[^"]*"?|[()]|[^\s()'"]+/g)) {
    if (piece === "(" || piece === ")") {
      depth += piece === "(" ? 1 : -1;
    } else if (depth === 0 && piece.toLowerCase() === "or") {
      return true;
    }
  }
  return false;
}

/** What a query calls an entry of a map: rewards['format']. */
export const mapEntry = (map, name) => `${map}['${name.replaceAll("'", "''")}']`;
