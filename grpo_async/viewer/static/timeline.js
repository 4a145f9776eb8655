/* A timeline on a canvas: who did what when.

   const view = Timeline.draw(element, data, options)

   data      what `timeline.drawing` gives: {spans: [{track, depth, name, start, end, details, count?, busy_s?}], first, last, titles},
             tracks from top to bottom. Times in seconds since the epoch; first and last: how far one may move. Track "rollout/3" is
             slot 3 of "rollout".
   options   onRollout(id): a span was clicked that is of a rollout; onWindow(start, end): another window is looked at (shortly after
             it was moved), to fetch finer spans for `view.update`; height: most pixels.
   view      update(data), show(start, end), window() -> {start, end}, spanAt(x, y), destroy()

   Wheel: scroll. Ctrl + wheel, W S, + -: zoom. Drag, Shift + wheel, A D, arrows: move. F, 0: everything. A group's title: fold.
   Text comes from models too; it is only ever drawn, or set as textContent. Colors are the variables of theme.css. Needs charts.js. */
"use strict";

const Timeline = (() => {
  const COLOURS = {
    generate: 1, serving: 1, forward: 1, tools: 2, environment: 2, backward: 6, optimizer: 4, score: 3, train: 7, "plan and pack": 5,
    push: 4, transfer: 4, gather: 6, send: 7, "write checkpoint": 5, "copy checkpoint": 5, evaluation: 3, training: 7,
    rollout: 8, step: 8, attempt: 8,
  };
  const RULER = 34, TITLE = 20, LEVEL = 17, SLIM = 6, SLIMMEST = 4, FOLDED = 42, GAP = 6, MANY = 16, VERY_MANY = 64, SLACK = 1.02, LEAST_WINDOW = 1e-5;

  const { duration } = Charts;
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const isWait = (span) => span.name.startsWith("wait for") || span.name === "queued" || span.name === "pause";

  function clock(seconds, unit) {
    const sign = seconds < 0 ? "-" : "", s = Math.abs(seconds);
    const digits = clamp(-Math.floor(Math.log10(unit) + 1e-9), 0, 6);
    if (s < 60) return `${sign}${s.toFixed(digits)} s`;
    const total = Number(s.toFixed(digits));
    const hours = Math.floor(total / 3600), minutes = Math.floor((total % 3600) / 60);
    const rest = (total % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
    return sign + (hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`);
  }

  /* [{group, title, tracks: [{slot, levels: [[span]]}], most, edges}] from top to bottom. `edges`: [time, how many run from then on],
     of the outermost spans; `most`: the highest of them. */
  function layOut({ spans, titles = {} }) {
    const groups = new Map(), tracks = new Map();
    for (const span of spans) {
      const [group, slot = ""] = span.track.split("/", 2);
      if (!groups.has(group)) groups.set(group, { group, title: titles[group] ?? group, tracks: [] });
      if (!tracks.has(span.track)) {
        tracks.set(span.track, { slot, levels: [] });
        groups.get(group).tracks.push(tracks.get(span.track));
      }
      const { levels } = tracks.get(span.track);
      while (levels.length <= span.depth) levels.push([]);
      levels[span.depth].push(span);
    }
    for (const each of groups.values()) {
      for (const track of each.tracks) for (const level of track.levels) level.sort((a, b) => a.start - b.start || b.end - a.end);
      each.isSlim = each.tracks.length > MANY;
      each.slim = each.tracks.length > VERY_MANY ? SLIMMEST : SLIM;
      const counts = (span) => span.end > span.start && (each.group === "queue" || !isWait(span));
      const outermost = each.tracks.flatMap((track) => track.levels[0] ?? []).filter(counts);
      const edges = outermost.flatMap((span) => [[span.start, 1], [span.end, -1]]).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      let count = 0;
      each.most = 1;
      each.edges = edges.map(([at, change]) => { count += change; each.most = Math.max(each.most, count); return [at, count]; });
    }
    return [...groups.values()];
  }

  const trackHeight = (group, track) => (group.isSlim ? group.slim : Math.max(1, track.levels.length) * LEVEL + 2);

  function firstBehind(spans, time) {  // spans of one level do not overlap, so their ends ascend, too
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function make(tag, styles, parent) {
    const made = document.createElement(tag);
    Object.assign(made.style, styles);
    parent?.append(made);
    return made;
  }

  function draw(element, data, options = {}) {
    const box = make("div", { position: "relative", width: "100%" }, element);
    const canvas = make("canvas", { display: "block", width: "100%", borderRadius: "var(--radius-small)", outlineOffset: "2px" }, box);
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    const hint = make("div", { font: "var(--size-small) var(--font)", color: "var(--text-muted)", paddingTop: "4px" }, box);
    const tip = make("div", {
      position: "absolute", display: "none", pointerEvents: "none", maxWidth: "26rem", padding: "6px 9px", zIndex: 5,
      font: "var(--size-small)/1.4 var(--font)", color: "var(--text)", background: "var(--surface-raised)", whiteSpace: "pre-wrap",
      border: "1px solid var(--border-strong)", borderRadius: "var(--radius-small)", overflowWrap: "anywhere",
    }, box);
    const context = canvas.getContext("2d");
    const folded = new Set();
    let groups = [], marks = [], first = 0, last = 1, from = 0, to = 1, scroll = 0, total = 0, width = 0, height = 0, gutter = 0;
    let hovered = null, drag = null, frame = 0, told = 0, theme = {}, hits = [];

    function readTheme() {
      const { themeColor } = Charts;
      theme = {
        surface: themeColor("--surface"), raised: themeColor("--surface-raised"), text: themeColor("--text"), muted: themeColor("--text-muted"),
        border: themeColor("--border"), strong: themeColor("--border-strong"), grid: themeColor("--grid"), bad: themeColor("--bad"),
        font: getComputedStyle(box).fontFamily,
        series: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => themeColor(`--series-${number}`)),
      };
      theme.ink = theme.series.map(inkOn);
      theme.inkOnBad = inkOn(theme.bad);
      const stripes = document.createElement("canvas");
      stripes.width = stripes.height = 6;
      const pen = stripes.getContext("2d");
      pen.fillStyle = theme.raised;
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = theme.strong;
      pen.beginPath();
      for (const shift of [-6, 0, 6]) { pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); }
      pen.stroke();
      theme.stripes = context.createPattern(stripes, "repeat");
    }

    function inkOn(color) {  // black or white, whichever is read better
      context.fillStyle = color;
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(String(context.fillStyle).slice(at, at + 2), 16) / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
    }

    function paint(span) {
      if (span.details.error || span.name === "down" || span.name === "gone") return [theme.bad, theme.inkOnBad];
      if (isWait(span)) return [theme.stripes, theme.text];
      let number = COLOURS[span.name];
      if (number === undefined) {
        number = 0;
        for (const letter of span.name) number = (number * 31 + letter.codePointAt(0)) % 8;
        number += 1;
      }
      return [theme.series[number - 1], theme.ink[number - 1]];
    }

    const xOf = (time) => gutter + ((time - from) / (to - from)) * (width - gutter);
    const timeOf = (x) => from + ((x - gutter) / (width - gutter)) * (to - from);

    function measure() {
      total = RULER;
      for (const group of groups) {
        total += TITLE + GAP;
        total += folded.has(group.group) ? FOLDED : group.tracks.reduce((sum, track) => sum + trackHeight(group, track), 0);
      }
      width = Math.max(240, box.clientWidth);
      gutter = width < 620 ? 58 : 84;
      height = Math.min(total, options.height ?? Math.max(260, Math.round(window.innerHeight * 0.72)));
      const ratio = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      scroll = clamp(scroll, 0, total - height);
    }

    function redraw() {
      if (!frame) frame = requestAnimationFrame(() => { frame = 0; render(); });
    }

    function render() {
      const ratio = canvas.width / width;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.fillStyle = theme.surface;
      context.fillRect(0, 0, width, height);
      hits = [];
      context.save();
      context.beginPath();
      context.rect(0, RULER, width, height - RULER);
      context.clip();
      grid();
      let y = RULER - scroll;
      for (const group of groups) {
        const bottom = y + TITLE + (folded.has(group.group) ? FOLDED : group.tracks.reduce((sum, l) => sum + trackHeight(group, l), 0));
        if (bottom > RULER && y < height) drawGroup(group, y);
        hits.push({ group, top: y, tracksTop: y + TITLE, bottom });
        y = bottom + GAP;
      }
      context.restore();
      ruler();
      if (total > height) {
        const rail = height - RULER, size = Math.max(24, (rail * height) / total);
        context.fillStyle = theme.strong;
        context.fillRect(width - 4, RULER + ((rail - size) * scroll) / (total - height), 3, size);
      }
      const shown = `${duration(Math.min(to, last) - Math.max(from, first))} of ${duration(last - first)} shown`;
      hint.textContent = `${shown} · wheel: scroll · Ctrl + wheel or W S: zoom · drag or A D: move · F: show all · click a title: fold`;
      canvas.setAttribute("aria-label", `Timeline: ${groups.map((g) => g.title).join(", ")}; ${shown}`);
    }

    function ticks() {
      const least = ((to - from) * 96) / (width - gutter);
      const power = 10 ** Math.floor(Math.log10(least));
      let unit = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= least);
      if (unit > 10) unit = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find((each) => each >= least) ?? Math.ceil(least / 86400) * 86400;
      const found = [];
      for (let n = Math.ceil((from - first) / unit); n * unit <= to - first; n++) found.push(n * unit);
      return [found, unit];
    }

    function grid() {
      context.fillStyle = theme.grid;
      for (const tick of ticks()[0]) context.fillRect(Math.round(xOf(first + tick)), RULER, 1, height - RULER);
    }

    function ruler() {
      context.fillStyle = theme.raised;
      context.fillRect(0, 0, width, RULER);
      context.save();
      context.beginPath();
      context.rect(gutter, 0, width - gutter, RULER);
      context.clip();
      const [found, unit] = ticks();
      context.font = `11px ${theme.font}`;
      context.textBaseline = "middle";
      context.fillStyle = theme.muted;
      for (const tick of found) {
        const x = xOf(first + tick);
        context.fillRect(Math.round(x), RULER - 4, 1, 4);
        context.fillText(clock(tick, unit), x + 4, 9);
      }
      const inSight = marks.filter((step) => step.end >= from && step.start <= to);
      context.fillStyle = theme.border;
      for (const step of inSight) context.fillRect(Math.round(xOf(step.start)), 18, 1, RULER - 18);
      let free = gutter;
      context.fillStyle = theme.text;
      for (const step of inSight) {
        const x = xOf(step.start), end = xOf(step.end), text = `step ${step.details.step}`;
        const at = Math.max(x, gutter) + 4, wide = context.measureText(text).width;
        if (at < free || end - at < wide) continue;
        context.fillText(text, at, 25);
        free = at + wide + 8;
      }
      context.restore();
      context.fillStyle = theme.border;
      context.fillRect(0, RULER - 1, width, 1);
    }

    function label(text, x, y, most, color) {
      const fits = Math.floor((text.length * most) / context.measureText(text).width);  // characters, about
      if (most < 14 || fits < 3) return;
      context.fillStyle = color;
      context.fillText(fits >= text.length ? text : `${text.slice(0, fits - 1)}…`, x, y);
    }

    function drawGroup(group, top) {
      const isFolded = folded.has(group.group);
      context.fillStyle = theme.border;
      context.fillRect(0, top, width, 1);
      context.font = `600 12px ${theme.font}`;
      context.textBaseline = "middle";
      context.fillStyle = theme.muted;
      context.fillText(isFolded ? "▸" : "▾", 6, top + TITLE / 2 + 1);
      context.fillStyle = theme.text;
      const more = group.most > 1 && group.tracks.some((track) => /^\d+$/.test(track.slot)) ? `, up to ${group.most} at once` : "";
      context.fillText(group.title + more, 20, top + TITLE / 2 + 1);
      let y = top + TITLE;
      if (isFolded) return drawCount(group, y);
      for (const track of group.tracks) {
        const tall = trackHeight(group, track);
        if (y + tall > RULER && y < height) drawTrack(group, track, y, tall);
        y += tall;
      }
    }

    function drawCount(group, top) {
      const scale = (FOLDED - 4) / group.most, bottom = top + FOLDED - 2;
      context.fillStyle = theme.series[0];
      context.globalAlpha = 0.55;
      let index = 0, count = 0;
      for (let x = gutter; x < width; x++) {
        const end = timeOf(x + 1);
        let most = count;
        while (index < group.edges.length && group.edges[index][0] < end) { count = group.edges[index][1]; if (count > most) most = count; index++; }
        if (most) context.fillRect(x, bottom - most * scale, 1, most * scale);
      }
      context.globalAlpha = 1;
      context.font = `11px ${theme.font}`;
      context.fillStyle = theme.muted;
      context.fillText(String(group.most), 20, top + 8);
      context.fillText("0", 20, bottom - 5);
      context.fillRect(gutter, bottom, width - gutter, 1);
    }

    function drawTrack(group, track, top, tall) {
      context.font = `11px ${theme.font}`;
      if (!group.isSlim && group.tracks.length > 1) label(track.slot || "all", 20, top + LEVEL / 2, gutter - 24, theme.muted);
      context.save();
      context.beginPath();
      context.rect(gutter, top, width - gutter, tall);
      context.clip();
      const perPixel = (to - from) / (width - gutter);
      track.levels.forEach((spans, level) => {
        const y = group.isSlim ? top + Math.min(level, 1) : top + level * LEVEL + 1;
        const high = group.isSlim ? tall - 1 - Math.min(level, 1) : LEVEL - 2;
        let drawnTo = -Infinity;
        for (let index = firstBehind(spans, from - perPixel); index < spans.length && spans[index].start <= to; index++) {
          const span = spans[index], x = xOf(span.start), end = Math.max(xOf(span.end), x + 1);
          if (span.end === span.start) {
            context.fillStyle = paint(span)[0];
            context.fillRect(Math.round(x) - 1, y, 3, high);
            continue;
          }
          if (end <= drawnTo) continue;  // narrower than a pixel, and that pixel is taken
          const [fill, ink] = paint(span);
          const left = Math.max(x, gutter - 2, drawnTo), wide = Math.min(end, width + 2) - left;
          drawnTo = Math.max(end, Math.floor(left) + 1);
          context.globalAlpha = group.isSlim && level === 0 && track.levels.length > 1 ? 0.35 : span.count ? 0.75 : 1;
          context.fillStyle = fill;
          context.fillRect(left, y, Math.max(wide - (wide > 4 ? 1 : 0), 1), high);
          context.globalAlpha = 1;
          if (span === hovered) {
            context.strokeStyle = theme.text;
            context.lineWidth = 1;
            context.strokeRect(left + 0.5, y + 0.5, Math.max(wide - 2, 1), high - 1);
          }
          if (!group.isSlim && wide > 24) {
            const what = span.count ? `${span.count} × ${span.name}` : span.name;
            if (fill === theme.stripes) {
              context.fillStyle = theme.raised;
              context.fillRect(left + 2, y + 1, Math.min(context.measureText(what).width + 4, wide - 5), high - 2);
            }
            label(what, Math.max(left, gutter) + 4, y + high / 2 + 0.5, end - Math.max(left, gutter) - 8, ink);
          }
        }
      });
      context.restore();
    }

    function spanAt(x, y) {
      if (x < gutter || y < RULER) return null;
      const hit = hits.find((each) => y >= each.tracksTop && y < each.bottom);
      if (!hit || folded.has(hit.group.group)) return null;
      let top = hit.tracksTop;
      const slack = ((to - from) / (width - gutter)) * 2, time = timeOf(x);
      for (const track of hit.group.tracks) {
        const tall = trackHeight(hit.group, track);
        if (y < top + tall) {
          const level = hit.group.isSlim ? null : Math.floor((y - top - 1) / LEVEL);
          const levels = level === null ? [...track.levels].reverse() : [track.levels[level] ?? []];
          for (const spans of levels) {
            const index = firstBehind(spans, time - slack);
            let best = null;
            for (let i = index; i < spans.length && spans[i].start <= time + slack; i++) {
              best = spans[i];
              if (best.end >= time && best.start <= time) break;
            }
            if (best) return best;
          }
          return null;
        }
        top += tall;
      }
      return null;
    }

    function text(value) {
      if (Array.isArray(value)) return value.slice(0, 8).map(text).join(", ") + (value.length > 8 ? `, … (${value.length})` : "");
      return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
    }

    function showTip(span, x, y) {
      if (!span) { tip.style.display = "none"; return; }
      const isInstant = span.end === span.start;
      const lines = [`${span.count ? `${span.count} spans, most of it ${span.name}` : span.name}${isInstant ? "" : ` · ${duration(span.end - span.start)}`}`];
      if (span.count) lines.push(`busy ${duration(span.busy_s ?? 0)}; zoom in to see each`);
      lines.push(`${span.track} · at ${clock(span.start - first, 0.001)}`);
      for (const [name, value] of Object.entries(span.details)) if (value !== null) lines.push(`${name}: ${text(value)}`);
      if (options.onRollout && span.details.rollout) lines.push("click: open this rollout");
      tip.textContent = lines.join("\n");
      tip.style.display = "block";
      const wide = tip.offsetWidth, tall = tip.offsetHeight;
      tip.style.left = `${clamp(x + 14 + wide > width ? x - wide - 10 : x + 14, 0, Math.max(0, width - wide))}px`;
      tip.style.top = `${clamp(y + 16 + tall > height ? y - tall - 10 : y + 16, 0, Math.max(0, height - tall))}px`;
    }

    function setWindow(start, end) {
      const least = Math.max(LEAST_WINDOW, (last - first) * 1e-7), most = (last - first) * SLACK || 1;
      const size = clamp(end - start, least, most);
      const middle = (start + end) / 2, margin = (most - (last - first)) / 2;
      from = clamp(middle - size / 2, first - margin, Math.max(first - margin, last + margin - size));
      to = from + size;
      hovered = null;
      showTip(null);
      redraw();
      if (options.onWindow) {
        clearTimeout(told);
        told = setTimeout(() => options.onWindow(from, to), 150);
      }
    }

    const zoom = (factor, time = (from + to) / 2) => setWindow(time - (time - from) * factor, time + (to - time) * factor);
    const move = (fraction) => setWindow(from + (to - from) * fraction, to + (to - from) * fraction);
    const fit = () => setWindow(first - (last - first), last + (last - first));
    function scrollBy(pixels) {
      const before = scroll;
      scroll = clamp(scroll + pixels, 0, Math.max(0, total - height));
      if (scroll !== before) redraw();
      return scroll !== before;
    }

    const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    const listen = (target, name, handler, how) => { target.addEventListener(name, handler, how); undo.push(() => target.removeEventListener(name, handler, how)); };
    const undo = [];

    listen(canvas, "wheel", (event) => {
      const [x] = place(event);
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(clamp(event.deltaY, -240, 240) * 0.0032), timeOf(Math.max(x, gutter))); }
      else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); move((event.deltaX || event.deltaY) / (width - gutter)); }
      else if (scrollBy(event.deltaY)) event.preventDefault();
    }, { passive: false });
    listen(canvas, "pointerdown", (event) => {
      if (event.button !== 0) return;
      const [x, y] = place(event);
      drag = { x, y, from, to, scroll, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    listen(canvas, "pointermove", (event) => {
      const [x, y] = place(event);
      if (drag) {
        if (Math.abs(x - drag.x) + Math.abs(y - drag.y) > 4) drag.moved = true;
        if (!drag.moved) return;
        const shift = ((drag.x - x) / (width - gutter)) * (drag.to - drag.from);
        scroll = clamp(drag.scroll + drag.y - y, 0, Math.max(0, total - height));
        canvas.style.cursor = "grabbing";
        setWindow(drag.from + shift, drag.to + shift);
        return;
      }
      const found = spanAt(x, y);
      const isTitle = hits.some((hit) => y >= Math.max(hit.top, RULER) && y < hit.tracksTop);
      canvas.style.cursor = isTitle || found?.details.rollout && options.onRollout ? "pointer" : "default";
      if (found !== hovered) { hovered = found; redraw(); }
      showTip(found, x, y);
    });
    listen(canvas, "pointerup", (event) => {
      const was = drag;
      drag = null;
      canvas.style.cursor = "default";
      if (!was || was.moved) return;
      const [x, y] = place(event);
      const title = hits.find((hit) => y >= Math.max(hit.top, RULER) && y < hit.tracksTop);
      if (title) {
        if (!folded.delete(title.group.group)) folded.add(title.group.group);
        measure();
        redraw();
        return;
      }
      const rollout = spanAt(x, y)?.details.rollout;
      if (rollout) options.onRollout?.(rollout);
    });
    listen(canvas, "pointercancel", () => { drag = null; });
    listen(canvas, "pointerleave", () => { hovered = null; showTip(null); redraw(); });
    listen(canvas, "dblclick", (event) => {
      const span = spanAt(...place(event));
      if (span && span.end > span.start) setWindow(span.start - (span.end - span.start) * 0.1, span.end + (span.end - span.start) * 0.1);
    });
    const keys = {
      w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
      a: () => move(-0.2), arrowleft: () => move(-0.2), d: () => move(0.2), arrowright: () => move(0.2),
      arrowup: () => scrollBy(-60), arrowdown: () => scrollBy(60), pageup: () => scrollBy(RULER - height), pagedown: () => scrollBy(height - RULER),
      f: fit, 0: fit, home: fit, escape: () => { hovered = null; showTip(null); redraw(); },
    };
    listen(canvas, "keydown", (event) => {
      const action = keys[event.key.toLowerCase()];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      action();
    });
    const themed = { redraw: () => { readTheme(); redraw(); } };
    Charts.alive.add(themed);
    const sizes = new ResizeObserver(() => { measure(); redraw(); });
    sizes.observe(box);
    undo.push(() => Charts.alive.delete(themed), () => sizes.disconnect());

    function update(next, { keep = true } = {}) {
      const isAll = !keep || to - from >= (last - first) * 0.999;
      groups = layOut(next);
      first = next.first ?? 0;
      last = Math.max(next.last ?? 1, first + 1e-6);
      const steps = next.spans.filter((span) => span.track === "trainer" && span.name === "step" && span.details.step !== undefined);
      if (!keep) for (const group of groups) if (group.tracks.length > (group.group === "rollout" ? VERY_MANY : MANY)) folded.add(group.group);
      if (steps.length || !keep) marks = steps.sort((a, b) => a.start - b.start);
      hovered = null;
      showTip(null);
      if (isAll) { from = first - ((last - first) * (SLACK - 1)) / 2; to = last + ((last - first) * (SLACK - 1)) / 2; }
      measure();
      redraw();
    }

    readTheme();
    update(data, { keep: false });
    return {
      update,
      show: setWindow,
      window: () => ({ start: from, end: to }),
      spanAt,
      destroy() { undo.forEach((each) => each()); cancelAnimationFrame(frame); clearTimeout(told); box.remove(); },
    };
  }

  return { draw };
})();
globalThis.Timeline = Timeline;
