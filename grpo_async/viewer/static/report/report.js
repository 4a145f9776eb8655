/* Draws the charts of the report, from the data in the page. */

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);

  for (const { id, ...options } of data) {
    Charts.line(document.getElementById(id), options);
  }

  // a printed report shows the rollouts that are folded, too
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("#rollouts details:not([open])")];
    folded.forEach((details) => (details.open = true));
  });
  window.addEventListener("afterprint", () => folded.forEach((details) => (details.open = false)));

  document.documentElement.dataset.ready = "true";
})();
