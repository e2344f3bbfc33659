// What tasks do: how far each function is, the last ones that ran in a row for each worker, and what waits for what. Of Dask
// its scheduler's counts; its own pages have the rest.

import { looks, pixel } from "./charts.js";
import { press, put } from "./dom.js";
import { bytes, clock, h } from "./model.js";

/** Time between two questions, while somebody sees the answers. */
const AGAIN_MS = 1000;
/** The same for Dask's counts, which the table of workers shows, too. */
const DASK_MS = 2000;
/** Most tasks that are kept here. */
const KEPT = 60_000;
/** Lengths of time that can be shown: their words, and seconds. */
const SPANS = [["10 s", 10], ["1 min", 60], ["5 min", 300]];
/** Room for the names on the left and the times below, in pixels. */
const LEFT = 52;
const BELOW = 16;
/** Functions with a colour of their own; the last colour is that of all others. */
const COLOURS = 8;
/** Most failed tasks with a mark of their own. */
const MARKS = 300;

/** A task that ran, as the server sends it: places in a row. */
const [ID, FUNCTION, WORKER, AT, MICROS, FETCHED, FAILED, STANDS_FOR] = [0, 1, 2, 3, 4, 5, 6, 7];

/** What tasks wait for, in words. */
const WAITS = {
  input: "an input that is not there yet",
  able_worker: "a worker that may run them: none is there",
  room: "room on any worker",
  chosen_worker: "the worker chosen for them, which is busy",
};

export class Tasks {
  /** `read` reads a path of the cluster; `chosen` is told of a task whose explanation is shown. */
  constructor(card, { read, chosen }) {
    Object.assign(this, { card, read, chosen, model: null, span: 60, paused: false, seen: false, asking: false });
    this.facts = h("p", { class: "muted", role: "status" });
    const spans = SPANS.map(([words, seconds]) => h("button", { "data-span": seconds, "aria-pressed": "false", onclick: () => this.show(seconds) }, words));
    this.hold = h("button", { "aria-pressed": "false", onclick: () => this.pause() }, "Pause");
    this.controls = h("div", { class: "buttons", role: "group", "aria-label": "Time of the tasks" }, spans, this.hold);
    this.functions = h("tbody");
    const headings = ["Function", "Progress", "Waiting", "At workers", "Done", "Failed", "Each takes"];
    const head = h("thead", {}, h("tr", {}, headings.map((words, at) => h("th", { scope: "col", class: at > 1 ? "number" : at ? "wide" : "" }, words))));
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": "The last tasks, a row for each worker; arrow keys move, the line below says what is known, Enter explains a task" });
    this.legend = h("p", { class: "legend" });
    this.told = h("p", { class: "pair", "aria-live": "polite" });
    this.why = h("p", { id: "task-why", "aria-live": "polite", hidden: true });
    this.waits = h("ul", { class: "why" });
    this.waiting = h("div", { hidden: true }, h("h3", {}, "What waits"), this.waits);
    this.dask = h("p", { id: "dask-pages", hidden: true });
    this.stream = h("div", {}, h("div", { class: "scroll" }, this.canvas), this.legend, this.told);
    this.table = h("div", { class: "scroll", id: "functions", tabindex: 0, role: "group", "aria-label": "Functions" }, h("table", {}, head, this.functions));
    card.replaceChildren(
      h("div", { class: "head" }, h("h2", { id: "tasks-title" }, "Tasks"), this.facts, this.controls),
      this.dask, this.table, this.stream, this.waiting, this.why);
    this.pixels = document.createElement("canvas");
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.below(event)));
    this.canvas.addEventListener("click", (event) => { this.choose(this.below(event)); this.explain(this.at?.[ID]); });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(card);
    new IntersectionObserver((entries) => { this.seen = entries.at(-1).isIntersecting; this.ask(); }, { rootMargin: "200px" }).observe(card);
    setInterval(() => this.ask(), AGAIN_MS);
    setInterval(() => this.askDask(), DASK_MS);
  }

  /** Another cluster, or none; explains a task, if the address names one. */
  open(model, task) {
    Object.assign(this, { model, rows: [], next: 0, ran: 0, now: 0, at: null, problem: "", names: new Map(), paused: false, key: null, failed: null, most: 0 });
    this.card.hidden = true;
    this.why.hidden = true;
    if (task) this.explain(task, true);
  }

  /** Whether there is anything to ask for. */
  get lives() {
    return this.runs("native");
  }

  runs(engine) {
    return this.model?.state?.engine === engine && !this.model.end && !this.model.lost;
  }

  update() {
    const { model } = this;
    const engine = model.state?.engine;
    const isDask = engine === "dask";
    this.card.hidden = engine !== "native" && !(isDask && model.state.scheduler);
    if (this.card.hidden) return;
    this.controls.hidden = isDask;
    if (this.reveals) {
      this.reveals = false;
      this.card.scrollIntoView();
    }
    if (isDask) this.pages();
    const tasks = isDask ? model.dask : model.figures.findLast((figures) => figures.tasks)?.tasks;
    const key = JSON.stringify([tasks?.functions, tasks?.waiting]);
    if (key === this.key) return;
    this.key = key;
    this.progress(tasks?.functions ?? []);
    this.reasons(tasks?.waiting ?? []);
    this.table.hidden = !tasks?.functions.length;
    this.tell();
  }

  /** Where Dask's own pages are. */
  pages() {
    const { dashboard } = this.model.state.scheduler;
    const isLink = dashboard?.startsWith("http");
    const missing = this.model.dask && !this.model.dask.has_pages;
    const key = `${dashboard} ${missing}`;
    this.dask.hidden = !isLink;
    if (this.dask.dataset.key === key) return;
    this.dask.dataset.key = key;
    if (missing) this.dask.replaceChildren("Dask's own pages, with a stream of tasks, need Bokeh where the scheduler runs: ", h("code", {}, "pip install bokeh"));
    else this.dask.replaceChildren(h("a", { href: isLink ? dashboard : null, target: "_blank", rel: "noreferrer noopener" }, "Dask's own pages"), " have a stream of tasks, a profile and more.");
  }

  async askDask() {
    const { model } = this;
    if (!this.runs("dask") || !model.state.scheduler || document.hidden || this.asking) return;
    this.asking = true;
    try {
      const told = await this.read("dask");
      if (model === this.model) model.dask = told;
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.asking = false;
    if (model !== this.model) return;
    this.update();
    this.tell();
  }

  /** How far each function is. */
  progress(functions) {
    this.functions.replaceChildren(...functions.map(({ name, active, sent, runs, failed, seconds }) => {
      const waiting = Math.max(0, active - sent);
      const parts = [["done", runs], ["sent", sent], ["failed", failed], ["waiting", waiting]].map(([what, count]) => {
        const part = h("span", { class: what });
        // The page's policy forbids style attributes, not the script's own.
        part.style.flexGrow = count;
        part.hidden = !count;
        return part;
      });
      const numbers = [waiting, sent, runs, failed].map((count) => count.toLocaleString());
      return h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "wide" }, h("div", { class: "done-bar", "aria-hidden": "true" }, parts)),
        [...numbers, duration(seconds)].map((text, at) => h("td", { class: `number${at === 3 && failed ? " failed" : ""}` }, at === 3 && failed ? `✕ ${text}` : text)));
    }));
  }

  /** What waits for what, with tasks that can be asked about. */
  reasons(waiting) {
    this.waiting.hidden = !waiting.length;
    this.waits.replaceChildren(...waiting.map(({ wait, tasks, examples }) => h("li", {},
      h("strong", {}, tasks.toLocaleString()), ` wait${tasks === 1 ? "s" : ""} for ${WAITS[wait] ?? wait}`,
      examples.length ? [h("br"), "such as ", examples.map((task, at) => [at ? ", " : "", h("button", { class: "link", "data-task": task, onclick: () => this.explain(task) }, task)])] : null)));
  }

  /** Asks for what is new, if somebody sees it. */
  async ask() {
    const { model } = this;
    if (!this.lives || this.asking || this.paused || !this.seen || document.hidden) return;
    this.asking = true;
    try {
      const told = await this.read(`tasks?after=${this.next}`);
      if (model === this.model && !this.paused) {
        this.take(told);
        // Not at once: to read them took its time, too.
        await new Promise(requestAnimationFrame);
        if (model === this.model) this.draw();
      }
      this.problem = "";
    } catch (error) {
      this.problem = error.message;
    }
    this.asking = false;
    if (model === this.model) this.tell();
  }

  take({ next, ran, now, functions, workers, tasks }) {
    // Another scheduler counts anew.
    if (ran < this.ran) this.rows = [];
    const place = (one) => {
      if (!this.names.has(one)) this.names.set(one, this.names.size);
      return this.names.get(one);
    };
    const [ofFunction, lanes] = [functions.map(place), new Map(this.model.workers.map((worker, at) => [worker.name, at]))];
    const ofWorker = workers.map((worker) => lanes.get(worker) ?? -1);
    for (const row of tasks) {
      row[FUNCTION] = ofFunction[row[FUNCTION]];
      row[WORKER] = ofWorker[row[WORKER]];
      this.rows.push(row);
    }
    if (this.rows.length > KEPT) this.rows.splice(0, this.rows.length - KEPT);
    Object.assign(this, { next, ran, now });
  }

  show(seconds) {
    this.span = seconds;
    this.draw();
    this.tell();
  }

  pause() {
    this.paused = !this.paused;
    this.ask();
    this.tell();
  }

  tell() {
    for (const button of this.controls.querySelectorAll("[data-span]")) press(button, Number(button.dataset.span) === this.span);
    press(this.hold, this.paused);
    put(this.hold, this.paused ? "Go on" : "Pause");
    this.hold.disabled = !this.paused && !this.lives;
    if (this.model.state?.engine === "dask") return this.tellDask();
    const ever = this.ran > 0;
    this.stream.hidden = !ever;
    const most = this.most ?? 0;
    put(this.facts, [
      this.problem,
      ever ? `${this.ran.toLocaleString()} ran since the scheduler began` : this.problem ? "" : "none has run yet",
      most > 1 ? `so many that a mark stands for up to ${most.toLocaleString()}` : "",
      this.paused ? "paused" : "",
    ].filter(Boolean).join(" · "));
    if (!this.at) put(this.told, "A row is a worker, a mark a task that ran: point at it or move with the arrow keys; a click or Enter explains it.");
  }

  tellDask() {
    this.stream.hidden = true;
    const workers = this.model.dask?.workers ?? [];
    const sum = (key) => workers.reduce((sum, worker) => sum + (worker[key] ?? 0), 0);
    // Not all may tell: workers of other programs may join.
    const [tell, all] = [workers.filter((worker) => worker.sent_bytes != null).length, workers.length];
    const sent = tell ? `, ${bytes(sum("sent_bytes"))} sent to workers and clients${tell < all ? ` by ${tell} of ${all}` : ""}` : "";
    put(this.facts, [
      this.problem,
      this.model.dask ? `${sum("processing").toLocaleString()} at workers, ${sum("kept").toLocaleString()} results kept, ${sum("transfers").toLocaleString()} transfers between workers until now${sum("incoming_bytes") ? `, ${bytes(sum("incoming_bytes"))} on their way` : ""}${sent}` : "",
    ].filter(Boolean).join(" · "));
    return undefined;
  }

  get from() {
    return this.now - this.span * 1e6;
  }

  /** Draws what ran in the time that is shown: each pixel of a row is one number, so that many tasks cost no more than few. */
  draw() {
    const workers = this.model?.workers ?? [];
    const room = this.canvas.parentElement.clientWidth;
    if (!workers.length || !room || this.stream.hidden && !this.ran) return;
    this.stream.hidden = false;
    const { colour } = looks();
    const colours = Array.from({ length: COLOURS }, (_, at) => pixel(colour(`--line${at}`)));
    const bad = pixel(colour("--bad"));
    this.row = workers.length > 40 ? 7 : workers.length > 20 ? 10 : 15;
    this.width = Math.max(200, this.canvas.parentElement.clientWidth - LEFT - 4);
    const dots = window.devicePixelRatio || 1;
    const wide = Math.round(this.width * dots);
    Object.assign(this.pixels, { width: wide, height: workers.length });
    const paper = this.pixels.getContext("2d");
    const image = paper.createImageData(wide, workers.length);
    const dot = new Uint32Array(image.data.buffer);
    const { from, rows } = this;
    const scale = wide / (this.span * 1e6);
    const [shown, failed, used] = [[], [], new Set()];
    let most = 0;
    const paint = (row, look) => {
      const begin = Math.max(0, Math.floor((row[AT] - from) * scale));
      const end = Math.min(wide, Math.max(begin + 1, Math.floor((row[AT] + row[MICROS] - from) * scale)));
      dot.fill(look, row[WORKER] * wide + begin, row[WORKER] * wide + end);
    };
    // Many thousands of rows are gone through once.
    for (const row of rows) {
      if (row[AT] + row[MICROS] < from || row[AT] > this.now || row[WORKER] < 0) continue;
      shown.push(row);
      most = Math.max(most, row[STANDS_FOR]);
      if (row[FAILED]) {
        failed.push(row);
        continue;
      }
      const at = Math.min(row[FUNCTION], COLOURS - 1);
      used.add(at);
      paint(row, colours[at]);
    }
    Object.assign(this, { shown, failed, used, most });
    for (const row of failed) paint(row, bad);
    paper.putImageData(image, 0, 0);
    this.compose();
    this.names && this.key && this.keys(failed.length);
  }

  /** Shows what was painted, with the words around it and the chosen task: who points at tasks chooses many in a second. */
  compose() {
    const { workers } = this.model;
    if (!this.failed || !workers.length) return;
    const { colour } = looks();
    const dots = window.devicePixelRatio || 1;
    const high = workers.length * this.row;
    this.canvas.width = Math.round((LEFT + this.width) * dots);
    this.canvas.height = Math.round((high + BELOW) * dots);
    this.canvas.style.width = `${LEFT + this.width}px`;
    this.canvas.style.height = `${high + BELOW}px`;
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.scale(dots, dots);
    context.fillStyle = colour("--raised");
    context.fillRect(LEFT, 0, this.width, high);
    context.drawImage(this.pixels, LEFT, 0, this.width, high);
    context.fillStyle = colour("--card");
    for (let at = 1; at < workers.length; at += 1) context.fillRect(LEFT, at * this.row - 0.5, this.width, 1);
    this.words(context, workers, high, colour);
    // Not by their colour alone.
    context.fillStyle = colour("--text");
    context.textAlign = "center";
    for (const row of this.failed.slice(-MARKS)) context.fillText("✕", this.across(row[AT] + row[MICROS]), (row[WORKER] + 0.5) * this.row);
    if (this.at && this.shown.includes(this.at)) this.frame(context, colour);
  }

  across(at) {
    return LEFT + Math.min(Math.max((at - this.from) / (this.span * 1e6), 0), 1) * this.width;
  }

  words(context, workers, high, colour) {
    const each = Math.max(1, Math.ceil(12 / this.row));
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colour("--muted");
    workers.forEach((worker, at) => { if (at % each === 0) context.fillText(worker.name, 0, at * this.row + Math.max(6, this.row / 2), LEFT - 6); });
    const marks = this.width < 500 ? 2 : 4;
    for (let at = 0; at <= marks; at += 1) {
      context.textAlign = at === 0 ? "left" : at === marks ? "right" : "center";
      context.fillText(clock((this.from + (at / marks) * this.span * 1e6) / 1000), LEFT + (at / marks) * this.width, high + BELOW / 2 + 2);
    }
  }

  /** Marks the chosen task. */
  frame(context, colour) {
    const [begin, end] = [this.across(this.at[AT]), this.across(this.at[AT] + this.at[MICROS])];
    context.strokeStyle = colour("--text");
    context.lineWidth = 1.5;
    context.strokeRect(begin - 1, this.at[WORKER] * this.row + 0.5, Math.max(3, end - begin + 2), this.row - 1);
  }

  /** Which colour is which function. */
  keys(failed) {
    const words = [...this.names.keys()];
    const functions = [...this.used].sort((a, b) => a - b).map((at) => [`of${at}`, at === COLOURS - 1 && words.length > COLOURS ? "other functions" : words[at]]);
    const all = failed ? [...functions, ["bad", `✕ failed: ${failed.toLocaleString()}`]] : functions;
    const key = JSON.stringify(all);
    if (this.legend.dataset.key === key) return;
    this.legend.dataset.key = key;
    this.legend.replaceChildren(...all.map(([look, text]) => h("span", { class: `key ${look}` }, text)));
  }

  /** The task nearest to a pointer, in its row. */
  below(event) {
    if (!this.shown?.length) return null;
    const box = this.canvas.getBoundingClientRect();
    const lane = Math.min(this.model.workers.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / this.row)));
    return this.nearest(lane, this.from + ((event.clientX - box.left - LEFT) / this.width) * this.span * 1e6);
  }

  nearest(lane, time) {
    let [best, least] = [null, Infinity];
    for (const row of this.shown) {
      if (row[WORKER] !== lane) continue;
      const apart = Math.max(row[AT] - time, time - row[AT] - row[MICROS], 0);
      if (apart <= least) [best, least] = [row, apart];
    }
    return best;
  }

  press(event) {
    if (event.key === "Enter") return this.explain(this.at?.[ID]);
    const [dt, dl] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (dt === undefined || !this.shown?.length) return undefined;
    event.preventDefault();
    if (!this.at) return this.choose(this.shown.at(-1));
    const [, , lane, time] = this.at;
    if (dt) {
      const own = this.shown.filter((row) => row[WORKER] === lane).sort((a, b) => a[AT] - b[AT]);
      const next = own[own.indexOf(this.at) + dt];
      return next ? this.choose(next) : undefined;
    }
    const lanes = this.model.workers.length;
    for (let step = 1; step < lanes; step += 1) {
      const row = this.nearest((lane + dl * step + lanes * step) % lanes, time);
      if (row) return this.choose(row);
    }
    return undefined;
  }

  choose(row) {
    if (!row || row === this.at) return;
    this.at = row;
    this.compose();
    const functions = [...this.names.keys()];
    const words = [
      `${this.model.workers[row[WORKER]].name}: ${functions[row[FUNCTION]]} (${row[ID]})`,
      `${row[FAILED] ? "failed" : "began"} at ${clock(row[AT] / 1000)}`,
      `took ${duration(row[MICROS] / 1e6)}`,
      row[FETCHED] ? `${bytes(row[FETCHED])} came from peers` : "nothing came from peers",
      row[STANDS_FOR] > 1 ? `stands for ${row[STANDS_FOR].toLocaleString()} tasks` : "",
    ];
    put(this.told, words.filter(Boolean).join(" · "));
  }

  /** Shows why a task waits, or why it ran where it did. */
  async explain(task, reveals = false) {
    if (!task || !this.model) return;
    const { model } = this;
    this.asked = task;
    this.chosen(task);
    this.why.hidden = false;
    put(this.why, `${task}: asking the scheduler …`);
    let text;
    try {
      text = (await this.read(`tasks/${encodeURIComponent(task)}`)).why;
    } catch (error) {
      text = `${task}: ${error.message}`;
    }
    if (model !== this.model || task !== this.asked) return;
    put(this.why, text);
    // There is no place to go to before the cluster's state is known.
    this.reveals = reveals;
    this.update();
  }
}

/** A duration in words. */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}
