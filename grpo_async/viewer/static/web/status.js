/* Polls how much there is by now, and tells the view; it never redraws anything itself. It asks every few seconds, and not
   at all while the tab is hidden or no run is shown. */

import { get } from "./api.js";
import { h, oneLine, plural } from "./dom.js";

const EVERY_MS = 4000;

export class StatusPoll {
  /** `onLocked` is called when the server does not know this page anymore: it was restarted, with another token. */
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.element = h("span", { class: "run-status" });
    this.run = null;
    this.listener = () => {};
    document.addEventListener("visibilitychange", () => document.hidden || this.soon());
  }

  watch(run, listener) {
    if (run !== this.run) {
      this.say("", "");
    }
    this.run = run;
    this.listener = listener;
    this.soon();
  }

  soon() {
    this.schedule(0);
  }

  schedule(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), wait);
  }

  async ask() {
    const { run } = this;
    if (document.hidden || run === null) {
      return; // becoming visible begins again
    }
    try {
      const found = await get("status", { run });
      if (run !== this.run) {
        return;
      }
      this.show(found);
      this.listener(found);
    } catch (error) {
      if (error.status === 401) {
        this.run = null; // until the page is loaded again, with the new token
        this.onLocked();
        return;
      }
      this.say("bad", "no response", error.message);
    }
    this.schedule(EVERY_MS);
  }

  show({ status, counts }) {
    const rollouts = plural(counts.rollouts, "rollout");
    if (status.state === "running") {
      const step = status.max_steps ? `step ${status.step ?? 0} of ${status.max_steps} · ` : "";
      const left = status.eta_s ? `, ${Charts.duration(status.eta_s)} left` : "";
      this.say("good", `${step}${rollouts}`, `running: ${oneLine(status.phase || "", 80)}${left}`);
    } else {
      const why = status.why ? `; ${oneLine(status.why, 300)}` : "";
      this.say("", rollouts, status.state ? `the run: ${oneLine(status.state, 40)}${why}` : "");
    }
  }

  say(level, message, title = "") {
    this.element.className = `run-status ${level}`;
    this.element.textContent = message;
    this.element.title = title;
  }
}
