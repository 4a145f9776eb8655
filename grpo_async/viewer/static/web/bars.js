/* A histogram whose bins are buttons: a click takes one, dragging takes a range; by keyboard, too. */

import { empty, h, number, plural } from "./dom.js";

/** `onTake` is called with a function that makes a term of a query for a field. */
export function bars({ title, histogram, onTake }) {
  const { edges, counts, num_null: missing } = histogram;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const readout = h("span", { class: "bars-readout hint" });
  const quiet = () => {
    readout.textContent = total ? `${plural(total, "rollout")}${missing ? `, ${number(missing)} without` : ""}` : "";
  };
  quiet();
  const head = h("div", { class: "row" }, h("h2", {}, title), h("span", { class: "spacer" }), readout);
  if (total === 0) {
    return h("section", { class: "bars" }, head, empty(missing ? `No ${title} yet` : "No rollouts"));
  }
  // bins of one whole number each: 1.5, 2.5, 3.5 hold 2 and 3
  const isWhole = edges.every((edge, index) => Number.isInteger(edge + 0.5) && (index === 0 || edge - edges[index - 1] === 1));
  const ends = (low, high) => (isWhole ? [edges[low] + 0.5, edges[high + 1] - 0.5] : [edges[low], edges[high + 1]]);
  const name = (low, high) => {
    const [first, last] = ends(low, high);
    return first === last ? number(first) : `${number(first)} to ${number(last)}`;
  };
  const take = (low, high) => {
    const [first, last] = ends(low, high);
    const upTo = isWhole || high === counts.length - 1 ? "<=" : "<";
    onTake((field) => (first === last ? `${field}=${first}` : `${field}>=${first} and ${field}${upTo}${last}`));
  };

  let drag = null; // the first and the last bin
  const taken = () => [Math.min(...drag), Math.max(...drag)];
  const mark = () => {
    const [low, high] = drag ? taken() : [-1, -2];
    buttons.forEach((each, index) => each.classList.toggle("taken", index >= low && index <= high));
  };
  const end = (isTaken) => {
    const range = drag && taken();
    drag = null;
    mark();
    if (range && isTaken) {
      take(...range);
    }
  };
  const enter = (index) => {
    drag = drag && [drag[0], index];
    mark();
    const [low, high] = drag ? taken() : [index, index];
    readout.textContent = `${name(low, high)}: ${number(counts.slice(low, high + 1).reduce((sum, count) => sum + count, 0))}`;
  };
  const press = (event, index) => {
    drag = [index, index];
    event.preventDefault();
    mark();
  };
  const onKey = (event, index) => {
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: counts.length - 1 }[event.key];
    if (buttons[next]) {
      buttons[index].tabIndex = -1;
      buttons[next].tabIndex = 0;
      buttons[next].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      take(index, index);
    } else {
      return;
    }
    event.preventDefault();
  };
  const most = Math.max(...counts);
  const buttons = counts.map((count, index) =>
    h(
      "button",
      {
        type: "button",
        class: "bar",
        tabindex: index === 0 ? "0" : "-1",
        "aria-label": `${title} ${name(index, index)}: ${plural(count, "rollout")}`,
        vars: { "--height": `${(100 * count) / most}%` },
        on: { pointerdown: (event) => press(event, index), pointerenter: () => enter(index), keydown: (event) => onKey(event, index) },
      },
      h("span", {}),
    ),
  );
  const leave = (event) => {
    quiet();
    end(event.buttons !== 0); // dragged out of the plot
  };
  const on = { pointerup: () => end(true), pointercancel: () => end(false), pointerleave: leave };
  const plot = h("div", { class: "bars-plot", role: "group", "aria-label": `${title}: bins, Enter filters`, on }, buttons);
  const isEach = isWhole && counts.length <= 6;
  const shown = isEach ? counts.map((_, index) => edges[index] + 0.5) : ends(0, counts.length - 1);
  const axis = h("div", { class: `bars-axis hint${isEach ? " each" : ""}`, "aria-hidden": "true" }, shown.map((value) => h("span", {}, number(value))));
  return h("section", { class: "bars" }, head, plot, axis);
}
