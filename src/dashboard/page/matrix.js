// The matrix of pairs as a heat map: rows send, columns receive.

import { press, put } from "./dom.js";
import { bytes, clock, dayAndClock, h, rate } from "./model.js";

/** The upper ends of the steps of colour, in GB/s, or in the unit of what the history has. */
const STEPS = [1, 3, 8, 20, 60, 200];

export class Matrix {
  /** `told` is given what is known of a pair, and `chosen` is told when other figures are to be shown. */
  constructor(place, told, chosen) {
    this.place = place;
    this.told = told;
    this.at = null;
    const button = (value, words) => h("button", { value, onclick: () => { this.model.chosen = value; this.update(this.model); chosen(); } }, words);
    this.choice = h("div", { class: "choice", role: "group", "aria-label": "Figures of pairs", hidden: true }, button("measured", "measured"), button("now", "of tasks now"), button("past", "history"));
    place.before(this.choice);
  }

  update(model) {
    const count = model.workers.length;
    const names = model.workers.map((worker) => worker.name).join(" ");
    const room = this.place.clientWidth;
    // Thousands of pairs take long, and most news are of something else.
    const known = [names, room, model, model.state, model.lanes, model.measured, model.verification, model.last.tasks, model.end, model.chosen, model.flows, this.at];
    if (known.every((one, at) => one === this.known?.[at])) return;
    if (this.names !== names || this.room !== room) this.build(model, count);
    Object.assign(this, { names, room, known });
    this.choices(model);
    const kinds = new Set();
    const past = model.shows === "past" ? model.flows : null;
    for (const [key, cell] of this.cells ?? []) {
      const pair = model.pair(cell.a, cell.b);
      const value = past ? pair.moved && pair.moved.mean_bytes_per_s / past.unit[1] : pair.rate;
      const [bad, stale] = [pair.bad && !past, pair.stale && !past];
      const kind = bad ? "bad" : stale ? "stale" : value != null ? `step${step(value)}` : past || pair.lanes ? "lane" : "none";
      kinds.add(kind);
      const name = `cell ${kind}${this.at === key ? " at" : ""}`;
      if (cell.name !== name) cell.rect.setAttribute("class", name);
      cell.name = name;
      if (cell.text) {
        const words = bad ? "!" : value != null ? figure(value) : "";
        put(cell.text, words);
      }
    }
    this.explain(past);
    this.legend?.classList.toggle("unmeasured", ![...kinds].some((kind) => kind.startsWith("step")));
    for (const kind of ["lane", "stale"]) this.legend?.classList.toggle(`no-${kind}`, !kinds.has(kind));
    if (this.at) this.say(model);
    this.model = model;
  }

  /** Says which figures the colours stand for. */
  explain(past) {
    if (!this.legend) return;
    this.legend.classList.toggle("past", Boolean(past));
    const period = past ? `means ${within(past)},` : "";
    const words = { ".period": period, ".unit": `${past ? past.unit[0] : "GB/s"},`, ".lane": past ? "nothing was moved" : "not measured" };
    for (const [part, text] of Object.entries(words)) {
      const element = this.legend.querySelector(part);
      put(element, text);
      if (part === ".period") element.hidden = !text;
    }
  }

  /** Offers the choice of figures where there are several. */
  choices(model) {
    const has = { measured: model.measured, now: model.last.tasks?.links.length || !model.measured, past: model.flows?.pairs.length || model.shows === "past" };
    const words = { measured: has.measured && `measured at ${clock(model.verification.at)}`, past: has.past && `history: ${model.flows.name}` };
    for (const button of this.choice.children) {
      button.hidden = !has[button.value];
      press(button, button.value === model.shows);
      const text = words[button.value];
      if (text) put(button, text);
    }
    this.choice.hidden = [...this.choice.children].filter((button) => !button.hidden).length < 2;
  }

  build(model, count) {
    this.cells = new Map();
    if (count < 2) {
      this.place.replaceChildren(h("p", { class: "muted" }, "One worker has no pairs."));
      return;
    }
    const named = count <= 20;
    const left = named ? 46 : 8;
    const room = Math.max(260, this.place.clientWidth - left - 8);
    const size = Math.max(6, Math.min(44, Math.floor(room / count)));
    // Names that stand upright need as much room above as they have on the left.
    // Names in a row need room beside each other.
    const longest = Math.max(...model.workers.map((worker) => worker.name.length));
    const upright = size > 34 && longest * 6.8 + 6 < size;
    const top = named && upright ? 24 : left;
    const svg = h("svg", {
      class: "matrix", width: left + size * count + (upright ? 4 : longest * 4), height: top + size * count + 4, tabindex: 0,
      role: "application", "aria-label": "Bandwidth of each pair; arrow keys move, the line below says what is known",
    });
    if (named) svg.append(h("text", { x: 2, y: top - 8 }, "from\\to"));
    // Thousands of cells: each is a copy, and one listener hears for all.
    const gap = size > 12 ? 1.5 : 0.5;
    const blank = h("rect", { width: size - gap, height: size - gap, rx: size > 12 ? 3 : 1 });
    const keys = new Map();
    model.workers.forEach((worker, a) => {
      if (named) {
        svg.append(h("text", { x: left - 5, y: top + a * size + size / 2 + 4, "text-anchor": "end" }, worker.name));
        const x = left + a * size + size / 2;
        svg.append(h("text", { x, y: top - 8, "text-anchor": upright ? "middle" : "start", transform: upright ? null : `rotate(-60 ${x} ${top - 8})` }, worker.name));
      }
      model.workers.forEach((_, b) => {
        if (a === b) return;
        const [x, y] = [left + b * size, top + a * size];
        const rect = blank.cloneNode();
        rect.setAttribute("x", x + gap / 2);
        rect.setAttribute("y", y + gap / 2);
        const text = size >= 24 ? h("text", { x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle", class: "value" }) : null;
        svg.append(rect, ...(text ? [text] : []));
        const key = `${a} ${b}`;
        keys.set(rect, key);
        this.cells.set(key, { a, b, rect, text });
      });
    });
    for (const kind of ["click", "pointerover"]) {
      svg.addEventListener(kind, (event) => { if (keys.has(event.target)) this.choose(keys.get(event.target)); });
    }
    svg.addEventListener("keydown", (event) => {
      const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
      if (dx === undefined) return;
      event.preventDefault();
      let [a, b] = (this.at ?? "0 0").split(" ").map(Number);
      do [a, b] = [(a + dy + count) % count, (b + dx + count) % count]; while (a === b);
      this.choose(`${a} ${b}`);
    });
    const labels = STEPS.map((most, at) => (at ? `${STEPS[at - 1]}–${most}` : `< ${most}`)).concat(`> ${STEPS.at(-1)}`);
    this.legend = h("p", { class: "legend" }, h("span", { class: "period", hidden: true }), h("span", { class: "unit" }, "GB/s,"), "rows send:", labels.map((label, at) => h("span", { class: `key step${at}` }, label)), h("span", { class: "key bad" }, "! not as planned"), h("span", { class: "key lane" }, "not measured"), h("span", { class: "key stale" }, "measured before one of them ended or stopped answering"));
    this.place.replaceChildren(svg, this.legend);
  }

  choose(key) {
    this.at = key;
    if (this.model) this.update(this.model);
  }

  say(model) {
    const pair = model.pair(...this.at.split(" ").map(Number));
    if (!pair.from || !pair.to) return;
    const words = [`${pair.from} → ${pair.to}: ${pair.lanes ?? "no connection"}`];
    if (pair.lacks) words.push(`${pair.lacks} expected`);
    for (const row of pair.rows) {
      const latency = row.latency_us == null ? "" : `, ${row.latency_us.toFixed(1)} µs one way`;
      words.push(`${row.memory} memory ${row.gb_per_s == null ? "not measured" : `${figure(row.gb_per_s)} GB/s`}${latency}: ${row.verdict}`);
    }
    for (const row of pair.before) {
      if (row.gb_per_s != null) words.push(`${row.memory} memory ${figure(row.gb_per_s)} GB/s at ${clock(model.verification.at)}, out of date`);
    }
    if (pair.moved) {
      const { mean_bytes_per_s: mean, highest_bytes_per_s: highest } = pair.moved;
      words.push(`${rate(mean)} mean, ${rate(highest)} highest, ${bytes(pair.moved.bytes)} ${within(model.flows)}`);
    }
    if (pair.seen) words.push(`${pair.seen.transfers} transfers, median ${figure(pair.seen.quartiles[1] / 1e9)} GB/s`);
    this.told(words.join("; "));
  }
}

/** The part of the time that flows are of. */
function within({ since, until }) {
  const isOneDay = new Date(since).toDateString() === new Date(until).toDateString();
  return `from ${dayAndClock(since)} to ${isOneDay ? clock(until) : dayAndClock(until)}`;
}

function step(rate) {
  const at = STEPS.findIndex((most) => rate < most);
  return at < 0 ? STEPS.length : at;
}

function figure(rate) {
  return rate >= 10 ? rate.toFixed(0) : rate >= 1 ? rate.toFixed(1) : rate.toFixed(2);
}
