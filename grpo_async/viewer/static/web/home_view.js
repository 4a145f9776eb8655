/* All runs, the most recently updated first: which of them learn. Ticked runs can be compared. */

import { address, get, joined } from "./api.js";
import { arrange, badge, button, checkbox, empty, fill, h, heading, hint, link, movers, number, oneLine, panel, part, plural, spacer, table } from "./dom.js";

const EVERY_MS = 4000;
const MAX_REQUESTS = 4; // at a time
const PAGE = 30;

export async function homeView({ app, main, signal }) {
  const cards = new Map(); // name -> {element, at: when the run was updated}
  const ticked = new Set();
  const list = h("div", { class: "runs" });
  const together = h("span", { class: "row" });
  const count = hint();
  let most = PAGE;
  let timer = 0;

  const drawTogether = () => {
    const [run, ...others] = ticked;
    const names = joined(others);
    const links = [
      h("a", { class: "button", href: address("curves", { run, with: names }) }, `Curves of ${ticked.size} runs`),
      h("a", { class: "button", href: address("config", { run, with: names }) }, "Settings that differ"),
    ];
    const isMany = ticked.size > Charts.COLORS;
    fill(together, isMany ? hint(`At most ${Charts.COLORS} runs can be compared.`) : ticked.size > 1 ? links : hint("Tick two or more to compare them."));
  };
  const tick = (name, isOn) => {
    ticked[isOn ? "add" : "delete"](name);
    drawTogether();
  };

  async function read({ name, updated_at: at }) {
    const known = cards.get(name);
    if (known && known.at === at && !known.isRunning) {
      return;
    }
    const card = known || newCard(name);
    cards.set(name, card);
    const found = await get("card", { run: name }, signal).catch((error) => error);
    if (found instanceof Error) {
      card.show({ name, error: found.message });
      return;
    }
    const { updated_at, ...rest } = found;
    Object.assign(card, { at, isRunning: found.status === "running" });
    fill(card.age, ago(updated_at));
    card.show(rest);
  }

  function newCard(name) {
    const age = hint();
    const box = checkbox("", ticked.has(name), (isOn) => tick(name, isOn), { "aria-label": `compare ${name}` });
    return { age, ...part((found, element) => drawCard(element, found, box, age), h("article", { "aria-label": name })) };
  }

  /** Asks about runs that have begun, ended or changed since; about no others. */
  async function refresh() {
    const found = await get("runs", {}, signal);
    app.runs = found.runs;
    const shown = app.runs.slice(0, most);
    const rest = [...shown];
    const work = async () => {
      while (rest.length) {
        await read(rest.shift());
      }
    };
    await Promise.all(Array.from({ length: MAX_REQUESTS }, work));
    if (signal.aborted) {
      return;
    }
    study.show(found.study);
    fill(count, plural(app.runs.length, "run"), found.folder ? ` in ${found.folder}` : "");
    arrange(list, shown.map(({ name }) => cards.get(name).element));
    const more = app.runs.length > most ? button("Show more", () => ((most += PAGE), refresh())) : null;
    const nothing = empty("No run yet.", h("code", {}, "grpo-async prepare-quickstart"), " and ", h("code", {}, "grpo-async train configs/quickstart.yaml"), " make one in a minute.");
    fill(foot, app.runs.length ? more : nothing);
  }

  const foot = h("div", {});
  const study = part((found) => found && panel(h("h2", {}, "Study"), h("p", { class: "said" }, found.advice), table(found.head, found.rows, { label: "Study" })));
  fill(main, heading("Runs", count, spacer(), together), study.element, list, foot);
  drawTogether();
  await refresh();
  const again = () => {
    timer = setTimeout(() => (document.hidden ? null : refresh().catch(() => {}), again()), EVERY_MS);
  };
  again();
  return { title: "Runs", keys: movers(list, "h2 a"), leave: () => clearTimeout(timer) };
}

function drawCard(element, found, box, age) {
  const { name: run, error, verdict, curve, held_out: held } = found;
  element.className = error ? "panel" : `panel run lined ${verdict.level}`;
  if (error) {
    return [link(address("run", { run }), oneLine(run)), " ", hint(error)];
  }
  const values = curve ? curve.values.filter((value) => value !== null) : [];
  const links = [
    link(address("run", { run }), "Overview"),
    link(address("curves", { run }), "Curves"),
    link(address("groups", { run }), "Rollouts"),
  ];
  return [
    h("header", { class: "row" }, box, h("h2", {}, link(address("run", { run }), oneLine(run, 80))), badge(found.status, found.level), spacer(), age),
    h("p", { class: "said verdict", title: verdict.text }, verdict.text),
    h(
      "div",
      { class: "run-numbers small" },
      values.length > 1 ? spark(values) : null,
      h(
        "div",
        { class: "numeric" },
        h("div", {}, hint("reward "), values.length ? `${number(values[0])} → ${number(values.at(-1))}` : "–"),
        held ? h("div", {}, hint("held out "), `${number(held[0])} → ${number(held[1])}`) : null,
      ),
    ),
    h("footer", { class: "row small" }, links, spacer(), hint(found.outcome)),
  ];
}

/** A small curve without axes, as wide and as high as the style sheet says. */
function spark(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${at},${high > low ? (high - value) / (high - low) : 0.5}`);
  const [svg, line] = ["svg", "polyline"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const about = { class: "spark", role: "img", "aria-label": `reward, from ${number(values[0])} to ${number(values.at(-1))}` };
  Object.entries({ ...about, viewBox: `0 0 ${values.length - 1} 1`, preserveAspectRatio: "none" }).forEach((each) => svg.setAttribute(...each));
  line.setAttribute("points", points.join(" "));
  svg.append(line);
  return svg;
}

/** 1000 seconds -> "16 min ago". */
function ago(at) {
  const seconds = Math.max(0, Date.now() / 1000 - at);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([each]) => seconds >= each) || [1, "s"];
  return at ? `${Math.floor(seconds / size)} ${unit} ago` : "";
}
