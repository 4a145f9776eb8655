/* The settings of a run, and in what those of others differ. */

import { get, split } from "./api.js";
import { compared, fill, h, hiddenHeading, hint, oneLine, panel, spacer, table, visible } from "./dom.js";

export async function configView({ main, parameters, signal }) {
  const { run } = parameters;
  const title = "Settings";
  const { settings, runs, different, path } = await get("config", { run, compare_with: parameters.with }, signal);
  const place = h("div", { class: "part" });
  const filter = h("input", { type: "search", "aria-label": "Find a setting", placeholder: "find a setting", autocomplete: "off", on: { input: () => draw() } });
  const code = ([name, ...values]) => [h("code", {}, oneLine(name, 200)), ...values.map((value) => h("code", { class: "said" }, visible(value)))];
  const draw = () => {
    const wanted = filter.value.toLowerCase();
    const tableOf = (heads, rows) => {
      const found = rows.filter((row) => row.some((each) => String(each).toLowerCase().includes(wanted)));
      return found.length ? table(heads, found.map(code), { className: "settings" }) : h("p", { class: "hint" }, wanted ? "No setting matches." : "None.");
    };
    const heading = h("h2", {}, "Settings that differ", compared(new Set([run, ...split(parameters.with)]).size));
    fill(place, parameters.with && panel(heading, tableOf(["setting", ...runs], different)), tableOf(["setting", "value"], settings));
  };
  draw();
  fill(
    main,
    hiddenHeading(title),
    h("div", { class: "row heading" }, filter, hint(path), spacer()),
    place,
    h("p", { class: "hint" }, "Arguments of your code, addresses, accounts and trackers are left out: they may be secret."),
  );
  return { title };
}
