/* The shell: who may read, the bar with runs and views, keys, and which view the address asks for. */

import { ApiError, get, openSession } from "./api.js";
import { announce, empty, fill, h } from "./dom.js";
import { startKeys } from "./keys.js";
import { Pulse } from "./pulse.js";
import { DEFAULT_VIEW, address, current, go } from "./routes.js";
import { compareView } from "./compare_view.js";
import { curvesView } from "./curves_view.js";
import { explorerView } from "./explorer_view.js";
import { groupView } from "./group_view.js";
import { helpView } from "./help_view.js";
import { promptView } from "./prompt_view.js";
import { promptsView } from "./prompts_view.js";
import { rolloutView } from "./rollout_view.js";
import { timelineView } from "./timeline_view.js";

const VIEWS = {
  groups: explorerView("groups"),
  rollouts: explorerView("rollouts"),
  group: groupView,
  rollout: rolloutView,
  prompts: promptsView,
  prompt: promptView,
  compare: compareView,
  curves: curvesView,
  timeline: timelineView,
  help: helpView,
};
const TABS = [
  ["groups", "Groups"],
  ["rollouts", "Rollouts"],
  ["prompts", "Prompts"],
  ["curves", "Curves"],
  ["timeline", "Timeline"],
];
const TAB_OF = { group: "groups", rollout: "rollouts", prompt: "prompts", compare: "prompts" };

const app = { runs: [], fields: [], words: [], run: null, keys: {}, pulse: null, list: null };
let view = null; // {leave(), keys} of what is shown
let drawing = null; // aborts what the view before still asks for

async function start() {
  window.addEventListener("hashchange", () => {
    if (new URLSearchParams(location.hash.slice(1)).has("token")) {
      location.reload(); // the address of another start was pasted into this tab
    }
  });
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token !== null) {
    history.replaceState(null, "", location.pathname);
  }
  try {
    if (token !== null) {
      await openSession(token);
    }
    const found = await get("runs");
    Object.assign(app, { runs: found.runs, fields: found.fields, words: found.words, opening: found.opening });
  } catch (error) {
    return error.status === 401 ? askForToken() : showError(error);
  }
  if (!location.hash) {
    history.replaceState(null, "", address(DEFAULT_VIEW, { q: app.opening.query, sort: app.opening.sort, superseded: app.opening.superseded }));
  }
  app.pulse = new Pulse(askForToken);
  startKeys(() => ({ ...app.keys, ...((view && view.keys) || {}) }));
  app.keys = {
    "?": () => go("help", { run: app.run }),
    "/": () => focusQuery(),
    Escape: () => up(),
    ...Object.fromEntries(TABS.map(([tab], index) => [index + 1, () => (location.hash = tabAddress(tab, current()))])),
  };
  window.addEventListener("hashchange", show);
  await show();
  return undefined;
}

async function show() {
  const { view: name, parameters } = current();
  if (drawing) {
    drawing.abort();
  }
  drawing = new AbortController();
  const { signal } = drawing;
  const main = document.getElementById("main");
  if (view && view.leave) {
    view.leave();
  }
  view = null;
  app.run = parameters.run || app.run || app.runs[0].name;
  parameters.run = app.run;
  drawBar(name, parameters);
  const draw = VIEWS[name];
  if (!draw) {
    fill(main, empty("There is no such view.", h("a", { href: address(DEFAULT_VIEW) }, "To the groups")));
    return;
  }
  main.className = `view view-${name}`;
  main.setAttribute("aria-busy", "true");
  try {
    const drawn = await draw({ app, main, parameters, signal });
    if (signal.aborted) {
      if (drawn && drawn.leave) {
        drawn.leave();
      }
      return;
    }
    view = drawn;
    document.title = `${drawn.title || name} · ${app.run}`;
    announce(drawn.title || name);
    app.pulse.watch(app.run, (beat) => drawn.onPulse && drawn.onPulse(beat));
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) {
      return;
    }
    if (error.status === 401) {
      askForToken();
    } else {
      showError(error);
    }
  } finally {
    main.removeAttribute("aria-busy");
  }
}

/** The tables keep what is looked for, and so do the prompts. */
function tabAddress(tab, { view: from, parameters }) {
  const keeps = ["groups", "rollouts", "prompts"];
  const { q, superseded } = keeps.includes(tab) && keeps.includes(from) ? parameters : {};
  return address(tab, { run: app.run, q, superseded: tab === "prompts" ? null : superseded });
}

function drawBar(name, parameters) {
  const active = TAB_OF[name] || name;
  const tabs = TABS.map(([tab, label]) =>
    h(
      "a",
      {
        href: tabAddress(tab, { view: name, parameters }),
        "aria-current": tab === active ? "page" : null,
      },
      label,
    ),
  );
  const options = app.runs.flatMap((run) => [run, ...run.evaluations.map((each) => ({ ...each, of: run.name }))]);
  const select = h(
    "select",
    {
      id: "run",
      on: {
        change: (event) => {
          const keep = VIEWS[name] && !["group", "rollout", "prompt", "compare"].includes(name);
          go(keep ? name : DEFAULT_VIEW, { run: event.target.value, q: keep ? current().parameters.q : null });
        },
      },
    },
    options.map((each) => h("option", { value: each.name }, each.of ? `${each.of}, evaluation at step ${each.step}` : each.name)),
  );
  select.value = app.run;
  fill(
    document.getElementById("bar"),
    h("div", { class: "bar-run" }, h("label", { for: "run", class: "visually-hidden" }, "Run"), select, app.pulse.element),
    h("nav", { "aria-label": "Views" }, tabs),
    h("a", { class: "bar-help", href: address("help", { run: app.run }), title: "Queries and keys (?)" }, "Help"),
  );
}

function focusQuery() {
  const box = document.getElementById("query");
  if (box) {
    box.focus();
    box.select();
  } else {
    go("rollouts", { run: app.run });
  }
}

/** From a rollout to its group, from a group to the list that one came from. */
function up() {
  const { view: name } = current();
  if (view && view.up) {
    location.hash = view.up();
  } else if (name !== "groups" && name !== "rollouts") {
    location.hash = app.list || address(DEFAULT_VIEW, { run: app.run });
  }
}

function showError(error) {
  const words = error instanceof ApiError ? error.message : `this page has a fault: ${error.message}`;
  if (!(error instanceof ApiError)) {
    console.error(error);
  }
  fill(
    document.getElementById("main"),
    h(
      "div",
      { class: "empty", role: "alert" },
      h("p", { class: "empty-heading" }, error.status === 404 ? "Not found" : "That did not work"),
      h("p", { class: "said" }, words),
      h("p", {}, h("button", { type: "button", on: { click: () => show() } }, "Try again")),
    ),
  );
}

function askForToken() {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h(
    "form",
    {
      class: "token-form",
      on: {
        submit: async (event) => {
          event.preventDefault();
          const given = input.value.trim();
          const token = given.includes("token=") ? given.split("token=")[1] : given;
          if (await openSession(decodeURIComponent(token))) {
            location.reload();
          } else {
            problem.textContent = "That is not the token of this start.";
          }
        },
      },
    },
    h("h1", {}, "This inspector asks for its token"),
    h(
      "p",
      {},
      "The terminal in which ",
      h("code", {}, "grpo-async inspect-rollouts --web"),
      " runs printed an address that ends in it. Open that address, or paste it here. It changes with every start.",
    ),
    h("label", { for: "token" }, "Address or token"),
    h("div", { class: "row" }, input, h("button", { type: "submit", class: "primary" }, "Open")),
    problem,
  );
  fill(document.getElementById("bar"));
  fill(document.getElementById("main"), form);
  input.focus();
}

start();
