/* Charts on a page: a thin layer over uPlot that the report and the web page share.

   Charts.line(element, {x, series: [{label, values}]})        several lines, bands around them, one cursor for the page
   Charts.stacked(element, {x, series: [{label, values}]})     areas on top of each other
   Charts.histogram(element, {edges, counts})                  bins of any width
   Charts.sparkline(element, values)                           one small line

   Each of the first three gives {update(options), destroy()}. Colours come from theme.css and follow it: light, dark, print.
   Every chart has a name for screen readers, arrow keys for its cursor, a legend whose entries switch series off and show the
   values under the cursor, and its numbers as a table. Text is only ever set as text. Needs uPlot and theme.css.

   Options of line and stacked:
     x           ascending numbers; a series may have an own `x`
     series      {label, values, band: [low, high]?, x?, color?, dash?, points?, hidden?}; values may be null; color is a number
                 from 1 (--series-N); dash is a number from 0 (full)
     title, unit, xLabel ("step"), height (px), log (true: logarithmic), include ([0]: values that the y axis must show)
     format      "number", "percent", "seconds", "bytes" or a function
     group       charts of one page with the same group share their cursor and their zoom; null: on its own
     onSelect    called with the x value that was clicked
   Options of histogram: edges (one more than counts), counts, label, title, unit, xLabel, format (of the edges), height,
     onSelect (called with low, high, count). */

"use strict";

var Charts = (() => {
  const COLOURS = 8;
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
  const TABLE_ROWS = 500;
  const alive = new Set();
  let colours = new Map();

  // -- theme

  function colour(name) {
    if (!colours.has(name)) {
      const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      colours.set(name, value || "#808080");
    }
    return colours.get(name);
  }

  function seriesColour(index) {
    return colour(`--series-${((index - 1) % COLOURS) + 1}`);
  }

  function translucent(hex, alpha) {
    return hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  }

  function redrawAll() {
    colours = new Map();
    for (const chart of alive) {
      chart.redraw();
    }
  }

  function watchTheme() {
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
      window.matchMedia(query).addEventListener("change", redrawAll);
    }
    new MutationObserver(redrawAll).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme", "data-printing"],
    });
    const printing = (isPrinting) => {
      document.documentElement.toggleAttribute("data-printing", isPrinting);
      redrawAll();
    };
    window.addEventListener("beforeprint", () => printing(true));
    window.addEventListener("afterprint", () => printing(false));
    window.matchMedia("print").addEventListener("change", (event) => printing(event.matches));
  }

  // -- numbers

  const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) {
      return "–";
    }
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-4)) {
      return value.toExponential(2).replace("e+", "e");
    }
    if (size >= 1e4) {
      const [scale, suffix] = SUFFIXES.find(([scale]) => size >= scale);
      return `${trimmed(value / scale, 4)}${suffix}`;
    }
    return trimmed(value, 4);
  }

  function trimmed(value, digits) {
    return String(Number(value.toPrecision(digits)));
  }

  const FORMATS = {
    number,
    percent: (value) => (value === null || value === undefined ? "–" : `${trimmed(value * 100, 3)}%`),
    seconds: (value) => (value === null || value === undefined ? "–" : value > 0 && value < 0.1 ? `${trimmed(value * 1000, 3)} ms` : `${number(value)} s`),
    bytes: (value) => (value === null || value === undefined ? "–" : `${number(value)}B`),
  };

  function formatter(format) {
    return typeof format === "function" ? format : FORMATS[format || "number"];
  }

  // -- small parts of a page

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) {
      element.className = className;
    }
    if (text !== undefined) {
      element.textContent = text;
    }
    return element;
  }

  function swatch(canvas, index, dash) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = 18 * ratio;
    canvas.height = 10 * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.strokeStyle = seriesColour(index);
    context.lineWidth = 3;
    context.setLineDash(DASHES[dash % DASHES.length].map((length) => Math.min(length, 5)));
    context.beginPath();
    context.moveTo(0, 5);
    context.lineTo(18, 5);
    context.stroke();
  }

  function isNumber(value) {
    return typeof value === "number" && Number.isFinite(value);
  }

  // -- data: every series on one x

  function onOneAxis(options) {
    const own = options.series.map((series) => series.x || options.x || series.values.map((_, index) => index));
    const xs = [...new Set(own.flat())].filter(isNumber).sort((left, right) => left - right);
    const shared = own.every((x) => x.length === xs.length);
    const place = new Map(xs.map((x, index) => [x, index]));
    // undefined where a series has no such x (a line goes on), null where its value is missing (a line breaks)
    const spread = (values, x) => {
      if (shared) {
        return values.map((value) => (isNumber(value) ? value : null));
      }
      const all = new Array(xs.length).fill(undefined);
      x.forEach((each, index) => {
        all[place.get(each)] = isNumber(values[index]) ? values[index] : null;
      });
      return all;
    };
    const series = options.series.map((each, index) => ({
      ...each,
      color: each.color || index + 1,
      dash: each.dash || 0,
      values: spread(each.values, own[index]),
      band: each.band ? each.band.map((side) => spread(side, own[index])) : null,
    }));
    return { xs, series };
  }

  // -- axes

  function yRange(include, isLog) {
    return (_plot, low, high) => {
      let least = isNumber(low) ? low : 0;
      let most = isNumber(high) ? high : 1;
      for (const value of include || []) {
        least = Math.min(least, value);
        most = Math.max(most, value);
      }
      if (isLog) {
        const decades = [Math.floor(Math.log10(least || 1e-6)), Math.ceil(Math.log10(most || 1))];
        return [10 ** decades[0], 10 ** (decades[1] > decades[0] ? decades[1] : decades[0] + 1)];
      }
      if (least === 0 && most === 0) {
        return [0, 1]; // a series that never moved from zero: the room below would say that it could be negative
      }
      const room = most > least ? (most - least) * 0.06 : Math.abs(most) * 0.1 || 0.5;
      const floor = (include || []).includes(least) ? least : least - room;
      const ceiling = (include || []).includes(most) && most > least ? most + room / 3 : most + room;
      return [floor, ceiling];
    };
  }

  /** Distances between ticks for an axis of whole numbers. */
  const WHOLE_STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

  function axes(options, format, isWhole) {
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const line = { stroke: () => colour("--grid"), width: 1 };
    const common = { stroke: () => colour("--text-muted"), font, grid: line, ticks: { ...line, size: 4 } };
    return [
      { ...common, size: 30, gap: 4, space: 60, ...(isWhole ? { incrs: WHOLE_STEPS } : {}), values: (_plot, ticks) => ticks.map((tick) => (tick === null ? null : number(tick))) },
      {
        ...common,
        gap: 4,
        space: 34,
        size: (_plot, values) => 16 + 7 * Math.max(3, ...(values || []).map((value) => (value || "").length)),
        values: (_plot, ticks) => ticks.map((tick) => (tick === null ? null : format(tick))),
      },
    ];
  }

  // -- the frame around every plot

  class Frame {
    constructor(element, options) {
      this.element = element;
      element.replaceChildren();
      element.classList.add("chart");
      if (options.title) {
        element.append(make("h3", "chart-title", options.title));
      }
      if (options.unit) {
        element.append(make("p", "chart-unit", options.unit));
      }
      this.place = make("div", "chart-plot");
      this.place.tabIndex = 0;
      this.place.setAttribute("role", "img");
      this.legend = make("ul", "chart-legend");
      this.table = make("details", "chart-table");
      this.table.append(make("summary", "", "numbers"));
      element.append(this.place, this.legend, this.table);
      this.table.addEventListener("toggle", () => this.table.open && this.fillTable());
      this.place.addEventListener("keydown", (event) => this.onKey(event));
      this.entries = [];
      this.plot = null;
      this.observer = new ResizeObserver(() => this.resize());
      this.observer.observe(element);
      alive.add(this);
    }

    describe(text) {
      this.place.setAttribute("aria-label", text);
    }

    size() {
      return { width: Math.max(120, Math.floor(this.place.clientWidth)), height: this.options.height || 200 };
    }

    resize() {
      if (this.plot && this.place.clientWidth > 0 && this.place.clientWidth !== this.plot.width) {
        this.plot.setSize(this.size());
      }
    }

    redraw() {
      this.entries.forEach((entry) => swatch(entry.swatch, entry.color, entry.dash));
      if (this.plot) {
        this.plot.redraw(true);
      }
    }

    addEntry(label, color, dash, onToggle) {
      const button = make("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const entry = { swatch: make("canvas"), color, dash, output: make("output") };
      entry.swatch.setAttribute("aria-hidden", "true");
      button.append(entry.swatch, make("span", "", label), entry.output);
      button.addEventListener("click", () => {
        const isShown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isShown));
        onToggle(isShown);
      });
      entry.button = button;
      const item = make("li");
      item.append(button);
      this.legend.append(item);
      this.entries.push(entry);
      swatch(entry.swatch, color, dash);
    }

    onKey(event) {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
      if (!this.plot || !(event.key in steps)) {
        return;
      }
      event.preventDefault();
      const xs = this.plot.data[0];
      const from = isNumber(this.plot.cursor.idx) ? this.plot.cursor.idx : event.key === "ArrowLeft" ? xs.length : -1;
      const index = Math.max(0, Math.min(xs.length - 1, from + steps[event.key]));
      this.plot.setCursor({ left: this.plot.valToPos(xs[index], "x"), top: 10 }, true, true); // in the other plots, too
    }

    onClick(report) {
      if (!report) {
        return;
      }
      let pressed = 0;
      this.place.addEventListener("mousedown", (event) => (pressed = event.clientX));
      this.place.addEventListener("mouseup", (event) => {
        const index = this.plot ? this.plot.cursor.idx : null;
        if (isNumber(index) && Math.abs(event.clientX - pressed) < 4) {
          report(index);
        }
      });
    }

    empty(text) {
      this.place.replaceWith(make("p", "chart-empty", text));
      this.table.remove();
    }

    writeTable(heads, rows, note) {
      const table = make("table");
      const head = make("tr");
      heads.forEach((text) => head.append(make("th", "", text)));
      table.append(make("thead"), make("tbody"));
      table.tHead.append(head);
      for (const row of rows) {
        const line = make("tr");
        row.forEach((text) => line.append(make("td", "", text)));
        table.tBodies[0].append(line);
      }
      const box = make("div");
      box.append(table);
      if (note) {
        box.append(make("p", "", note));
      }
      this.table.querySelector("div")?.remove();
      this.table.append(box);
    }

    destroy() {
      alive.delete(this);
      this.observer.disconnect();
      if (this.plot) {
        this.plot.destroy();
        this.plot = null;
      }
      this.element.replaceChildren();
      this.element.classList.remove("chart");
    }
  }

  // -- lines and stacked areas

  class Curves extends Frame {
    constructor(element, options, isStacked) {
      super(element, options);
      this.options = options;
      this.isStacked = isStacked;
      this.format = formatter(options.format);
      const { xs, series } = onOneAxis(options);
      this.xs = xs;
      this.series = series;
      this.shown = series.map((each) => !each.hidden);
      if (!series.some((each) => each.values.some(isNumber))) {
        this.empty(options.emptyText || "no values");
        return;
      }
      this.describe(this.summary());
      this.at = make("li", "chart-at");
      this.legend.append(this.at);
      series.forEach((each, index) => {
        this.addEntry(each.label, each.color, each.dash, (isShown) => this.toggle(index, isShown));
        this.entries[index].button.setAttribute("aria-pressed", String(this.shown[index]));
      });
      this.plot = new uPlot(this.plotOptions(), this.data(), this.place);
      this.showValues(null);
      this.onClick(options.onSelect && ((index) => options.onSelect(this.xs[index])));
    }

    plotOptions() {
      const series = [{}];
      const bands = [];
      this.positions = [];
      this.series.forEach((each, index) => {
        const stroke = () => seriesColour(each.color);
        this.positions.push(series.length);
        const isSparse = each.points || each.values.filter(isNumber).length === 1;
        series.push({
          label: each.label,
          show: this.shown[index],
          stroke,
          width: this.isStacked ? 1 : 1.75,
          dash: DASHES[each.dash % DASHES.length],
          spanGaps: Boolean(each.spanGaps),
          points: { show: isSparse && !this.isStacked ? true : false, size: 6, stroke, fill: stroke },
          fill: this.isStacked && index === 0 ? () => translucent(seriesColour(each.color), 0.55) : undefined,
        });
        if (this.isStacked && index > 0) {
          bands.push({ series: [series.length - 1, series.length - 2], fill: () => translucent(seriesColour(each.color), 0.55) });
        }
      });
      if (!this.isStacked) {
        this.series.forEach((each, index) => {
          if (!each.band) {
            return;
          }
          const edge = { show: this.shown[index], stroke: null, width: 0, points: { show: false } };
          each.edges = [series.length, series.length + 1];
          series.push({ ...edge }, { ...edge });
          bands.push({ series: [each.edges[1], each.edges[0]], fill: () => translucent(seriesColour(each.color), 0.16) });
        });
      }
      const group = this.options.group === undefined ? "page" : this.options.group;
      const first = this.xs[0];
      const last = this.xs[this.xs.length - 1];
      return {
        ...this.size(),
        legend: { show: false },
        padding: [8, 12, 0, 0],
        cursor: {
          y: false,
          points: { size: 7 },
          drag: { x: true, y: false },
          ...(group === null ? {} : { sync: { key: group, scales: ["x", null] } }),
        },
        scales: {
          x: { time: false, ...(first === last ? { range: [first - 1, last + 1] } : {}) },
          y: {
            distr: this.options.log ? 3 : 1,
            range: yRange(this.isStacked ? [0, ...(this.options.include || [])] : this.options.include, this.options.log),
          },
        },
        axes: axes(this.options, this.format, this.xs.every(Number.isInteger)),
        series,
        bands,
        hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)] },
      };
    }

    data() {
      const drawable = (values) => (this.options.log ? values.map((value) => (value <= 0 ? null : value)) : values);
      if (!this.isStacked) {
        const edges = this.series.flatMap((each) => (each.band ? each.band.map(drawable) : []));
        return [this.xs, ...this.series.map((each) => drawable(each.values)), ...edges];
      }
      const total = new Array(this.xs.length).fill(0);
      return [
        this.xs,
        ...this.series.map((each, index) =>
          each.values.map((value, place) => {
            total[place] += this.shown[index] && isNumber(value) ? value : 0;
            return total[place];
          }),
        ),
      ];
    }

    toggle(index, isShown) {
      this.shown[index] = isShown;
      if (this.isStacked) {
        this.plot.setSeries(this.positions[index], { show: true });
        this.plot.setData(this.data(), false);
        this.plot.redraw(true, true);
        return;
      }
      [this.positions[index], ...(this.series[index].edges || [])].forEach((place) => this.plot.setSeries(place, { show: isShown }));
    }

    showValues(index) {
      const isOver = isNumber(index);
      this.at.textContent = isOver ? `${this.options.xLabel || "step"} ${number(this.xs[index])}` : "";
      this.at.hidden = !isOver;
      this.series.forEach((each, place) => {
        const value = isOver ? each.values[index] : each.values.findLast(isNumber);
        const [low, high] = isOver && each.band ? each.band.map((side) => side[index]) : [];
        const range = isNumber(low) && isNumber(high) ? ` (${this.format(low)} to ${this.format(high)})` : "";
        this.entries[place].output.textContent = isNumber(value) ? this.format(value) + range : "–";
      });
    }

    summary() {
      const xLabel = this.options.xLabel || "step";
      const parts = this.series.map((each) => {
        const values = each.values.filter(isNumber);
        if (values.length === 0) {
          return `${each.label}: no values`;
        }
        const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
        return `${each.label}: first ${this.format(values[0])}, last ${this.format(values[values.length - 1])}, lowest ${this.format(low)}, highest ${this.format(high)}`;
      });
      const name = this.options.title || this.options.unit || "chart";
      return `${name} by ${xLabel} ${number(this.xs[0])} to ${number(this.xs[this.xs.length - 1])}. ${parts.join(". ")}. Arrow keys move the cursor.`;
    }

    fillTable() {
      const stride = Math.ceil(this.xs.length / TABLE_ROWS);
      const rows = [];
      for (let index = 0; index < this.xs.length; index += stride) {
        rows.push([number(this.xs[index]), ...this.series.map((each) => this.format(each.values[index]))]);
      }
      const note = stride > 1 ? `every ${stride}th of ${this.xs.length} rows` : "";
      this.writeTable([this.options.xLabel || "step", ...this.series.map((each) => each.label)], rows, note);
    }
  }

  // -- histograms

  class Bins extends Frame {
    constructor(element, options) {
      super(element, options);
      this.options = options;
      this.format = formatter(options.format);
      const { edges, counts } = options;
      const total = (counts || []).reduce((sum, count) => sum + count, 0);
      if (!counts || counts.length === 0 || total === 0) {
        this.empty(options.emptyText || "no values");
        return;
      }
      this.total = total;
      const most = counts.indexOf(Math.max(...counts));
      this.describe(
        `${options.title || options.label || "histogram"}: ${number(total)} in ${counts.length} bins from ${this.format(edges[0])} to ` +
          `${this.format(edges[edges.length - 1])}, most in ${this.binName(most)}. Arrow keys move the cursor.`,
      );
      this.at = make("li", "chart-at");
      this.legend.append(this.at);
      const middles = counts.map((_, index) => (edges[index] + edges[index + 1]) / 2);
      this.plot = new uPlot(
        {
          ...this.size(),
          legend: { show: false },
          padding: [8, 12, 0, 0],
          cursor: { y: false, x: false, points: { show: false }, drag: { x: false, y: false } },
          scales: {
            x: { time: false, range: [edges[0], edges[edges.length - 1]] },
            y: { range: (_plot, _low, high) => [0, (high || 1) * 1.06] },
          },
          axes: this.binAxes(edges),
          series: [{}, { label: options.label || "", paths: () => null, points: { show: false } }],
          hooks: { draw: [(plot) => this.drawBins(plot)], setCursor: [(plot) => this.onCursor(plot)] },
        },
        [middles, counts],
        this.place,
      );
      this.showBin(null);
      this.onClick(options.onSelect && ((index) => options.onSelect(edges[index], edges[index + 1], counts[index])));
    }

    binAxes(edges) {
      const [horizontal, vertical] = axes(this.options, number);
      if (this.options.names) {
        horizontal.splits = () => this.options.names.map((_, index) => (edges[index] + edges[index + 1]) / 2);
        horizontal.values = () => this.options.names.map(String);
      } else {
        horizontal.values = (_plot, ticks) => ticks.map((tick) => (tick === null ? null : this.format(tick)));
      }
      return [horizontal, vertical];
    }

    binName(index) {
      if (this.options.names) {
        return String(this.options.names[index]);
      }
      return `${this.format(this.options.edges[index])} to ${this.format(this.options.edges[index + 1])}`;
    }

    drawBins(plot) {
      const { edges, counts } = this.options;
      const context = plot.ctx;
      const floor = plot.valToPos(0, "y", true);
      const gap = Math.max(1, (window.devicePixelRatio || 1));
      context.save();
      counts.forEach((count, index) => {
        if (count <= 0) {
          return;
        }
        const left = plot.valToPos(edges[index], "x", true);
        const right = plot.valToPos(edges[index + 1], "x", true);
        const top = Math.min(plot.valToPos(count, "y", true), floor - 1);
        context.fillStyle = translucent(seriesColour(this.options.color || 1), index === this.hovered ? 1 : 0.75);
        context.fillRect(left + gap / 2, top, Math.max(1, right - left - gap), floor - top);
      });
      context.restore();
    }

    onCursor(plot) {
      const index = isNumber(plot.cursor.left) && plot.cursor.left >= 0 ? this.binAt(plot.posToVal(plot.cursor.left, "x")) : null;
      if (index !== this.hovered) {
        this.hovered = index;
        this.showBin(index);
        plot.redraw(false);
      }
    }

    binAt(value) {
      const index = this.options.edges.findIndex((edge) => edge > value) - 1;
      return index >= 0 ? index : null;
    }

    showBin(index) {
      if (!isNumber(index)) {
        this.at.textContent = `${number(this.total)} ${this.options.label || ""}`;
        return;
      }
      const count = this.options.counts[index];
      this.at.textContent = `${this.options.xLabel || ""} ${this.binName(index)}: ${number(count)} (${FORMATS.percent(count / this.total)})`;
    }

    fillTable() {
      const rows = this.options.counts.map((count, index) => [this.binName(index), String(count)]);
      this.writeTable([this.options.xLabel || "from", "count"], rows, "");
    }
  }

  // -- what pages call

  function handle(construct, element, options) {
    let chart = construct(element, options);
    return {
      element,
      update(changes) {
        const hidden = chart.series ? new Map(chart.series.map((each, index) => [each.label, !chart.shown[index]])) : new Map();
        const wasOpen = chart.table.open;
        options = { ...options, ...changes };
        if (options.series) {
          options.series = options.series.map((each) => ({ ...each, hidden: hidden.get(each.label) ?? each.hidden }));
        }
        chart.destroy();
        chart = construct(element, options);
        chart.table.open = wasOpen;
      },
      destroy() {
        chart.destroy();
      },
    };
  }

  function sparkline(element, values, options = {}) {
    const canvas = make("canvas", "sparkline");
    const known = values.filter(isNumber);
    const format = formatter(options.format);
    canvas.setAttribute("role", "img");
    canvas.setAttribute(
      "aria-label",
      known.length ? `${options.label || "values"}: from ${format(known[0])} to ${format(known[known.length - 1])}` : "no values",
    );
    const [width, height] = [options.width || 120, options.height || 28];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const draw = () => {
      const ratio = window.devicePixelRatio || 1;
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      if (known.length === 0) {
        return;
      }
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const across = (index) => 2 + (index / Math.max(1, values.length - 1)) * (width - 4);
      const up = (value) => (high > low ? height - 3 - ((value - low) / (high - low)) * (height - 6) : height / 2);
      context.strokeStyle = seriesColour(options.color || 1);
      context.lineWidth = 1.5;
      context.beginPath();
      let isPenDown = false;
      values.forEach((value, index) => {
        if (!isNumber(value)) {
          isPenDown = false;
          return;
        }
        context[isPenDown ? "lineTo" : "moveTo"](across(index), up(value));
        isPenDown = true;
      });
      context.stroke();
      const end = values.findLastIndex(isNumber);
      context.fillStyle = seriesColour(options.color || 1);
      context.beginPath();
      context.arc(across(end), up(values[end]), 2.5, 0, 2 * Math.PI);
      context.fill();
    };
    const chart = { redraw: draw };
    element.replaceChildren(canvas);
    draw();
    alive.add(chart);
    return { element, destroy: () => (alive.delete(chart), element.replaceChildren()) };
  }

  watchTheme();

  return {
    line: (element, options) => handle((place, wanted) => new Curves(place, wanted, false), element, options),
    stacked: (element, options) => handle((place, wanted) => new Curves(place, wanted, true), element, options),
    histogram: (element, options) => handle((place, wanted) => new Bins(place, wanted), element, options),
    sparkline,
    format: (value, name) => formatter(name)(value),
    colour,
    redraw: redrawAll,
  };
})();
