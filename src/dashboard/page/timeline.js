// What the processes used: the last minutes, and hours from the history, on one line of time with the events.

import { read as readAddress, tell } from "./address.js";
import { Charts, MOST_LINES } from "./charts.js";
import { press, put, set } from "./dom.js";
import { bytes, clock, dayAndClock, h, percent, rate, sentence, span } from "./model.js";

const HOUR_MS = 3600e3;
/** What can be shown: by the word in the address its button, its heading, and how long it is. The last minutes are not from the history. */
const RANGES = {
  live: ["5 min", "Last minutes", 0],
  "1h": ["1 h", "Last hour", HOUR_MS],
  "12h": ["12 h", "Last 12 hours", 12 * HOUR_MS],
  all: ["All", "Since the start", 0],
};
/** Time between two readings of the history, which grows as often. */
const AGAIN_MS = 10e3;
/** Points of a chart. */
const POINTS = 360;
/** What is shown before and after an event that is chosen and was not shown. */
const AROUND_MS = 5 * 60e3;
/** What is known of a part says something of so long before and after it. */
const NEAR_MS = 60e3;
/** Most processes whose names stand beside their lines. */
const MOST_NAMES = 17;

/** Charts of the history: heading, figure, how a value is told, whether means or peaks are drawn, the least height, whether one of zeros alone is shown. */
const FIGURES = [
  ["CPUs in use", "cpus", (value) => value?.toFixed(2), "mean", 0.2],
  ["Resident memory", "resident_bytes", bytes, "highest", 0],
  ["GPU use", "gpu_busy_percent", percent, "mean", 100, true],
  ["Device memory", "device_bytes", bytes, "highest", 0],
  ["Spilled to disk", "spilled_bytes", bytes, "highest", 0],
  ["Tasks per second", "tasks_per_s", (value) => value?.toFixed(value < 10 ? 1 : 0), "mean", 2],
  ["Received from peers", "received_bytes_per_s", rate, "mean", 0],
  ["Connections", "connections", (value) => value?.toFixed(0), "mean", 2],
];

export class Timeline {
  /** `read` reads a path of the cluster; `moved` is told when another part of the time is shown. */
  constructor({ read, moved }) {
    Object.assign(this, { read, moved, model: null, range: "live", fixed: null, before: "live", paused: false, who: "", at: null, past: null, error: "", asked: 0 });
    const options = { chosen: () => this.at, range: (from, to) => this.show(from, to), pick: (at) => this.nearest(at) };
    this.live = new Charts(document.getElementById("charts"), options);
    this.charts = new Charts(document.getElementById("past"), { ...options, window: () => this.window, moment: (at) => this.moment(at) });
    this.events = document.getElementById("events");
    this.events.addEventListener("click", (event) => {
      const time = event.target.closest("li")?.querySelector("time");
      if (time) this.choose(time.getAttribute("datetime"));
    });
    this.events.addEventListener("keydown", (event) => this.step(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    setInterval(() => { if (!document.hidden && this.grows) this.load(); }, AGAIN_MS);
    this.buttons();
    document.getElementById("time-ages").textContent = `The history has a value for every 10 s of the last hour, every minute of twelve hours, every 10 min of a week; bytes on links are not in it, and those of each pair are above.`;
  }

  /** Whether what is shown will change. */
  get grows() {
    return this.range !== "live" && !this.fixed && this.model && !this.model.end;
  }

  /** From when until when, in seconds. */
  get window() {
    const { first, last } = this.past;
    if (this.fixed) return this.fixed.map((at) => at / 1000);
    const length = RANGES[this.range][2];
    return [(length ? last - length : first) / 1000, last / 1000];
  }

  /** A time as it is told on an axis that may be days long. */
  moment(at) {
    const [from, to] = this.window;
    if (to - from <= 86400) return clock(at);
    return new Date(at).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
  }

  /** Another cluster; shows what the address says of its time. */
  open(model) {
    this.model = model;
    Object.assign(this, { past: null, at: null, paused: false, fixed: null, range: "live", who: "" });
    this.live.clear();
    this.charts.clear();
    if (readAddress(location.hash).cluster === model.name) this.follow();
    else this.tell();
  }

  /** No cluster. */
  close() {
    this.model = null;
  }

  /** Shows what the address says. */
  follow() {
    const view = readAddress(location.hash).time;
    const [since, until] = ["since", "until"].map((word) => Number(view.get(word)));
    this.fixed = since > 0 && until > since ? [since, until] : null;
    this.range = Object.hasOwn(RANGES, view.get("range")) ? view.get("range") : "live";
    this.who = view.get("who") ?? "";
    this.at = Date.parse(view.get("at")) || null;
    this.load();
    this.moved();
  }

  /** Writes what is shown into the address, so that it can be passed on. */
  tell() {
    const view = new URLSearchParams();
    const frozen = this.paused && this.model.figures.length > 1 ? [this.model.figures[0].at, this.model.last.at] : null;
    const shown = this.fixed ?? frozen;
    if (shown) ["since", "until"].forEach((word, at) => view.set(word, Math.round(shown[at])));
    else if (this.range !== "live") view.set("range", this.range);
    if (this.who) view.set("who", this.who);
    if (this.at) view.set("at", new Date(this.at).toISOString());
    tell({ cluster: this.model.name, time: [...view] });
  }

  choose(at) {
    this.at = Date.parse(at);
    const [from, to] = this.isPast && this.past ? this.window : [(this.model.figures[0]?.at ?? Infinity) / 1000, Infinity];
    if (this.at < from * 1000 || this.at > to * 1000) this.show(this.at - AROUND_MS, this.at + AROUND_MS);
    else this.change();
  }

  /** Chooses the event nearest to a moment in a chart. */
  nearest(at) {
    const apart = (record) => Math.abs(Date.parse(record.at) - at);
    const told = this.model.records.filter((record) => record.event !== "step");
    const record = told.reduce((best, one) => (!best || apart(one) < apart(best) ? one : best), null);
    if (record) this.choose(record.at);
    this.events.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  }

  /** The arrow keys choose the next event of the list. */
  step(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const all = [...this.events.children];
    if (!by || !all.length) return;
    event.preventDefault();
    const now = all.findIndex((one) => one.classList.contains("chosen"));
    const next = all[Math.min(all.length - 1, Math.max(0, now + by))];
    this.choose(next.querySelector("time").getAttribute("datetime"));
    next.scrollIntoView({ block: "nearest" });
  }

  show(from, to) {
    if (!this.fixed) this.before = this.range;
    this.fixed = [from, to];
    this.change();
  }

  pause() {
    if (this.fixed) [this.range, this.fixed] = [this.before, null];
    else if (this.range === "live") this.paused = !this.paused;
    else if (this.past) return this.show(...this.window.map((at) => at * 1000));
    this.change();
  }

  change() {
    this.tell();
    this.load();
    this.moved();
  }

  /** The part of the history that is shown, as a request and in words; instead of the last minutes the last hour. */
  get part() {
    if (this.fixed) return { query: `since=${Math.round(this.fixed[0])}&until=${Math.round(this.fixed[1])}`, name: "chosen time" };
    const [, name, length] = RANGES[this.range === "live" ? "1h" : this.range];
    return { query: length ? `last=${length}` : "", name: name.toLowerCase() };
  }

  /** Whether the history is shown, and not what was measured for this page. */
  get isPast() {
    return Boolean(this.fixed) || this.range !== "live";
  }

  /** Reads what is to be shown of the history. */
  async load() {
    const { model } = this;
    const asked = ++this.asked;
    if (this.isPast) {
      try {
        const past = await this.read(`history?points=${POINTS}&${this.part.query}`);
        if (asked === this.asked && model === this.model) [this.past, this.error] = [past, ""];
      } catch (error) {
        if (asked === this.asked) this.error = error.message;
      }
      if (asked !== this.asked || model !== this.model) return;
      this.draw();
    }
    // Without the rest of the page, of which nothing is new.
    if (model.state) this.update();
  }

  /** Draws what is new. */
  update() {
    for (const part of this.parts()) part();
  }

  /** What draws it: a chart of the last minutes each, and what surrounds them. */
  parts() {
    const isLive = () => !this.isPast && !this.paused;
    const { model } = this;
    const live = isLive() ? this.live.parts(model) : [];
    return [...live.map((part) => () => { if (isLive() && model === this.model) part(); }), () => this.surround()];
  }

  surround() {
    const { model } = this;
    // Nobody was there to see the end.
    if (model.end && this.range === "live" && !this.fixed && model.figures.length < 2 && !this.error) {
      this.range = "all";
      this.load();
      this.moved();
    }
    // Which of its processes are workers is known later than what they used.
    if (this.drawnWorkers !== model.workers.length) this.draw();
    this.frame();
    for (const one of this.events.children) {
      const is = Date.parse(one.querySelector("time").getAttribute("datetime")) === this.at;
      if (one.classList.contains("chosen") !== is) one.classList.toggle("chosen", is);
    }
    const drawn = this.isPast ? this.charts : this.live;
    if (this.drawnAt !== this.at || this.drawnRecords !== model.records.length) {
      [this.drawnAt, this.drawnRecords] = [this.at, model.records.length];
      for (const { plot } of drawn.charts.values()) plot.redraw(false);
    }
  }

  frame() {
    const heading = this.fixed ? this.fixed.map(dayAndClock).join(" – ") : RANGES[this.range][1];
    put(document.getElementById("time-title"), heading);
    set(document.getElementById("charts"), "hidden", this.isPast);
    set(document.getElementById("past"), "hidden", !this.isPast);
    if (this.isPast) put(document.getElementById("time-since"), this.error ? `${this.error}; ` : this.facts);
    for (const button of this.place.querySelectorAll("button[data-range]")) press(button, !this.fixed && button.dataset.range === this.range);
    const held = Boolean(this.fixed) || this.paused;
    press(this.hold, held);
    put(this.hold, held ? "Go on" : "Pause");
    const names = this.model.workers.map((worker) => worker.name);
    if (this.select.dataset.key !== names.join(" ")) {
      this.select.dataset.key = names.join(" ");
      this.select.replaceChildren(h("option", { value: "" }, "All workers"), ...names.map((name) => h("option", { value: name }, name)));
    }
    set(this.select, "value", names.includes(this.who) ? this.who : "");
    put(document.getElementById("moment"), this.told);
  }

  get facts() {
    const points = this.past?.ms.filter(Boolean) ?? [];
    if (!points.length) return "nothing is known of this time; ";
    return `a value for every ${span(points.reduce((most, ms) => Math.max(most, ms), 0))} at most; `;
  }

  /** What is known of the chosen moment: what happened, and what its process did just before. */
  get told() {
    if (!this.at) return "";
    const records = this.model.records.filter((record) => Date.parse(record.at) === this.at && record.event !== "step");
    const events = records.map((record) => `${record.process ?? "cluster"}: ${sentence(record)}`).join("; ");
    const { past } = this;
    const name = records.find((record) => record.process)?.process;
    const process = past?.processes.find((one) => one.name === name);
    const [from, to] = this.isPast && past ? this.window : [Infinity, 0];
    // Of what is not in the part that is shown, nothing is known here.
    const isShown = this.at >= from * 1000 - NEAR_MS && this.at <= to * 1000 + NEAR_MS;
    const place = isShown && process ? past.at.findLastIndex((at, number) => at - past.ms[number] <= this.at && process.up[number]) : -1;
    const figures = FIGURES.map(([title, key, format, which]) => {
      const value = place < 0 ? null : process.figures[key]?.[which][place];
      return value == null ? null : `${title}: ${format(value)}`;
    }).filter(Boolean);
    const before = figures.length ? ` – ${name} at ${clock(past.at[place])}: ${figures.join(", ")}` : "";
    return `${dayAndClock(this.at)} ${events}${before}`;
  }

  buttons() {
    this.place = document.getElementById("ranges");
    this.select = h("select", { id: "who", "aria-label": "Worker", onchange: (event) => { this.who = event.target.value; this.tell(); this.draw(); } });
    this.hold = h("button", { id: "hold", onclick: () => this.pause() }, "Pause");
    const ranges = Object.entries(RANGES).map(([word, [text, title]]) => h("button", { "data-range": word, title, onclick: () => { this.paused = false; this.fixed = null; this.range = word; this.change(); } }, text));
    this.place.append(this.select, ...ranges, this.hold);
  }

  /** Draws the history. */
  draw() {
    this.drawnWorkers = this.model?.workers.length;
    if (!this.model || !this.isPast || !this.past?.at.length) return this.charts.clear();
    const { past, model } = this;
    // The value of a span stands in its middle.
    const times = past.at.map((at, place) => (at - past.ms[place] / 2) / 1000);
    this.lives(times);
    const workers = past.processes.filter(({ name }) => model.workers.some((worker) => worker.name === name));
    for (const [title, key, format, which, least, zeros] of FIGURES) {
      const known = workers.filter(({ figures }) => figures[key]?.highest.some((value) => value > 0 || zeros && value === 0));
      const lines = known.length ? this.series(workers, key, which) : [];
      const words = { mean: "mean", highest: "peaks" }[which];
      if (lines.length) this.charts.draw(title, times, lines, format, model, least);
      const box = this.charts.charts.get(title)?.box;
      if (box) box.hidden = !lines.length;
      if (box) put(box.querySelector("h3"), `${title}${this.who ? "" : ` (${words})`}`);
    }
  }

  /** One worker's means and peaks, or a line for each worker, or of very many the sum and the highest. */
  series(workers, key, which) {
    const one = workers.find(({ name }) => name === this.who)?.figures[key];
    if (one) return [["mean", one.mean], ["peaks", one.highest]];
    const of = (process) => process.figures[key]?.[which] ?? [];
    if (workers.length <= MOST_LINES) return workers.map((process) => [process.name, of(process)]);
    const over = (fold) => this.past.at.map((_, place) => {
      const known = workers.map((process) => of(process)[place]).filter((value) => value != null);
      return known.length ? fold(known) : null;
    });
    const sum = (known) => known.reduce((sum, value) => sum + value, 0);
    // A sum of shares would be of nothing.
    const all = key.endsWith("_percent") ? ["mean of workers", over((known) => sum(known) / known.length)] : ["all workers", over(sum)];
    return [all, ["highest worker", over((known) => Math.max(...known))]];
  }

  /** A line for each process: when it was READY, when it was not, and when it was not there. */
  lives(times) {
    const { past } = this;
    const all = past.processes;
    const tones = { ready: "--good", unresponsive: "--bad", failed: "--bad", starting: "--warn", restarting: "--warn", stopping: "--warn" };
    const looks = all.map((process) => past.at.map((_, place) => {
      const up = process.up[place];
      const restarted = place && process.restarts[place] > (process.restarts[place - 1] ?? Infinity);
      // What did not run all the time is not as high.
      return up ? `${restarted ? "--bad" : tones[past.phases[process.phase[place]]] ?? "--off"} ${up < 100 ? 0.4 : 0.8}` : "";
    }));
    const paint = (plot, colour) => {
      const context = plot.ctx;
      const high = plot.bbox.height / all.length;
      const { min, max } = plot.scales.x;
      const across = (ms) => plot.valToPos(Math.min(Math.max(ms / 1000, min), max), "x", true);
      context.save();
      looks.forEach((row, number) => {
        for (let begin = 0, end; begin < row.length; begin = end) {
          // What looks the same is one bar.
          for (end = begin + 1; end < row.length && row[end] === row[begin]; end += 1);
          if (!row[begin]) continue;
          const [tone, part] = row[begin].split(" ");
          const from = Math.floor(across(past.at[begin] - past.ms[begin]));
          context.fillStyle = colour(tone);
          context.fillRect(from, plot.bbox.top + (number + (1 - part) / 2) * high, Math.max(1, Math.ceil(across(past.at[end - 1])) - from), Math.max(1, high * part));
        }
      });
      context.restore();
    };
    const each = Math.ceil(all.length / MOST_NAMES);
    const rows = all.map((_, row) => row).filter((row) => row % each === 0);
    // The axis counts upwards, and the rows downwards.
    const marks = { splits: () => rows.map((row) => all.length - row - 0.5), values: () => rows.map((row) => all[row].name), grid: { show: false } };
    const height = 50 + Math.min(240, Math.max(60, 14 * all.length));
    const nothing = times.map(() => null);
    this.charts.draw("Processes", times, [["", nothing]], () => "", this.model, all.length, { paint, marks, height });
    put(this.charts.charts.get("Processes").box.querySelector("h3"), "Processes (green: READY; red: it was restarted, or does not answer; none: it was not there)");
  }
}
