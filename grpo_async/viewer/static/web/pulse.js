/* Asks how much there is by now, and tells the view; it never redraws by itself. Every 2 s while something changes, ever more
   seldom while nothing does, not at all while the tab is hidden. */

import { get } from "./api.js";
import { h, plural, seconds } from "./dom.js";

const SHORTEST_MS = 2000;
const LONGEST_MS = 20000;
const FRESH_S = 30; // a status file that is older is that of a run that has ended or been killed

export class Pulse {
  constructor() {
    this.element = h("span", { class: "pulse" });
    this.run = null;
    this.listener = () => {};
    this.timer = null;
    this.wait = SHORTEST_MS;
    this.seen = null;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) {
        this.soon();
      }
    });
  }

  watch(run, listener) {
    if (run !== this.run) {
      this.seen = null;
      this.say("", "");
    }
    this.run = run;
    this.listener = listener;
    this.soon();
  }

  soon() {
    this.wait = SHORTEST_MS;
    this.schedule(0);
  }

  schedule(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.beat(), wait);
  }

  async beat() {
    if (document.hidden) {
      return; // becoming visible begins again
    }
    const run = this.run;
    try {
      const beat = await get("pulse", { run });
      if (run !== this.run) {
        return;
      }
      const changed = this.seen !== null && this.seen !== beat.until;
      this.wait = changed ? SHORTEST_MS : Math.min(LONGEST_MS, this.wait * 1.4);
      this.seen = beat.until;
      this.show(beat);
      this.listener(beat);
    } catch (error) {
      this.wait = Math.min(LONGEST_MS, this.wait * 2);
      this.say("lost", "no answer", error.message);
    }
    this.schedule(this.wait);
  }

  show(beat) {
    const { status } = beat;
    const age = status.updated_at ? Math.max(0, Date.now() / 1000 - status.updated_at) : Infinity;
    const words = plural(beat.counts.rollouts, "rollout");
    if (status.state === "running" && age < FRESH_S) {
      const step = status.max_steps ? `step ${status.step ?? 0} of ${status.max_steps} · ` : "";
      const left = status.eta_s ? `, ${seconds(status.eta_s)} left` : "";
      this.say("live", `${step}${words}`, `running: ${status.phase || ""}${left}`);
    } else {
      this.say("still", words, status.state ? `the run is ${status.state === "running" ? "no longer writing" : status.state}` : "");
    }
  }

  say(state, words, title = "") {
    this.element.className = `pulse pulse-${state}`;
    this.element.textContent = words;
    this.element.title = title;
  }
}
