/* Fills the places of the report with charts, from the data in the page. */

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);

  for (const { place, ...options } of data) {
    Charts[options.kind](document.getElementById(place), options);
  }

  // what a plot shows and its numbers: side by side below it
  for (const explained of document.querySelectorAll(".plot > .explained")) {
    const numbers = explained.parentElement.querySelector(".chart-table");
    const foot = document.createElement("div");
    foot.className = "plot-foot";
    explained.replaceWith(foot);
    foot.append(...(numbers ? [numbers] : []), explained);
  }

  // a printed report shows what is folded, too: rollouts, not the tables of numbers
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("#rollouts details:not([open])")];
    folded.forEach((details) => (details.open = true));
  });
  window.addEventListener("afterprint", () => folded.forEach((details) => (details.open = false)));

  document.documentElement.dataset.ready = "true";
})();
