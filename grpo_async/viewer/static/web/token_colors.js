/* How tokens are colored: one value of each token -> a class of token_colors.css, and a legend that says what the classes mean.

   Log ratio: trainer -1.0, sampler -1.3 -> 0.3 -> "up-2", "≥0.2". A token that the policy did not sample is "untrained", one whose
   value was not recorded "unknown". */

const LOG_RATIOS = [0.02, 0.2, 0.7]; // 0.18 is ln 1.2, the usual clip range; 0.7 is twice as likely
const PROBABILITIES = [0.9, 0.5, 0.1, 0.01];
const ENTROPIES = [0.1, 0.5, 1, 2]; // nats; 0.69 is a fair choice between two tokens
const VERSION_COLORS = 6; // then from the start: neighbors always differ

const at = (list, index) => list?.[index] ?? null;
const count = (bounds, isPast) => bounds.filter(isPast).length;
const levels = (texts) => texts.map((text, level) => [`level-${level}`, text]);

/** Of a token: the trainer's logprob less the sampler's; null: one of them is not known. */
export function logRatio(data, index) {
  const [trainer, sampler] = [at(data.trainer_logprobs, index), at(data.logprobs, index)];
  return trainer === null || sampler === null ? null : trainer - sampler;
}

const strongestFlag = (data, index) => data.flag_names[data.token_flags[index]]?.[0] ?? "trained";
const inTokens = (data, valueOf) => [...new Set(data.mask.flatMap((kept, index) => (kept ? [valueOf(index)] : [])))];

/** name -> {label, valueOf(data, index), classOf(value), legend(data)}. The order is that of the key that cycles them; of versions and
   flags the legend has those that occur. */
export const MODES = {
  log_ratio: {
    label: "log ratio (trainer − sampler)",
    valueOf: logRatio,
    classOf(ratio) {
      const level = count(LOG_RATIOS, (bound) => Math.abs(ratio) >= bound);
      return level ? `${ratio > 0 ? "up" : "down"}-${level}` : "even";
    },
    legend: () => [
      ...[3, 2, 1].map((level) => [`down-${level}`, `≤-${LOG_RATIOS[level - 1]}`]),
      ["even", "about 0"],
      ...[1, 2, 3].map((level) => [`up-${level}`, `≥${LOG_RATIOS[level - 1]}`]),
    ],
  },
  entropy: {
    label: "entropy",
    valueOf: (data, index) => at(data.entropies, index),
    classOf: (entropy) => `level-${count(ENTROPIES, (bound) => entropy >= bound)}`,
    legend: () => levels([`<${ENTROPIES[0]}`, ...ENTROPIES.map((bound) => `≥${bound}`)]),
  },
  probability: {
    label: "sampler's probability",
    valueOf: (data, index) => at(data.logprobs, index),
    classOf: (logprob) => `level-${count(PROBABILITIES, (bound) => Math.exp(logprob) < bound)}`,
    legend: () => levels([...PROBABILITIES.map((bound) => `≥${bound}`), `<${PROBABILITIES.at(-1)}`]),
  },
  version: {
    label: "policy version",
    valueOf: (data, index) => data.versions[index],
    classOf: (version) => `version-${version % VERSION_COLORS}`,
    legend(data) {
      const versions = inTokens(data, (index) => data.versions[index]).sort((left, right) => left - right);
      return versions.map((version) => [MODES.version.classOf(version), String(version)]);
    },
  },
  flags: {
    label: "mask and flags",
    valueOf: (data, index) => (at(data.token_flags, index) === null ? null : strongestFlag(data, index)),
    classOf: (flag) => flag.replaceAll(" ", "-"),
    legend(data) {
      const flags = inTokens(data, (index) => MODES.flags.valueOf(data, index)).filter((flag) => flag !== null);
      return flags.map((flag) => [MODES.flags.classOf(flag), flag]);
    },
  },
};

/** The class of one token. */
export function classOf(mode, data, index) {
  const value = data.mask[index] ? MODES[mode].valueOf(data, index) : null;
  return value === null ? (data.mask[index] ? "unknown" : "untrained") : MODES[mode].classOf(value);
}

/** What the classes of a mode mean: [class, text] of each. */
export function legendOf(mode, data) {
  const found = new Set(data.mask.map((_, index) => classOf(mode, data, index)));
  const others = [["unknown", "not recorded"], ["untrained", "not trained on"]];
  return [...MODES[mode].legend(data), ...others.filter(([name]) => found.has(name))];
}
