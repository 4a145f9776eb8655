/* Who did what when: the window of the timeline that the address names, drawn by timeline.js. Narrow windows are fetched with
   finer spans; a click on a rollout opens it. */

import { get, go, note } from "./api.js";
import { button, copyLink, empty, fill, h, hiddenHeading, hint, number, oneLine, percent, spacer, table } from "./dom.js";

const BELOW = 70; // px under the canvas: its own line of help, and the page's margin

export async function timelineView({ main, parameters, signal }) {
  const { run } = parameters;
  const title = "Timeline";
  const columns = Math.max(300, Math.round(main.clientWidth));
  const ask = (start, end) => get("timeline", { run, start, end, columns }, signal);
  const whole = await ask();
  if (!whole.spans) {
    const why = "A run writes events.jsonl where record.timeline.enabled is true; evaluations have none.";
    fill(main, hiddenHeading(title), empty("No timeline.", why));
    return { title };
  }
  const place = h("div", { class: "timeline" });
  const waits = h("details", { class: "waits" });
  const where = h("span", {});
  const merged = hint();
  const all = button("All", () => view.show(whole.first, whole.last));
  fill(main, hiddenHeading(title), h("div", { class: "row heading" }, where, all, merged, spacer(), copyLink()), waits, place);
  let asked = 0;

  const round = (value) => Math.round(1000 * value) / 1000;
  const length = whole.last - whole.first;

  /** What a window is, and what cannot be shown separately in it. */
  function describe(start, end, { num_merged: many, num_left_out: more }) {
    where.textContent = `${Charts.duration(Math.max(0, start - whole.first))} to ${Charts.duration(end - whole.first)} of ${Charts.duration(length)}`;
    merged.textContent = many + more ? `${number(many + more)} spans are too narrow to show separately here` : "";
  }

  async function describeWaits(start, end, mine) {
    const found = await get("usage", { run, start, end }, signal).catch((error) => error);
    if (mine === asked && found.name !== "AbortError") {
      drawWaits(waits, found);
    }
  }

  async function showWindow(start, end) {
    const wanted = { run, from: round(start - whole.first), to: round(end - whole.first) };
    const isWhole = wanted.from <= 0 && wanted.to >= round(length);
    note("timeline", isWhole ? { run } : wanted);
    asked += 1;
    const mine = asked;
    describeWaits(start, end, mine);
    const margin = end - start; // so that a small move finds what it needs
    const found = isWhole ? whole : await ask(start - margin, end + margin);
    if (mine === asked && !signal.aborted) {
      view.update({ ...found, first: whole.first, last: whole.last });
      describe(start, end, found);
    }
  }

  const view = Timeline.draw(place, whole, {
    height: Math.max(280, main.getBoundingClientRect().bottom - place.getBoundingClientRect().top - BELOW),
    onRollout: (id) => go("rollout", { run, id }),
    onWindow: (start, end) => showWindow(start, end).catch(() => {}),
  });
  if (parameters.from === undefined || parameters.to === undefined) {
    describe(whole.first, whole.last, whole);
    describeWaits(whole.first, whole.last, asked);
  } else {
    const [start, end] = [whole.first + Number(parameters.from), whole.first + Number(parameters.to)];
    view.show(start, end);
    await showWindow(start, end);
  }
  return { title, leave: () => view.destroy() };
}

/** Who waited for whom in a window, the main rows in the line that is always seen. `found`: of /api/usage, or an error. */
function drawWaits(place, found) {
  const summary = (what) => h("summary", {}, `Who waited for whom: ${what}`);
  if (found instanceof Error) {
    fill(place, summary(found.message));
    return;
  }
  if (found.wall_s === null) {
    fill(place, summary(found.num_events ? `zoom in: ${number(found.num_events)} events are too many to analyze` : "nothing ran here"));
    return;
  }
  const fraction = (part) => (found.wall_s > 0 ? percent(part / found.wall_s) : "–");
  const waits = found.waits.map((wait) => [`one wait: ${oneLine(wait.name, 40)}, ${oneLine(wait.track, 40)}`, wait.end - wait.start]);
  const rows = [...found.rows, ...waits].map(([what, spent]) => [what, Charts.duration(spent), fraction(spent)]);
  const first = found.rows.filter(([what]) => !what.startsWith("–")).map(([what, spent]) => `${what}: ${fraction(spent)}`);
  fill(place, summary(first.join(", ")), table(["of this window", "#time", "#fraction"], rows, { isNamed: true }));
}
