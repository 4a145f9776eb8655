/* Tokens in their colours, and a box with every figure of the one under the pointer or the focus. */

import { fill, h, number, visible } from "./dom.js";

const CHUNK = 400; // tokens in one block: blocks far from the window are not laid out

export class Tokens {
  /** `data` as the server gives it (`tokens` of /api/rollout); `advantage` of the rollout. */
  constructor(data, advantage) {
    this.data = data;
    this.advantage = advantage;
    this.mode = data.modes[0].name;
    this.chosen = null;
    this.spans = new Map();
    this.tip = h("div", { id: "token-figures", class: "tip", role: "tooltip", hidden: true });
    this.legend = h("ul", { class: "legend", "aria-label": "Colours" });
  }

  get length() {
    return this.data.ids.length;
  }

  /** The tokens from `first` up to `last`, as blocks of spans. */
  block(first, last, label) {
    const box = h("div", { class: "tokens", role: "group", "aria-label": label });
    for (let start = first; start < last; start += CHUNK) {
      const chunk = h("div", { class: "token-chunk" });
      for (let index = start; index < Math.min(last, start + CHUNK); index += 1) {
        chunk.append(this.span(index));
      }
      box.append(chunk);
    }
    box.addEventListener("pointerover", (event) => this.onEnter(event.target));
    box.addEventListener("pointerleave", () => this.hide());
    box.addEventListener("focusin", (event) => this.onEnter(event.target));
    box.addEventListener("focusout", () => this.hide());
    box.addEventListener("click", (event) => event.target.dataset.token && event.target.focus());
    box.addEventListener("keydown", (event) => this.onKey(event));
    return box;
  }

  span(index) {
    const { texts, ids } = this.data;
    const shown = texts ? texts[index].replace(/\n/g, "↵\n") : `${ids[index]} `;
    const isFirst = this.spans.size === 0;
    const span = h("span", { class: this.classOf(index), "data-token": index, tabindex: isFirst ? "0" : "-1", "aria-describedby": "token-figures" }, shown === "" ? "∅" : shown);
    this.spans.set(index, span);
    return span;
  }

  classOf(index) {
    const place = this.data.classes[this.mode][index];
    return `token token-${this.data.palette[place]}`;
  }

  colour(mode) {
    this.mode = mode;
    for (const [index, span] of this.spans) {
      span.className = this.classOf(index);
    }
    const { legend } = this.data.modes.find((each) => each.name === mode);
    fill(
      this.legend,
      legend.map((entry) => h("li", {}, h("span", { class: `swatch token-${entry.name}` }), entry.text)),
    );
  }

  onEnter(target) {
    const index = target.dataset && target.dataset.token;
    if (index !== undefined) {
      this.show(Number(index), target);
    }
  }

  onKey(event) {
    const index = Number(event.target.dataset.token);
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: this.length - 1 }[event.key];
    const span = this.spans.get(next);
    if (event.key === "Escape") {
      event.target.blur();
    } else if (span) {
      event.target.tabIndex = -1;
      span.tabIndex = 0;
      unfold(span);
      span.focus();
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  show(index, span) {
    fill(this.tip, this.figures(index));
    this.tip.hidden = false;
    if (this.chosen) {
      this.chosen.classList.remove("at");
    }
    this.chosen = span;
    span.classList.add("at");
    const place = span.getClientRects()[0] || span.getBoundingClientRect();
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const left = Math.max(8, Math.min(place.left, window.innerWidth - width - 8));
    const below = place.bottom + 6;
    const top = below + height > window.innerHeight - 8 && place.top - height - 6 > 0 ? place.top - height - 6 : below;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${top}px`;
  }

  hide() {
    this.tip.hidden = true;
    if (this.chosen) {
      this.chosen.classList.remove("at");
    }
    this.chosen = null;
  }

  figures(index) {
    const { data } = this;
    const at = (list) => (list ? list[index] : null);
    const sampler = at(data.logprobs);
    const trainer = at(data.trainer_logprobs);
    const isTrained = data.mask[index] === 1;
    const name = data.texts ? JSON.stringify(data.texts[index]) : `token ${data.ids[index]}`;
    const known = (value, digits = 4) => (value === null || value === undefined ? "–" : number(value, digits));
    const rows = [
      ["id", String(data.ids[index])],
      ["place", `${index} of ${this.length}`],
      ["sampled by policy", isTrained ? "yes" : "no: template, tool or environment"],
    ];
    if (isTrained) {
      rows.push(
        ["policy version", String(data.versions[index])],
        ["sampler logprob", known(sampler)],
        ["sampler probability", sampler === null ? "–" : known(Math.exp(sampler))],
        ["trainer logprob", known(trainer)],
        ["log ratio, trainer − sampler", trainer === null || sampler === null ? "–" : known(trainer - sampler)],
        ["proximal logprob", known(at(data.proximal_logprobs))],
        ["importance weight", known(at(data.weights))],
        ["entropy, nats", known(at(data.entropies))],
        ["advantage", known(this.advantage)],
        ["marks", this.marks(index)],
      );
    }
    return [
      h("p", { class: "tip-text" }, visible(name)),
      h(
        "dl",
        {},
        rows.map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]),
      ),
    ];
  }

  marks(index) {
    const { marks, mark_words: words } = this.data;
    if (!marks || marks[index] === null) {
      return "not recorded";
    }
    return (words[marks[index]] || []).join(", ") || "none";
  }
}

/** What is folded has no place on the page and cannot take the focus. */
function unfold(element) {
  for (let folded = element.closest("details:not([open])"); folded; folded = folded.parentElement.closest("details:not([open])")) {
    folded.open = true;
  }
}

/** Places of the turns among the completion's tokens: {first, sampled, last}; sampled..last are what tools or environments wrote.

   [3, 2] sampled tokens and the mask 1 1 1 0 0 1 1 -> {0, 3, 5} and {5, 7, 7}. */
export function turnPlaces(turns, mask) {
  let at = 0;
  return turns.map((turn) => {
    const first = at;
    const sampled = Math.min(mask.length, first + turn.num_tokens);
    at = sampled;
    while (at < mask.length && !mask[at]) {
      at += 1;
    }
    return { first, sampled, last: at };
  });
}
