/* The logs and the settings of a run. */

import { get, go, split } from "./api.js";
import { compared, copyButton, empty, fill, h, hiddenHeading, hint, oneLine, panel, select, spacer, table, visible } from "./dom.js";

const LEVELS = [[/\b(ERROR|CRITICAL|Traceback|Error:)/, "bad"], [/\bWARN(ING)?\b/, "warning"]];

export async function logsView({ main, parameters, signal }) {
  const { run, attempt, file } = parameters;
  const title = "Logs";
  const read = () => get("logs", { run, attempt, file }, signal);
  const found = await read();
  if (!found.attempts.length) {
    fill(main, hiddenHeading(title), empty("There are no logs.", "A run writes them to logs/attempt_N."));
    return { title };
  }
  const box = h("pre", { class: "panel log", tabindex: "0", "aria-label": found.file });
  const show = (lines) => {
    const level = (line) => (LEVELS.find(([pattern]) => pattern.test(line)) || [])[1] || "";
    fill(box, lines.map((line) => h("span", { class: `said level ${level(line)}` }, `${visible(line)}\n`)));
    box.scrollTop = box.scrollHeight;
  };
  /** Follows the log while its end is in sight and nothing in it is selected. */
  const onStatus = async () => {
    const { lines } = await read().catch(() => found); // the next poll tries again
    const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
    if (isAtEnd && lines.join("\n") !== found.lines.join("\n") && !(String(getSelection()) && getSelection().containsNode(box, true))) {
      found.lines = lines;
      show(lines);
    }
  };
  const choose = (name, values, value) =>
    select({ "aria-label": name }, values.map((each) => [each, each]), value, (wanted) => go("logs", { run, attempt: found.attempt, [name]: wanted }));
  fill(
    main,
    hiddenHeading(title),
    h("div", { class: "row heading" }, choose("attempt", found.attempts, found.attempt), choose("file", found.files, found.file), hint(found.path), spacer(), copyButton("text", () => box.textContent)),
    box,
  );
  show(found.lines);
  return { title, onStatus };
}

export async function configView({ main, parameters, signal }) {
  const { run } = parameters;
  const title = "Settings";
  const { settings, runs, different, path } = await get("config", { run, compare_with: parameters.with }, signal);
  const place = h("div", {});
  const filter = h("input", { type: "search", "aria-label": "Find a setting", placeholder: "find a setting", autocomplete: "off", on: { input: () => draw() } });
  const code = ([name, ...values]) => [h("code", {}, oneLine(name, 200)), ...values.map((value) => h("code", { class: "said" }, visible(value)))];
  const draw = () => fill(place, table(["setting", "value"], settings.filter(([name]) => name.includes(filter.value)).map(code), { className: "settings" }));
  draw();
  fill(
    main,
    hiddenHeading(title),
    h("div", { class: "row heading" }, filter, hint(path), spacer()),
    parameters.with ? panel(h("h2", {}, "Settings that differ", compared(new Set([run, ...split(parameters.with)]).size)), table(["setting", ...runs], different.map(code), { className: "settings" })) : null,
    place,
    h("p", { class: "hint" }, "Arguments of your code, addresses, accounts and trackers are left out: they may be secret."),
  );
  return { title };
}
