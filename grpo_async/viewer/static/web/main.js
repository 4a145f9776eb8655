/* The frame of the page: asks for the token, draws the bar of runs and views, handles keys, and shows the view in the address. */

import { ApiError, DEFAULT_VIEW, address, current, get, go, isKnown, memory, report } from "./api.js";
import { announce, button, empty, fill, h, link, oneLine, select, spacer } from "./dom.js";
import { StatusPoll } from "./status.js";
import { configView } from "./config_view.js";
import { curvesView } from "./curves_view.js";
import { explorerView } from "./explorer_view.js";
import { groupView } from "./group_view.js";
import { helpView } from "./help_view.js";
import { homeView } from "./home_view.js";
import { rolloutView } from "./rollout_view.js";
import { runView } from "./run_view.js";

const VIEWS = {
  home: homeView,
  run: runView,
  groups: explorerView("groups"),
  rollouts: explorerView("rollouts"),
  group: groupView,
  rollout: rolloutView,
  curves: curvesView,
  config: configView,
  help: helpView,
};
const ALL_TABS = {
  run: "Overview",
  curves: "Curves",
  groups: "Groups",
  rollouts: "Rollouts",
  config: "Settings",
};
const REPORTED = ["run", "curves", "rollouts", "config"]; // views that every report has
const TABS = Object.fromEntries(Object.entries(ALL_TABS).filter(([tab]) => !report || REPORTED.includes(tab)));
const TAB_OF = { group: "groups", rollout: "rollouts" }; // of views about one thing

const app = { runs: [], names: [], run: null, list: null };
const main = document.getElementById("main");
const bar = document.getElementById("bar");
let keys = {};
let poll = null;
let view = null; // {title, keys, up(), leave(), onStatus()} of what is shown
let drawing = null; // aborts what the view before still asks for

async function start() {
  window.addEventListener("hashchange", () => {
    if (tokenInAddress() !== null) {
      location.reload(); // the address of another start was pasted into this tab
    }
  });
  const token = tokenInAddress();
  if (token !== null) {
    history.replaceState(null, "", location.pathname);
    memory.set("token", token);
  }
  let found;
  try {
    found = await get("runs");
  } catch (error) {
    showError(error);
    return;
  }
  Object.assign(app, { runs: found.runs, names: found.names });
  if (!location.hash) {
    const { view: opening, query, sort } = found.opening;
    history.replaceState(null, "", address(opening, { q: query, sort }));
  }
  poll = report ? { element: null, watch: () => {} } : new StatusPoll(askForToken); // a report does not change
  const tabKeys = Object.keys(TABS).map((tab, index) => [index + 1, () => (location.hash = tabAddress(tab))]);
  const more = report ? {} : { h: () => go("home"), "?": () => go("help", { run: app.run }), "/": focusQuery };
  keys = { ...more, Escape: up, ...Object.fromEntries(tabKeys) };
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", show);
  await show();
}

function tokenInAddress() {
  return new URLSearchParams(location.hash.slice(1)).get("token");
}

/** Keys of the page and of the view. Not while somebody writes, and none with Ctrl, Alt or the command key. */
function onKey(event) {
  const { target } = event;
  const isWriting = target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName);
  if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented || isWriting) {
    if (event.key === "Escape" && isWriting && !(target.type === "search" && target.value)) {
      target.blur(); // the browser empties a search box first
    }
    return;
  }
  const act = (view && view.keys && view.keys[event.key]) || keys[event.key];
  if (act && act(event) !== false) {
    event.preventDefault();
  }
}

/** `event`: that the address has changed. From a tab one goes to a group or a rollout, and back to the tab as it was. */
async function show(event = null) {
  const left = event ? new URL(event.oldURL).hash : "";
  app.list = current(left).view in TABS ? left : app.list;
  const { view: name, parameters } = current();
  drawing?.abort();
  drawing = new AbortController();
  const { signal } = drawing;
  view?.leave?.();
  view = null;
  app.run = parameters.run || app.run || app.runs[0]?.name;
  parameters.run = app.run;
  drawBar(name);
  if (!VIEWS[name]) {
    fill(main, empty("This view does not exist.", link(address(DEFAULT_VIEW), "To the runs")));
    return;
  }
  main.className = `view-${name}`;
  main.setAttribute("aria-busy", "true");
  try {
    const drawn = await VIEWS[name]({ app, main, parameters, signal });
    if (signal.aborted) {
      drawn.leave?.();
      return;
    }
    view = drawn;
    main.querySelectorAll("a[href^='#/']").forEach((each) => isThere(each.hash) || each.removeAttribute("href"));
    document.title = name === DEFAULT_VIEW ? "grpo-async" : `${drawn.title} · ${app.run}`;
    announce(drawn.title);
    poll.watch((name !== DEFAULT_VIEW && app.run) || null, (found) => drawn.onStatus?.(found));
  } catch (error) {
    if (error.name !== "AbortError" && !signal.aborted) {
      showError(error);
    }
  } finally {
    if (!signal.aborted) {
      main.removeAttribute("aria-busy"); // else the view that came after it is still being drawn
    }
  }
}

/** Whether the address leads to something. */
function isThere(hash) {
  const { view: name, parameters } = current(hash);
  return REPORTED.includes(name) || isKnown(name, parameters);
}

/** All runs, or the one that a report is about. */
function firstPage() {
  return report ? address("run", { run: app.run }) : address(DEFAULT_VIEW);
}

/** The run whose evaluation it is, or the run itself. */
function ownerOf(name) {
  return app.runs.find(({ evaluations }) => evaluations.some((each) => each.name === name))?.name ?? name;
}

/** The tables keep what is looked for. */
function tabAddress(tab) {
  const { view: from, parameters } = current();
  const keeps = ["groups", "rollouts"];
  const { q } = keeps.includes(tab) && keeps.includes(from) ? parameters : {};
  return address(tab, { run: tab === "run" ? ownerOf(app.run) : app.run, q });
}

function drawBar(name) {
  const active = TAB_OF[name] || name;
  const tab = ([each, label]) => h("a", { href: tabAddress(each), "aria-current": each === active ? "page" : null }, label);
  const evaluations = (run) => run.evaluations.map((each) => [each.name, `${run.name} at step ${each.step}, evaluation`]);
  const runs = app.runs.flatMap((run) => [[run.name, run.name], ...evaluations(run)]);
  const choose = (run) => (name in TAB_OF ? go("groups", { run }) : go(name, { run, q: current().parameters.q }));
  const isHome = name === DEFAULT_VIEW;
  const chosen = report ? h("strong", {}, oneLine(app.run, 60)) : select({ id: "run", "aria-label": "Run" }, runs, app.run, choose);
  const help = report ? null : h("a", { href: address("help", { run: app.run }), title: "Queries and keys (?)", "aria-current": name === "help" ? "page" : null }, "Help");
  fill(
    bar,
    report ? null : h("a", { class: "home", href: address(DEFAULT_VIEW), "aria-current": isHome ? "page" : null, title: "All runs (h)" }, "Runs"),
    isHome ? spacer() : h("div", { class: "row" }, chosen, poll.element),
    isHome ? help : h("nav", { "aria-label": "Views" }, Object.entries(TABS).map(tab), help),
  );
  bar.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone the tabs scroll
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

/** From a rollout to its group, from a group to the list that one came from; above all runs is nothing. */
function up() {
  const { view: name } = current();
  if (name === DEFAULT_VIEW) {
    return;
  }
  const before = name in TABS || !app.list ? firstPage() : app.list;
  const above = view?.up?.() ?? before;
  location.hash = isThere(above) ? above : before;
}

function showError(error) {
  if (error.status === 401) {
    askForToken();
    return;
  }
  if (!(error instanceof ApiError)) {
    console.error(error);
  }
  const message = error instanceof ApiError ? error.message : `an error in this page: ${error.message}`;
  const title = error.status === 404 ? "Not found" : "Something went wrong";
  const again = report ? null : button("Try again", () => (poll ? show() : location.reload()));
  const onward = [400, 404].includes(error.status) ? link(firstPage(), report ? "Overview" : "All runs") : again;
  fill(main, h("div", { role: "alert" }, empty(title, h("span", { class: "said" }, message), h("br"), onward)));
}

function askForToken() {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const submit = (event) => {
    event.preventDefault();
    memory.set("token", input.value.trim().split("token=").pop());
    location.reload();
  };
  const form = h(
    "form",
    { class: "token-form", on: { submit } },
    h("h1", {}, "The inspector needs its token"),
    h("p", {}, "The terminal in which ", h("code", {}, "grpo-async inspect"), " runs printed an address that ends in it. Open that address, or paste it here. It changes with every start."),
    h("label", { for: "token" }, "Address or token"),
    h("div", { class: "row" }, input, h("button", { type: "submit", class: "primary" }, "Open")),
  );
  fill(bar);
  fill(main, form);
  input.focus();
}

start();
