// Charts over time, by uPlot.

import { put } from "./dom.js";
import { bytes, clock, h, isDeath, percent, rate } from "./model.js";

/** Most workers with a line each; more are summed. */
export const MOST_LINES = 8;
/** Steps of an axis of bytes: its marks are whole numbers of MiB or GiB. */
const POWERS = Array.from({ length: 50 }, (_, at) => 2 ** at);
/** Steps of an axis of time: whole seconds, minutes, hours, days. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400];

/** The page's colours by name, as they are now, and how axes look in them. */
export function looks() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { colour, axis: { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" } };
}

/** A colour as a number of a picture's pixel; `#rrggbb` or `#rgb`. */
export function pixel(colour) {
  const digits = colour.length === 4 ? [...colour.slice(1)].map((digit) => digit + digit).join("") : colour.slice(1);
  const [red, green, blue] = [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export class Charts {
  /** `options` say what a part that is drawn over is for (`range`), and a click (`pick`), which moment is chosen (`chosen`), from when until when to draw (`window`, in seconds) and how a time is told (`moment`). */
  constructor(place, options = {}) {
    this.place = place;
    this.options = { window: null, chosen: () => null, range: () => {}, pick: () => {}, moment: clock, ...options };
    this.charts = new Map();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.clear());
    new ResizeObserver(() => this.resize()).observe(place);
  }

  clear() {
    for (const { plot } of this.charts.values()) plot.destroy();
    this.charts.clear();
    this.place.replaceChildren();
  }

  resize() {
    for (const { plot, box } of this.charts.values()) {
      if (box.clientWidth && Math.abs(plot.width - box.clientWidth) > 1) plot.setSize({ width: box.clientWidth, height: plot.height });
    }
  }

  /** What draws the charts, one after another: together they would keep the page from answering. */
  parts(model) {
    // There may be one more before the last is drawn.
    const figures = [...model.figures];
    const times = figures.map((one) => one.at / 1000);
    put(document.getElementById("time-since"), times.length ? `measured since ${clock(times[0] * 1000)}; ` : "");
    if (times.length < 2) return [];
    const names = model.workers.map((worker) => worker.name);
    const of = (key) => {
      const value = (one, name) => one.processes[name]?.[key] ?? null;
      if (names.length <= MOST_LINES) return names.map((name) => [name, figures.map((one) => value(one, name))]);
      return [["all workers", figures.map((one) => names.reduce((sum, name) => sum + (value(one, name) ?? 0), 0))]];
    };
    const parts = [
      () => this.draw("CPUs in use", times, of("cpus"), (value) => value?.toFixed(2), model, 0.2),
      () => this.draw("Resident memory", times, of("resident_bytes"), bytes, model),
    ];
    const gpus = [...new Set(model.workers.map((worker) => worker.gpu?.index).filter((index) => model.last.gpus[index]?.busy_percent != null))];
    if (gpus.length) parts.push(() => this.draw("GPU use", times, gpuUse(figures, gpus), percent, model, 100));
    if (figures.some((one) => one.tasks)) {
      const total = (one, key) => one.tasks?.workers.reduce((sum, worker) => sum + worker[key], 0) ?? null;
      parts.push(() => this.draw("Tasks per second", times, taskRates(figures, times, total), (value) => value?.toFixed(value < 10 ? 1 : 0), model, 2));
      parts.push(() => this.draw("Tasks waiting or running", times, [
        ["queued", figures.map((one) => total(one, "queued"))],
        ["in flight", figures.map((one) => total(one, "in_flight"))],
      ], (value) => value?.toFixed(0), model, 4));
    }
    parts.push(() => {
      const known = moved(figures);
      if (known.length) this.draw("Bytes on links", times, known, rate, model);
    });
    return parts;
  }

  draw(title, times, series, format, model, least = 0, { paint, marks, height = 150 } = {}) {
    const key = series.map(([name]) => name).join(" ");
    let chart = this.charts.get(title);
    const old = chart;
    const data = [times, ...series.map(([, values]) => values)];
    if (chart?.key === key) {
      Object.assign(chart, { model, paint });
      chart.plot.setData(data);
      return;
    }
    const { colour, axis } = looks();
    const box = h("div", { class: "chart", role: "group", "aria-label": title }, h("h3", {}, title));
    old?.plot.destroy();
    if (old) old.box.replaceWith(box);
    else this.place.append(box);
    chart = { key, box, model, paint };
    const { window: shown, chosen, range, pick, moment } = this.options;
    const line = (plot, at, stroke, dash) => {
      if (!(at >= plot.scales.x.min && at <= plot.scales.x.max)) return;
      const context = plot.ctx;
      const x = Math.round(plot.valToPos(at, "x", true));
      context.save();
      context.strokeStyle = colour(stroke);
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x, plot.bbox.top);
      context.lineTo(x, plot.bbox.top + plot.bbox.height);
      context.stroke();
      context.restore();
    };
    const lines = (plot) => {
      chart.paint?.(plot, colour);
      for (const record of chart.model.records) {
        if (record.event === "exited") line(plot, Date.parse(record.at) / 1000, isDeath(record) ? "--bad" : "--off", [4, 4]);
      }
      if (chosen() !== null) line(plot, chosen() / 1000, "--accent", []);
    };
    // Where the legend stands while nobody points: at the chosen moment, if it is shown, or at the newest.
    const rest = (plot) => {
      const [at, times] = [chosen(), plot.data[0]];
      const [last, found] = [times.length - 1, at === null ? -1 : times.findLastIndex((one) => one * 1000 <= at)];
      return found < 0 || at > times[last] * 1000 ? last : found;
    };
    let dragged = false;
    const selected = (plot) => {
      const { left, width } = plot.select;
      if (width < 5) return;
      dragged = true;
      range(plot.posToVal(left, "x") * 1000, plot.posToVal(left + width, "x") * 1000);
      plot.setSelect({ left: 0, width: 0 }, false);
    };
    const clicked = (plot) => {
      plot.over.addEventListener("mousedown", () => { dragged = false; });
      plot.over.addEventListener("click", () => {
        if (!dragged && plot.cursor.left >= 0) pick(plot.posToVal(plot.cursor.left, "x") * 1000);
      });
    };
    chart.plot = new uPlot({
      width: Math.max(200, box.clientWidth), height,
      cursor: { y: false, points: { size: 6 }, drag: { x: true, setScale: false }, sync: { key: this.place.id } },
      scales: { x: shown ? { range: () => shown() } : {}, y: { range: (_, low, high) => [0, Math.max(least, (high ?? 0) * 1.1) || 1] } },
      axes: [{ ...axis, size: 28, space: 80, incrs: SECONDS, values: (_, times) => times.map((at) => moment(at * 1000)) }, { ...axis, size: 64, ...(marks ?? { incrs: format === bytes ? POWERS : undefined, values: (_, values) => values.map((value) => format(value) ?? "") }) }],
      series: [
        { label: "At", value: (plot, at) => (at != null ? moment(at * 1000) : shown || chosen() !== null || chart.model.end ? moment(plot.data[0][rest(plot)] * 1000) : "now") },
        ...series.map(([name], at) => ({ label: name, stroke: colour(`--line${at % 8}`), width: 1.6, points: { show: false }, value: (plot, value, of, at) => { const shown = at == null ? resting(plot.data[of], rest(plot)) : value; return shown == null ? "–" : format(shown); } })),
      ],
      hooks: { draw: [lines], setSelect: [selected], ready: [clicked] },
    }, data, box);
    this.charts.set(title, chart);
  }
}

/** How busy each GPU was, or all of many. */
function gpuUse(figures, gpus) {
  const busy = (one, index) => one.gpus[index]?.busy_percent ?? null;
  if (gpus.length <= MOST_LINES) return gpus.map((index) => [`GPU${index}`, figures.map((one) => busy(one, index))]);
  const mean = (known) => (known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null);
  return [["mean of GPUs", figures.map((one) => mean(gpus.map((index) => busy(one, index)).filter((value) => value != null)))]];
}

/** How many native tasks end in a second: all, and those of each function where there are several. */
function taskRates(figures, times, total) {
  const done = figures.map((one) => total(one, "finished"));
  const finished = done.map((now, at) => (at && now != null && done[at - 1] != null ? Math.max(0, (now - done[at - 1]) / (times[at] - times[at - 1])) : null));
  const rates = perFunction(figures, times);
  const each = rates.length > 1 ? rates.slice(0, MOST_LINES - 1).map(({ name, rates }) => [name, rates]) : [];
  return [["finished", finished], ...each];
}

/** What moves on the links of which anything is known. */
function moved(figures) {
  const links = (one, key) => {
    const all = Object.values(one.gpus).flatMap((gpu) => gpu[key].filter((part) => part != null));
    return all.length ? all.reduce((sum, part) => sum + part, 0) : null;
  };
  const nics = figures.map((one) => {
    const all = Object.values(one.nics).flat();
    return all.length ? all.reduce((sum, part) => sum + part, 0) : null;
  });
  const all = [["NVLink", "nvlink_bytes_per_s"], ["PCIe", "pcie_bytes_per_s"]].map(([name, key]) => [name, figures.map((one) => links(one, key))]);
  return [...all, ["NICs", nics]].filter(([, values]) => values.some((value) => value != null));
}

/** The functions of native tasks by their runs, with their rates at all times. */
function perFunction(figures, times) {
  const last = figures[figures.length - 1].tasks?.functions ?? [];
  const maps = figures.map((one) => new Map((one.tasks?.functions ?? []).map((known) => [known.name, known.runs])));
  return last.map(({ name }) => {
    const counts = maps.map((known, at) => known.get(name) ?? (figures[at].tasks ? 0 : null));
    const rates = counts.map((now, at) => (at && now != null && counts[at - 1] != null ? Math.max(0, (now - counts[at - 1]) / (times[at] - times[at - 1])) : null));
    return { name, rates };
  });
}

/** What a line shows there; of the newest, the native scheduler may leave out one reading. */
function resting(values, place) {
  return values[place] ?? (place === values.length - 1 ? values[place - 1] : null);
}
