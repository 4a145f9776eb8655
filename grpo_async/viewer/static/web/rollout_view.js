/* One rollout, turn by turn: its tokens in colours, its tool calls folded, its figures beside. */

import { get } from "./api.js";
import { badge, copyButton, figure, fill, h, number, oneLine, percent, plural, seconds, signed, span, text, visible, when } from "./dom.js";
import { longText, message, named, toolCall } from "./said.js";
import { address, note, place } from "./routes.js";
import { Tokens, turnPlaces } from "./tokens.js";

export async function rolloutView({ app, main, parameters, signal }) {
  const { run, id, seq, superseded } = parameters;
  const { group, rollout, summaries, tokens: data } = await get("rollout", { run, id, seq, superseded }, signal);
  const at = summaries.findIndex((each) => each.rollout_id === rollout.rollout_id);
  const summary = summaries[at];
  const tokens = new Tokens(data, rollout.advantage);
  const modes = data.modes.map((each) => each.name);
  const state = {
    color: modes.includes(parameters.color) ? parameters.color : defaultMode(data, rollout),
    show: parameters.show === "messages" ? "messages" : "tokens",
  };
  const prompt = rollout.prompt_messages || group.messages;
  const body = h("div", { class: "turns" });
  const colours = h("div", { class: "token-tools" });
  let turnChosen = -1;

  const remember = () => note("rollout", { run, id, seq, superseded, color: state.color, show: state.show === "tokens" ? null : state.show });

  function colourBy(mode) {
    state.color = mode;
    tokens.colour(mode);
    select.value = mode;
    remember();
  }

  const select = h(
    "select",
    { id: "color", on: { change: (event) => colourBy(event.target.value) } },
    data.modes.map((mode) => h("option", { value: mode.name }, mode.label)),
  );

  function drawBody() {
    const isTokens = state.show === "tokens";
    tokens.hide(); // the token that it is about goes
    fill(
      colours,
      h(
        "div",
        { class: "segments", role: "group", "aria-label": "Show" },
        ["tokens", "messages"].map((name) =>
          h(
            "button",
            { type: "button", "aria-pressed": String(state.show === name), on: { click: () => ((state.show = name), remember(), drawBody()) } },
            name === "tokens" ? "Tokens" : "Messages",
          ),
        ),
      ),
      isTokens ? [h("label", { for: "color" }, "Colour by"), select, tokens.legend] : null,
    );
    if (isTokens) {
      tokens.spans.clear();
      fill(body, drawTurns());
      tokens.colour(state.color);
      select.value = state.color;
    } else {
      fill(body, [...prompt, ...rollout.messages].map(message), rollout.turns.flatMap((turn) => turn.tool_calls).map(toolCall));
    }
  }

  function drawTurns() {
    const places = turnPlaces(rollout.turns, data.mask);
    return [
      h(
        "details",
        { class: "turn prompt-turn", open: prompt.length === 1 && prompt[0].content.length < 600 },
        h("summary", {}, h("h2", {}, "Prompt"), h("span", { class: "hint" }, plural(data.prompt_ids.length, "token"))),
        prompt.map(message),
        data.prompt_texts
          ? h("details", { class: "inner" }, h("summary", {}, "As the model read it"), h("pre", { class: "said" }, visible(data.prompt_texts.join(""))), copyButton("text", () => data.prompt_texts.join("")))
          : null,
      ),
      data.texts_missing ? h("p", { class: "hint" }, data.texts_missing) : null,
      rollout.turns.map((turn, index) => drawTurn(turn, index, places[index])),
      rollout.turns.length === 0 ? h("p", { class: "empty" }, "Nothing was generated.") : null,
    ];
  }

  function drawTurn(turn, index, place) {
    const tools = place.last - place.sampled;
    return h(
      "section",
      { class: "turn", id: `turn-${index}`, "aria-label": `turn ${index + 1}` },
      h(
        "header",
        {},
        h("h2", {}, `Turn ${index + 1}`),
        h("span", { class: "hint" }, plural(turn.num_tokens, "token")),
        h("span", { class: `badge ${turn.finish_reason === "stop" ? "" : "badge-truncated"}`, title: "why its generation ended" }, turn.finish_reason),
        h("span", { class: "hint" }, `generated in ${seconds(turn.generation_duration_s)}`),
        turn.tool_calls.length ? h("span", { class: "hint" }, `tools ${seconds(turn.tool_execution_duration_s)}`) : null,
        h("span", { class: "spacer" }),
        data.texts ? copyButton("text", () => data.texts.slice(place.first, place.sampled).join("")) : null,
      ),
      turn.parse_error ? h("p", { class: "problem said" }, `Not searched for tool calls: ${oneLine(turn.parse_error, 400)}`) : null,
      tokens.block(place.first, place.sampled, `tokens of turn ${index + 1}`),
      turn.tool_calls.map(toolCall),
      tools
        ? h(
            "details",
            { class: "inner", open: tools <= 60 },
            h("summary", {}, `${plural(tools, "token")} that followed, not sampled by the policy`),
            tokens.block(place.sampled, place.last, `tokens after turn ${index + 1}`),
          )
        : null,
    );
  }

  const neighbour = (step) => summaries[at + step] && address("rollout", { run, id: summaries[at + step].rollout_id, seq: group.seq, superseded, color: state.color });
  const goTo = (step) => {
    const link = neighbour(step);
    if (link) {
      location.hash = link;
    }
  };
  const moveTurn = (by) => {
    turnChosen = Math.max(0, Math.min(rollout.turns.length - 1, turnChosen + by));
    const turn = document.getElementById(`turn-${turnChosen}`);
    if (turn) {
      turn.scrollIntoView({ block: "start" });
    }
  };

  fill(
    main,
    h(
      "div",
      { class: "heading" },
      h("h1", {}, "Rollout ", text(rollout.rollout_id)),
      badge(rollout.status),
      summary.superseded ? h("span", { class: "badge" }, "superseded") : null,
      h("span", { class: "hint" }, "of ", h("a", { href: address("group", { run, id: group.group_id, seq: group.seq, superseded }) }, `group ${group.group_id}`), " ", badge(group.status)),
      h("span", { class: "spacer" }),
      h(
        "span",
        { class: "neighbours" },
        h("button", { type: "button", disabled: at <= 0, title: "the one before in its group ([)", on: { click: () => goTo(-1) } }, "‹"),
        ` ${at + 1} of ${summaries.length} `,
        h("button", { type: "button", disabled: at >= summaries.length - 1, title: "the next in its group (])", on: { click: () => goTo(1) } }, "›"),
      ),
      copyButton("link", () => location.href),
    ),
    rollout.error ? h("div", { class: "problem" }, longText(rollout.error)) : null,
    h("div", { class: "columns" }, h("div", { class: "column-main" }, colours, body), aside()),
    tokens.tip,
  );
  drawBody();

  function aside() {
    return h(
      "aside",
      { class: "panel figures-panel", "aria-label": "Figures" },
      h(
        "dl",
        { class: "figures" },
        figure("reward", number(rollout.reward)),
        figure("advantage", signed(rollout.advantage)),
        figure("step", number(group.step)),
        figure("group's mean", number(summary.group_reward_mean)),
      ),
      section("Reward by part", named(rollout.rewards, (value) => number(value))),
      section("Tokens", figuresOf(summary)),
      section("Time", named({ started: when(summary.started_at), total: seconds(rollout.total_duration_s), generation: seconds(summary.generation_duration_s), tools: seconds(summary.tool_duration_s) }, String)),
      section("Noted by rewards", named(rollout.extra)),
      section("Columns of the data", named(group.columns)),
      h(
        "p",
        { class: "links" },
        h("a", { href: address("prompt", { run, hash: summary.prompt_hash, superseded }) }, "Same prompt in other steps"),
        summaries.length > 1 ? h("a", { href: address("compare", { run, a: place(run, rollout.rollout_id, group.seq), b: place(run, other().rollout_id, group.seq) }) }, "Compare with another") : null,
        copyButton("ids", () => JSON.stringify(data.ids)),
      ),
    );
  }

  /** The one to compare with: the best of the others. */
  function other() {
    const rest = summaries.filter((_, index) => index !== at);
    return rest.sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity))[0];
  }

  return {
    title: `Rollout ${oneLine(rollout.rollout_id, 60)}`,
    keys: {
      c: () => {
        if (state.show === "tokens") {
          colourBy(modes[(modes.indexOf(state.color) + 1) % modes.length]);
        }
      },
      m: () => {
        state.show = state.show === "tokens" ? "messages" : "tokens";
        remember();
        drawBody();
      },
      "[": () => goTo(-1),
      "]": () => goTo(1),
      j: () => moveTurn(1),
      k: () => moveTurn(-1),
    },
    up: () => address("group", { run, id: group.group_id, seq: group.seq, superseded }),
  };
}

function section(title, content) {
  return content ? h("section", {}, h("h3", {}, title), content) : null;
}

function figuresOf(summary) {
  return named(
    {
      sampled: number(summary.num_tokens),
      "with tool results": number(summary.num_completion_tokens),
      prompt: number(summary.num_prompt_tokens),
      "policy versions": span(summary.version_min, summary.version_max),
      staleness: number(summary.staleness),
      "mean logprob": number(summary.logprob_mean),
      "lowest logprob": number(summary.logprob_min),
      "mean entropy": number(summary.entropy_mean),
      "importance weight": summary.ratio_mean === null ? "–" : `${number(summary.ratio_mean)} (${number(summary.ratio_min, 2)} to ${number(summary.ratio_max, 2)})`,
      mismatch: number(summary.mismatch_mean),
      clipped: percent(summary.clipped_share),
      "masked out": percent(summary.masked_share),
    },
    String,
  );
}

/** Advantage says most where there is one; without, how likely the tokens were. */
function defaultMode(data, rollout) {
  return rollout.advantage === null ? "probability" : "advantage";
}
