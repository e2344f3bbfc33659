// Each of many workers over time: a row of colour for each, and a curve for the one that is chosen.
// Up to eight workers have a line each in the charts.

import { looks, pixel } from "./charts.js";
import { bytes, clock, h } from "./model.js";

/** Fewest workers that are shown here. */
const LEAST = 9;
/** Room for the names, in pixels. */
const LEFT = 52;
const STEPS = 7;

const tasksOf = (figures, name) => {
  const tasks = figures.tasks?.workers.find((worker) => worker.name === name);
  return tasks ? tasks.in_flight + tasks.queued : null;
};

/** What can be shown: its name, how it is read from one reading, and as what. */
const KINDS = [
  ["CPUs in use", (figures, worker) => figures.processes[worker.name]?.cpus, (value) => `${value.toFixed(2)} CPUs`],
  ["Resident memory", (figures, worker) => figures.processes[worker.name]?.resident_bytes, bytes],
  ["Tasks waiting or running", (figures, worker) => tasksOf(figures, worker.name), (value) => `${value.toFixed(0)} tasks`],
  ["GPU use", (figures, worker) => figures.gpus[worker.gpu?.index]?.busy_percent, (value) => `${value} %`],
  ["GPU memory", (figures, worker) => figures.gpus[worker.gpu?.index]?.used_bytes, bytes],
];

export class Strips {
  constructor(card, select) {
    this.card = card;
    this.select = select;
    this.kind = 0;
    this.choice = h("select", { "aria-label": "What the rows show" });
    this.choice.addEventListener("change", () => { this.kind = Number(this.choice.value); this.key = null; this.update(this.model); });
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": "Each worker over time; arrow keys move, the line below says what is known, Enter shows a worker" });
    this.pixels = document.createElement("canvas");
    this.scale = h("p", { class: "legend" });
    this.told = h("p", { class: "pair", "aria-live": "polite" });
    this.plotted = h("div", { class: "chart" });
    card.replaceChildren(
      h("div", { class: "head" }, h("h2", { id: "strips-title" }, "Each worker"), this.choice),
      h("div", { class: "scroll" }, this.canvas), this.scale, this.told, this.plotted);
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.place(event)));
    this.canvas.addEventListener("click", (event) => { this.choose(this.place(event)); this.show(); });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.key = null; this.forget(); if (this.model) this.update(this.model); });
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  update(model) {
    if (this.model !== model) [this.at, this.key] = [null, null];
    this.model = model;
    const { workers, figures } = model;
    this.card.hidden = workers.length < LEAST || figures.length < 2;
    if (this.card.hidden) return;
    this.offer(model);
    const key = `${workers.length} ${figures.length} ${figures.at(-1).at} ${this.kind} ${this.card.clientWidth}`;
    if (key === this.key) return;
    this.key = key;
    const [, of] = KINDS[this.kind];
    this.values = workers.map((worker) => figures.map((one) => of(one, worker) ?? null));
    this.most = Math.max(...this.values.flat().filter((value) => value != null), 0);
    this.draw(workers, figures);
    this.say();
  }

  /** The kinds of which anything is known. */
  offer(model) {
    const known = KINDS.map(([name, of], at) => [name, at, model.workers.some((worker) => of(model.last, worker) != null)]).filter(([, at, known]) => known || at === this.kind);
    const key = known.map(([name]) => name).join();
    if (this.choice.dataset.key === key) return;
    this.choice.dataset.key = key;
    this.choice.replaceChildren(...known.map(([name, at]) => h("option", { value: at, selected: at === this.kind }, name)));
  }

  draw(workers, figures) {
    const { colour } = looks();
    const colours = Array.from({ length: STEPS }, (_, at) => pixel(colour(`--s${at}`)));
    this.row = workers.length > 40 ? 7 : workers.length > 20 ? 10 : 15;
    this.width = Math.max(240, this.canvas.parentElement.clientWidth - LEFT - 4);
    const dots = window.devicePixelRatio || 1;
    const height = workers.length * this.row;
    this.canvas.width = Math.round((LEFT + this.width) * dots);
    this.canvas.height = Math.round(height * dots);
    // The page's policy forbids style attributes, not the script's own.
    this.canvas.style.width = `${LEFT + this.width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(dots, dots);
    const each = Math.max(1, Math.ceil(12 / this.row));
    context.font = "10px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colour("--muted");
    workers.forEach((worker, a) => { if (a % each === 0) context.fillText(worker.name, 0, a * this.row + Math.max(6, this.row / 2), LEFT - 6); });
    // A pixel for each value, drawn larger: thousands of rectangles would take long.
    const [across, down] = [figures.length, workers.length];
    Object.assign(this.pixels, { width: across, height: down });
    const paper = this.pixels.getContext("2d");
    const image = paper.createImageData(across, down);
    const dot = new Uint32Array(image.data.buffer);
    this.values.forEach((row, a) => row.forEach((value, t) => { if (value != null) dot[a * across + t] = colours[this.level(value)]; }));
    paper.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.pixels, LEFT, 0, this.width, height);
    context.fillStyle = colour("--card");
    for (let a = 0; a <= down; a += 1) context.fillRect(LEFT, a * this.row - 0.5, this.width, 1);
    if (this.at) {
      context.strokeStyle = colour("--text");
      context.strokeRect(LEFT + 0.5, this.at[0] * this.row + 0.5, this.width - 1, this.row - 1);
    }
    const [, , format] = KINDS[this.kind];
    this.scale.replaceChildren(
      h("span", {}, `${clock(figures[0].at)} to ${clock(figures.at(-1).at)}:`),
      ...Array.from({ length: STEPS }, (_, at) => h("span", { class: `key step${at}` }, at === 0 ? format(0) : at === STEPS - 1 ? format(this.most) : "")));
  }

  level(value) {
    return this.most > 0 ? Math.min(STEPS - 1, Math.floor((value / this.most) * STEPS)) : 0;
  }

  /** The worker and the reading below a pointer. */
  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const within = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value)));
    const { workers, figures } = this.model;
    return [within((event.clientY - box.top) / this.row, workers.length), within(((event.clientX - box.left - LEFT) / this.width) * figures.length, figures.length)];
  }

  press(event) {
    if (event.key === "Enter") return this.show();
    const [dt, da] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (dt === undefined) return undefined;
    event.preventDefault();
    const { workers, figures } = this.model;
    const [a, t] = this.at ?? [0, figures.length - 1];
    const around = (value, most) => (value + most) % most;
    return this.choose(this.at ? [around(a + da, workers.length), around(t + dt, figures.length)] : [a, t]);
  }

  choose(at) {
    if (!this.values) return;
    this.at = at;
    this.draw(this.model.workers, this.model.figures);
    this.say();
  }

  show() {
    const worker = this.at && this.model.workers[this.at[0]];
    if (worker) this.select(worker.name);
  }

  say() {
    const [a, t] = this.at ?? [];
    const worker = this.model.workers[a];
    if (!worker) {
      this.told.textContent = "A row is a worker: point at it or move with the arrow keys, and its curve is drawn.";
      return;
    }
    const [, , format] = KINDS[this.kind];
    const value = this.values[a][Math.min(t, this.values[a].length - 1)];
    const when = this.model.figures[Math.min(t, this.model.figures.length - 1)].at;
    this.told.textContent = `${worker.name} at ${clock(when)}: ${value == null ? "not known" : format(value)}`;
    this.curve(worker.name, this.values[a]);
  }

  /** The chosen worker's curve, beside the middle and the most of all. */
  curve(name, own) {
    const across = (pick) => own.map((_, t) => pick(this.values.map((row) => row[t]).filter((value) => value != null).sort((a, b) => a - b)) ?? null);
    const data = [this.model.figures.map((one) => one.at / 1000), own, across((all) => all[Math.floor(all.length / 2)]), across((all) => all.at(-1))];
    const key = `${name} ${this.kind} ${this.plotted.clientWidth}`;
    if (this.plot && this.drawn === key) return void this.plot.setData(data);
    this.forget();
    this.drawn = key;
    const { colour, axis } = looks();
    const [, , format] = KINDS[this.kind];
    const line = (label, stroke, width, dash) => ({ label, stroke: colour(stroke), width, dash, points: { show: false }, value: (_, value) => (value == null ? "–" : format(value)) });
    this.plot = new uPlot({
      width: Math.max(200, this.plotted.clientWidth), height: 130, legend: { live: false },
      cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, (high ?? 0) * 1.1 || 1] } },
      axes: [{ ...axis, size: 28, space: 80, values: (_, times) => times.map((at) => clock(at * 1000)) }, { ...axis, size: 72, values: (_, values) => values.map(format) }],
      series: [{ label: "At" }, line(name, "--line0", 2), line("middle of all", "--line7", 1.2, [5, 4]), line("most of all", "--line6", 1.2, [2, 3])],
    }, data, this.plotted);
    return undefined;
  }
}
