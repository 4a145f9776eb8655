/* Who did what when: the window of the timeline that the address names, drawn by timeline.js. Narrow windows are fetched with
   finer spans; a click on a rollout opens it. */

import { get } from "./api.js";
import { copyButton, empty, fill, h, number, oneLine, percent, seconds } from "./dom.js";
import { address, go, note } from "./routes.js";

const BELOW = 70; // px under the canvas: its own line of help, and the page's margin
const WORTH_A_LINE = 0.01; // of the window

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
  const waits = h("details", { class: "waits" }, h("summary", {}, "Who waited for whom"));
  const words = h("span", {});
  const merged = h("span", { class: "hint" });
  fill(
    main,
    h("h1", { class: "visually-hidden" }, "Timeline"),
    h("div", { class: "heading" }, words, h("button", { type: "button", on: { click: () => view.show(whole.first, whole.last) } }, "All"), merged, h("span", { class: "spacer" }), copyButton("link", () => location.href)),
    waits,
    place,
  );
  let asked = 0;

  async function sayWaits(start, end) {
    const mine = asked;
    try {
      const found = await get("usage", { run, start, end }, signal);
      if (mine === asked) {
        drawWaits(waits, found);
      }
    } catch (error) {
      if (mine === asked && error.name !== "AbortError") {
        fill(waits, h("summary", {}, `Who waited for whom: ${error.message}`));
      }
    }
  }

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
    sayWaits(start, end);
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
  if (parameters.from === undefined || parameters.to === undefined) {
    sayWaits(whole.first, whole.last);
  } else {
    const [start, end] = [whole.first + Number(parameters.from), whole.first + Number(parameters.to)];
    view.show(start, end);
    await look(start, end);
  }
  return { title: "Timeline", leave: () => view.destroy() };
}

/** The figures of a window, the largest share in the line that is always seen. `found`: of /api/usage. */
function drawWaits(place, found) {
  if (found.wall_s === null) {
    const many = found.num_events ? `${number(found.num_events)} events are too many to look at; zoom in` : "nothing ran here";
    fill(place, h("summary", {}, `Who waited for whom: ${many}`));
    return;
  }
  const share = (part, of = found.wall_s) => (of > 0 ? percent(part / of) : "–");
  const rows = [
    ["the trainer waited for samples", found.trainer_waits_s],
    ["– of it, while requests were generated", found.trainer_waits_generating_s],
    ["no request was at a server", found.generation_idle_s],
    ...Object.entries(found.generation_idle_by)
      .filter(([, spent]) => spent >= WORTH_A_LINE * found.wall_s)
      .sort((a, b) => b[1] - a[1])
      .map(([name, spent]) => [`– of it, during the trainer's “${oneLine(name, 40)}”`, spent]),
    ["training and generating at once", found.both_s],
    ...found.waits.map((wait) => [`one wait: ${oneLine(wait.name, 40)}, ${oneLine(wait.lane, 40)}`, wait.end - wait.start]),
  ];
  fill(
    place,
    h("summary", {}, `Who waited for whom: the trainer ${share(found.trainer_waits_s)} of the time for samples; the servers had nothing to do in ${share(found.generation_idle_s)}`),
    h(
      "div",
      { class: "scroll-x" },
      h(
        "table",
        { class: "plain" },
        h("thead", {}, h("tr", {}, ["of this window", "time", "share"].map((name, index) => h("th", { scope: "col", class: index ? "numeric" : null }, name)))),
        h("tbody", {}, rows.map(([name, spent]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "numeric" }, seconds(spent)), h("td", { class: "numeric" }, share(spent))))),
      ),
    ),
  );
}

function round(value) {
  return Math.round(1000 * value) / 1000;
}
