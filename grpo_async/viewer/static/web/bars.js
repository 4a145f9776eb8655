/* A histogram whose bins are buttons: a click takes one, dragging takes a range; by keyboard, too. */

import { empty, h, number, plural } from "./dom.js";

export function bars({ title, histogram, format = number, onTake }) {
  const { edges, counts, num_null: missing } = histogram;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const readout = h("span", { class: "bars-readout" });
  const rest = missing > 0 ? `, ${number(missing)} without` : "";
  const quiet = () => {
    readout.textContent = total ? `${plural(total, "rollout")}${rest}` : "";
  };
  quiet();
  const heading = h("div", { class: "bars-head" }, h("h2", {}, title), readout);
  if (total === 0) {
    return h("section", { class: "bars" }, heading, empty(missing > 0 ? `No ${title} yet` : "No rollouts"));
  }
  const most = Math.max(...counts);
  let from = null;
  let to = null;
  const isWhole = wholeNumbers(edges);
  const name = (low, high) => {
    const [first, last] = isWhole ? [edges[low] + 0.5, edges[high + 1] - 0.5] : [edges[low], edges[high + 1]];
    return first === last ? format(first) : `${format(first)} to ${format(last)}`;
  };
  const buttons = counts.map((count, index) =>
    h(
      "button",
      {
        type: "button",
        class: "bar",
        tabindex: index === 0 ? "0" : "-1",
        "aria-label": `${title} ${name(index, index)}: ${plural(count, "rollout")}`,
        vars: { "--share": String(count / most) },
        on: {
          pointerdown: (event) => {
            from = to = index;
            event.preventDefault();
            mark();
          },
          pointerenter: () => {
            if (from !== null) {
              to = index;
              mark();
            }
            const [low, high] = range(index);
            const sum = counts.slice(low, high + 1).reduce((all, each) => all + each, 0);
            readout.textContent = `${name(low, high)}: ${number(sum)}`;
          },
          keydown: (event) => onKey(event, index),
        },
      },
      h("span", { class: "bar-fill" }),
    ),
  );
  const range = (index) => (from === null ? [index, index] : [Math.min(from, to), Math.max(from, to)]);
  const mark = () => {
    const [low, high] = from === null ? [-1, -2] : range(0);
    buttons.forEach((button, index) => button.classList.toggle("taken", index >= low && index <= high));
  };
  const take = (low, high) => {
    if (isWhole) {
      const [first, last] = [edges[low] + 0.5, edges[high + 1] - 0.5];
      onTake((field) => (first === last ? `${field}=${first}` : `${field}>=${first} and ${field}<=${last}`));
    } else {
      const below = high === counts.length - 1 ? "<=" : "<";
      onTake((field) => `${field}>=${edges[low]} and ${field}${below}${edges[high + 1]}`);
    }
  };
  const onKey = (event, index) => {
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: counts.length - 1 }[event.key];
    if (next !== undefined && buttons[next]) {
      buttons[index].tabIndex = -1;
      buttons[next].tabIndex = 0;
      buttons[next].focus();
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      take(index, index);
    }
  };
  const release = () => {
    if (from !== null) {
      const [low, high] = range(0);
      from = null;
      mark();
      take(low, high);
    }
  };
  const plot = h("div", { class: "bars-plot", role: "group", "aria-label": `${title}: bins, Enter filters`, on: { pointerleave: quiet } }, buttons);
  plot.addEventListener("pointerup", release);
  plot.addEventListener("pointercancel", () => {
    from = null;
    mark();
  });
  plot.addEventListener("pointerleave", (event) => {
    if (event.buttons === 0) {
      from = null;
      mark();
    } else {
      release();
    }
  });
  const ends = isWhole ? [edges[0] + 0.5, edges[edges.length - 1] - 0.5] : [edges[0], edges[edges.length - 1]];
  const each = isWhole && counts.length <= 6 ? counts.map((_, index) => ends[0] + index) : ends;
  const axis = h("div", { class: `bars-axis${each.length === counts.length ? " bars-axis-each" : ""}`, "aria-hidden": "true" }, each.map((value) => h("span", {}, format(value))));
  return h("section", { class: "bars" }, heading, plot, axis);
}

/** Bins of one whole number each: 1.5, 2.5, 3.5 hold 2 and 3. */
function wholeNumbers(edges) {
  return edges.every((edge, index) => Number.isInteger(edge + 0.5) && (index === 0 || edge - edges[index - 1] === 1));
}
