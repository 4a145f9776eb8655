/* Charts on a page: a thin layer over uPlot.

   Charts.line(element, {x, series: [{label, values}]})        several lines, bands around them, one cursor for the page

   Each gives an object with destroy() and update(options): new values, while the zoom, the series that were switched off and the
   cursor stay. Colors come from theme.css and follow it: light and dark. Every chart has a name for screen readers, arrow keys
   for its cursor, and a legend whose entries switch series off and show the values under the cursor. Text is only ever set as text.
   Needs uPlot and theme.css.

   Options of line:
     x           ascending numbers; a series may have an own `x`
     series      {label, values, band: [low, high]?, x?, color?, dash?, points?}; values may be null; color is a number from 1
                 (--series-N); dash is a number from 0 (full)
     title, unit, height (px), log (true: logarithmic, where there is a positive value), include ([0]: values that
                 the y axis must show)
     format      "number", "percent", "seconds" or "bytes"
     group       charts of one page with the same group share their cursor and their zoom; null: on its own */

"use strict";

var Charts = (() => {
  const COLORS = 8; // of series; more cannot be told apart
  const ON_PAPER = { width: 330, height: 150 }; // about two in a row
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
  const alive = new Set(); // what has redraw(), for when the theme changes
  let colors = new Map();

  // -- theme

  /** "rgb(0, 105, 180)" of "--series-1" as it is now. */
  function themeColor(name) {
    if (!colors.has(name)) {
      const probe = document.body.appendChild(document.createElement("span"));
      probe.style.color = `var(${name})`;
      colors.set(name, getComputedStyle(probe).color);
      probe.remove();
    }
    return colors.get(name);
  }

  const seriesName = (index) => `--series-${((index - 1) % COLORS) + 1}`;
  const seriesColor = (index) => themeColor(seriesName(index));

  function translucent(rgb, alpha) {
    return rgb.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
  }

  function redrawAll() {
    colors = new Map();
    alive.forEach((chart) => chart.redraw());
  }

  function watchTheme() {
    for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)", "print"]) {
      window.matchMedia(query).addEventListener("change", redrawAll);
    }
    window.addEventListener("beforeprint", () => alive.forEach((chart) => chart.plot?.setSize(ON_PAPER)));
    window.addEventListener("afterprint", () => alive.forEach((chart) => chart.resize()));
  }

  // -- numbers

  const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  function isNumber(value) {
    return typeof value === "number" && Number.isFinite(value);
  }

  function number(value) {
    if (!isNumber(value)) {
      return "–";
    }
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-4)) {
      return value.toExponential(2).replace("e+", "e");
    }
    const [scale, suffix] = size >= 1e4 ? SUFFIXES.find(([least]) => size >= least) : [1, ""];
    return trimmed(value / scale, 4) + suffix;
  }

  function trimmed(value, digits) {
    return String(Number(value.toPrecision(digits)));
  }

  /** 3725 -> "1:02:05", 75 -> "1:15", 2.5 -> "2.5 s", 0.0042 -> "4.2 ms", 0.00001 -> "10 µs". */
  function duration(seconds) {
    if (!isNumber(seconds)) {
      return "–";
    }
    if (seconds >= 59.95) {
      const whole = Math.round(seconds);
      const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, String(whole % 60).padStart(2, "0")];
      return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
    }
    const [scale, unit] = [[1, "s"], [1e3, "ms"], [1e6, "µs"]].find(([each]) => seconds * each >= 0.1) || [1, "s"];
    return `${trimmed(seconds * scale, 3)} ${unit}`;
  }

  const FORMATS = {
    number,
    percent: (value) => (isNumber(value) ? `${trimmed(value * 100, 3)}%` : "–"),
    seconds: duration,
    bytes: (value) => (isNumber(value) ? `${number(value)}B` : "–"), // decimal, as the ticks of the axis are
  };

  // -- small parts of a page

  function make(tag, className, text = "") {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  }

  /** A piece of the line, for the legend; its style follows the theme by itself. */
  function swatch(index, dash) {
    const [svg, line] = ["svg", "line"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
    svg.setAttribute("class", "chart-swatch");
    Object.entries({ x2: "100%", "stroke-dasharray": DASHES[dash % DASHES.length].join(" ") }).forEach((each) => line.setAttribute(...each));
    line.style.setProperty("stroke", `var(${seriesName(index)})`);
    svg.append(line);
    return svg;
  }

  // -- data: every series on one x

  function onOneAxis(options) {
    const own = options.series.map((series) => series.x || options.x || series.values.map((_, index) => index));
    const xs = [...new Set(own.flat())].filter(isNumber).sort((left, right) => left - right);
    const isShared = own.every((x) => x.length === xs.length);
    const place = new Map(xs.map((x, index) => [x, index]));
    // undefined where a series has no such x (a line goes on), null where its value is missing (a line breaks)
    const spread = (values, x) => {
      if (isShared) {
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
      const known = [...[low, high].filter(isNumber), ...(include || [])];
      const [least, most] = known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
      if (isLog) {
        const [from, to] = [Math.floor(Math.log10(least || 1e-6)), Math.ceil(Math.log10(most || 1))];
        return [10 ** from, 10 ** (to > from ? to : from + 1)];
      }
      if (least === 0 && most === 0) {
        return [0, 1]; // a series that never moved from zero: the room below would say that it could be negative
      }
      const room = most > least ? (most - least) * 0.06 : Math.abs(most) * 0.1 || 0.5;
      const isBound = (value) => (include || []).includes(value);
      return [isBound(least) ? least : least - room, isBound(most) && most > least ? most + room / 3 : most + room];
    };
  }

  /** Distances between ticks for an axis of whole numbers. */
  const WHOLE_STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

  function axes(format, isWhole) {
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const line = { stroke: () => themeColor("--grid"), width: 1 };
    const common = { stroke: () => themeColor("--text-muted"), font, grid: line, ticks: { ...line, size: 4 }, gap: 4 };
    const shown = (write) => (_plot, ticks) => ticks.map((tick) => (tick === null ? null : write(tick)));
    const size = (_plot, values) => 16 + 7 * Math.max(3, ...(values || []).map((value) => (value || "").length));
    const horizontal = { ...common, size: 30, space: 60, values: shown(number), ...(isWhole ? { incrs: WHOLE_STEPS } : {}) };
    return [horizontal, { ...common, space: 34, size, values: shown(format) }];
  }

  // -- a plot with its title and legend

  class Plot {
    constructor(element, options) {
      this.element = element;
      this.format = FORMATS[options.format || "number"];
      this.hidden = new Set(); // labels of series that were switched off
      this.plot = null;
      this.place = make("div", "chart-plot");
      this.place.tabIndex = 0;
      this.place.setAttribute("role", "img");
      this.place.addEventListener("keydown", (event) => this.onKey(event));
      this.legend = make("ul", "chart-legend");
      this.at = make("li", "chart-at");
      this.observer = new ResizeObserver(() => this.resize());
      this.observer.observe(element);
      element.classList.add("chart");
      element.replaceChildren(
        ...(options.title ? [make("h3", "chart-title", options.title)] : []),
        ...(options.unit ? [make("p", "chart-unit", options.unit)] : []),
        this.place,
        make("p", "chart-empty", "no values"),
        this.legend,
      );
      alive.add(this);
      this.update(options);
    }

    update(options) {
      const zoom = this.zoom();
      Object.assign(this, { options }, onOneAxis(options));
      this.isLog = Boolean(options.log) && this.series.some((each) => each.values.some((value) => value > 0));
      this.isEmpty = !this.series.some((each) => each.values.some(isNumber));
      this.element.classList.toggle("without-values", this.isEmpty);
      if (this.isEmpty) {
        return;
      }
      this.place.setAttribute("aria-label", `${this.summary()} Arrow keys move the cursor.`);
      const lines = this.lines();
      const looks = this.series.map(({ label, color, dash, band, isSparse }) => [label, color, dash, Boolean(band), isSparse]);
      const shape = JSON.stringify([this.isLog, looks]);
      if (shape === this.shape) {
        this.plot.setData(this.data(), !zoom);
        if (zoom) {
          this.plot.redraw(true, true);
        }
      } else {
        this.shape = shape;
        this.plot?.destroy();
        this.fillLegend();
        this.plot = new uPlot(this.plotOptions(lines), this.data(), this.place);
        this.series.forEach((each, index) => this.hidden.has(each.label) && this.toggle(index, false));
        if (zoom) {
          this.plot.setScale("x", zoom);
        }
      }
      this.showValues(this.plot.cursor.idx);
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
      this.plot?.redraw(true);
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

    destroy() {
      alive.delete(this);
      this.observer.disconnect();
      this.plot?.destroy();
      this.element.replaceChildren();
      this.element.classList.remove("chart");
    }

    /** The part of the x axis that is looked at; null: all of it. */
    zoom() {
      const { min, max } = this.plot?.scales.x || {};
      return this.plot && (min > this.xs[0] || max < this.xs.at(-1)) ? { min, max } : null;
    }

    plotOptions(lines) {
      const { options } = this;
      const group = options.group === undefined ? "page" : options.group;
      const [first] = this.xs;
      return {
        ...this.size(),
        legend: { show: false },
        padding: [8, 12, 0, 0],
        cursor: {
          y: false,
          points: { size: 7 },
          drag: { x: true, y: false, setScale: true },
          ...(group === null ? {} : { sync: { key: group, scales: ["x", null] } }),
        },
        scales: {
          x: { time: false, range: (_plot, low, high) => (this.xs.length === 1 ? [first, first + 1] : [low, high]) },
          y: { distr: this.isLog ? 3 : 1, range: yRange(this.isLog ? [] : options.include, this.isLog) },
        },
        axes: axes(this.format, this.xs.every(Number.isInteger)),
        ...lines,
        hooks: {
          setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        },
      };
    }

    /** uPlot's series and the bands between them: first one for each of ours, then the edges of their bands. */
    lines() {
      const fill = (each, alpha) => () => translucent(seriesColor(each.color), alpha);
      const series = this.series.map((each) => {
        const stroke = () => seriesColor(each.color);
        each.isSparse = Boolean(each.points) || each.values.filter(isNumber).length === 1;
        return {
          label: each.label,
          stroke,
          width: 1.75,
          dash: DASHES[each.dash % DASHES.length],
          points: { show: each.isSparse, size: 6, stroke, fill: stroke },
        };
      });
      const bands = [];
      for (const each of this.series.filter(({ band }) => band)) {
        const low = series.length + 1;
        const edge = { stroke: null, width: 0, points: { show: false } };
        each.edges = [low, low + 1];
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [low + 1, low], fill: fill(each, 0.16) });
      }
      return { series: [{}, ...series], bands };
    }

    data() {
      const drawable = (values) => (this.isLog ? values.map((value) => (value <= 0 ? null : value)) : values);
      const edges = this.series.flatMap((each) => (each.band ? each.band.map(drawable) : []));
      const lines = this.series.map((each) => drawable(each.values));
      return [this.xs, ...lines, ...edges];
    }

    fillLegend() {
      this.legend.replaceChildren(this.at);
      this.outputs = this.series.map(({ label, color, dash, band }, index) => {
        const button = make("button", "");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
        button.addEventListener("click", () => {
          const isShown = this.hidden.has(label);
          button.setAttribute("aria-pressed", String(isShown));
          this.toggle(index, isShown);
        });
        const output = make("output", band ? "with-band" : "");
        button.append(swatch(color, dash), make("span", "", label), output);
        const item = make("li", "");
        item.append(button);
        this.legend.append(item);
        return output;
      });
    }

    toggle(index, isShown) {
      this.hidden[isShown ? "delete" : "add"](this.series[index].label);
      [index + 1, ...(this.series[index].edges || [])].forEach((place) => this.plot.setSeries(place, { show: isShown }));
    }

    showValues(index) {
      const isOver = isNumber(index);
      this.at.textContent = isOver ? `step ${number(this.xs[index])}` : "last";
      this.series.forEach((each, place) => {
        const at = isOver ? index : each.values.findLastIndex(isNumber);
        const value = each.values[at];
        const [low, high] = each.band ? each.band.map((side) => side[at]) : [];
        const range = isNumber(low) && isNumber(high) ? ` (${this.format(low)} to ${this.format(high)})` : "";
        this.outputs[place].textContent = isNumber(value) ? this.format(value) + range : "–";
      });
    }

    summary() {
      const parts = this.series.map((each) => {
        const values = each.values.filter(isNumber);
        if (values.length === 0) {
          return `${each.label}: no values`;
        }
        const [first, last] = [values[0], values[values.length - 1]].map(this.format);
        const low = this.format(values.reduce((least, value) => Math.min(least, value)));
        const high = this.format(values.reduce((most, value) => Math.max(most, value)));
        return `${each.label}: first ${first}, last ${last}, lowest ${low}, highest ${high}`;
      });
      const name = this.options.title || this.options.unit || "chart";
      return `${name} by step ${number(this.xs[0])} to ${number(this.xs[this.xs.length - 1])}. ${parts.join(". ")}.`;
    }
  }

  watchTheme();

  return {
    line: (element, options) => new Plot(element, options),
    alive,
    duration,
    COLORS,
  };
})();
