/* Who did what when: the window of the timeline that the address names, drawn by timeline.js. Narrow windows are fetched with
   finer spans; a click on a rollout opens it. */

import { get } from "./api.js";
import { copyButton, empty, fill, h, number, seconds } from "./dom.js";
import { address, go, note } from "./routes.js";

const BELOW = 70; // px under the canvas: its own line of help, and the page's margin

export async function timelineView({ app, main, parameters, signal }) {
  const { run } = parameters;
  const columns = Math.max(300, Math.round(main.clientWidth));
  const ask = (from, to) => get("timeline", { run, start: from, end: to, columns }, signal);
  const whole = await ask();
  if (!whole.spans) {
    fill(
      main,
      h("h1", { class: "visually-hidden" }, "Timeline"),
      empty("No timeline.", "A run writes events.jsonl where record.timeline.enabled is true; evaluations have none of their own."),
    );
    return { title: "Timeline" };
  }
  const place = h("div", { class: "timeline" });
  const words = h("span", {});
  const merged = h("span", { class: "hint" });
  fill(
    main,
    h("h1", { class: "visually-hidden" }, "Timeline"),
    h("div", { class: "heading" }, words, h("button", { type: "button", on: { click: () => view.show(whole.first, whole.last) } }, "All"), merged, h("span", { class: "spacer" }), copyButton("link", () => location.href)),
    place,
  );
  let asked = 0;

  function say(start, end) {
    words.textContent = `${seconds(Math.max(0, start - whole.first))} to ${seconds(end - whole.first)} of ${seconds(whole.last - whole.first)}`;
  }

  function sayHidden(found) {
    const hidden = found.num_merged + found.num_left_out;
    merged.textContent = hidden ? `${number(hidden)} of the spans are too narrow to be told apart here` : "";
  }

  async function look(start, end) {
    const wanted = { run, from: round(start - whole.first), to: round(end - whole.first) };
    const isWhole = wanted.from <= 0 && wanted.to >= round(whole.last - whole.first);
    note("timeline", isWhole ? { run } : wanted);
    app.list = address("timeline", isWhole ? { run } : wanted);
    say(start, end);
    asked += 1;
    const mine = asked;
    const margin = end - start; // so that a small move finds what it needs
    const found = isWhole ? whole : await ask(start - margin, end + margin);
    if (mine === asked && !signal.aborted) {
      view.update({ ...found, first: whole.first, last: whole.last });
      sayHidden(found);
    }
  }

  const view = Timeline.draw(place, whole, {
    height: Math.max(280, main.getBoundingClientRect().bottom - place.getBoundingClientRect().top - BELOW),
    onRollout: (id) => go("rollout", { run, id }),
    onWindow: (start, end) => look(start, end).catch(() => {}),
  });
  say(whole.first, whole.last);
  sayHidden(whole);
  app.list = address("timeline", parameters);
  if (parameters.from !== undefined && parameters.to !== undefined) {
    const [start, end] = [whole.first + Number(parameters.from), whole.first + Number(parameters.to)];
    view.show(start, end);
    await look(start, end);
  }
  return { title: "Timeline", leave: () => view.destroy() };
}

function round(value) {
  return Math.round(1000 * value) / 1000;
}
