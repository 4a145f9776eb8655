/* Tokens in their colors, and a box with every value of the one under the pointer or the focus. */

import { fill, h, number, visible } from "./dom.js";
import { classOf, legendOf, logRatio, MODES } from "./token_colors.js";

const CHUNK = 400; // tokens in one block: blocks far from the window are not laid out

export class Tokens {
  /** `data` as the server gives it (`tokens` of /api/rollout); `advantage` of the rollout. */
  constructor(data, advantage) {
    this.data = data;
    this.advantage = advantage;
    [this.mode] = Object.keys(MODES);
    this.chosen = null;
    this.spans = new Map();
    this.tip = h("div", { id: "token-values", class: "tip", role: "tooltip", hidden: true });
    this.legend = h("ul", { class: "legend bare", "aria-label": "Colors" });
  }

  /** The tokens from `first` up to `last`, as blocks of spans. */
  block(first, last, label) {
    const on = {
      pointerover: (event) => this.onEnter(event.target),
      pointerleave: () => this.hide(),
      focusin: (event) => this.onEnter(event.target),
      focusout: () => this.hide(),
      click: (event) => event.target.dataset.token && event.target.focus(),
      keydown: (event) => this.onKey(event),
    };
    const box = h("div", { class: "tokens", role: "group", "aria-label": label, on });
    for (let start = first; start < last; start += CHUNK) {
      const chunk = h("div", { class: "token-chunk" });
      for (let index = start; index < Math.min(last, start + CHUNK); index += 1) {
        chunk.append(this.span(index));
      }
      box.append(chunk);
    }
    return box;
  }

  span(index) {
    const { texts, completion_ids: ids } = this.data;
    const shown = texts ? texts[index].replace(/\n/g, "↵\n") || "∅" : `${ids[index]} `;
    const tabindex = this.spans.size === 0 ? "0" : "-1";
    const span = h("span", { class: this.classOf(index), "data-token": index, tabindex, "aria-describedby": "token-values" }, shown);
    this.spans.set(index, span);
    return span;
  }

  classOf(index) {
    return `token token-${classOf(this.mode, this.data, index)}`;
  }

  color(mode) {
    this.mode = mode;
    this.spans.forEach((span, index) => (span.className = this.classOf(index)));
    fill(this.legend, legendOf(mode, this.data).map(([name, text]) => h("li", {}, h("span", { class: `swatch token-${name}` }), text)));
  }

  onEnter(target) {
    if (target.dataset.token !== undefined) {
      this.show(Number(target.dataset.token), target);
    }
  }

  onKey(event) {
    const index = Number(event.target.dataset.token);
    const last = this.data.completion_ids.length - 1;
    const span = this.spans.get({ ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: last }[event.key]);
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
    this.hide();
    fill(this.tip, this.values(index));
    this.tip.hidden = false;
    this.chosen = span;
    span.classList.add("at");
    const place = span.getClientRects()[0] || span.getBoundingClientRect();
    const [width, height] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const [below, above] = [place.bottom + 6, place.top - height - 6];
    this.tip.style.left = `${Math.max(8, Math.min(place.left, window.innerWidth - width - 8))}px`;
    this.tip.style.top = `${below + height > window.innerHeight - 8 && above > 0 ? above : below}px`;
  }

  hide() {
    this.tip.hidden = true;
    this.chosen?.classList.remove("at");
    this.chosen = null;
  }

  values(index) {
    const { data } = this;
    const at = (list) => (list ? list[index] : null);
    const known = (value) => number(value, 4);
    const [sampler, trainer] = [at(data.logprobs), at(data.trainer_logprobs)];
    const isSampled = data.mask[index] === 1;
    const name = data.texts ? JSON.stringify(data.texts[index]) : `token ${data.completion_ids[index]}`;
    const rows = {
      id: String(data.completion_ids[index]),
      position: `${index + 1} of ${data.completion_ids.length}`,
      "sampled by policy": isSampled ? "yes" : "no: template, tool or environment",
    };
    if (isSampled) {
      Object.assign(rows, {
        "policy version": String(data.versions[index]),
        "sampler logprob": known(sampler),
        "sampler probability": known(sampler === null ? null : Math.exp(sampler)),
        "trainer logprob": known(trainer),
        "log ratio, trainer − sampler": known(logRatio(data, index)),
        "proximal logprob": known(at(data.proximal_logprobs)),
        "importance weight": known(at(data.weights)),
        "entropy, nats": known(at(data.entropies)),
        advantage: known(this.advantage),
        flags: this.flags(index),
      });
    }
    const pairs = Object.entries(rows).map(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]);
    return [h("strong", { class: "said" }, visible(name)), h("dl", {}, pairs)];
  }

  flags(index) {
    const { token_flags: flags, flag_names: names } = this.data;
    return !flags || flags[index] === null ? "not recorded" : names[flags[index]].join(", ") || "none";
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
