// Brings the picture of the machine to life: states, bars, traffic, and the lanes of a selection.

import { attribute, put } from "./dom.js";
import { bytes, h, rate } from "./model.js";

/** Most lanes that are drawn for their lack, so that a broken cluster stays readable. */
const MOST_LACKS = 80;

/** Letters of equal width for which there is room in a worker's second line. */
const LINE = 20;

export class Machine {
  constructor(place, select) {
    this.place = place;
    this.select = select;
    this.selected = null;
  }

  /** Shows the picture that the server has drawn. */
  mount(text) {
    const old = this.place.scrollLeft;
    this.svg = null;
    if (!text) {
      this.place.replaceChildren(h("p", { class: "muted" }, "There is no picture of this machine: the cluster was started by another version, or from a plan alone."));
      return;
    }
    const parsed = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    this.svg = document.importNode(parsed, true);
    const [, , width] = this.svg.getAttribute("viewBox").split(" ").map(Number);
    this.svg.style.setProperty("--natural", `${width}px`);
    this.svg.setAttribute("aria-label", "the machine with its workers");
    this.overlay = h("g", { class: "overlay" });
    this.svg.append(this.overlay);
    for (const part of this.svg.querySelectorAll("[tabindex]")) {
      part.setAttribute("aria-label", spoken(part));
      const choose = () => this.select(part.dataset.worker ?? part.dataset.device);
      part.addEventListener("click", choose);
      part.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          choose();
        }
      });
    }
    this.parts = new Map([...this.svg.querySelectorAll("[data-worker][tabindex]")].map((part) => [part.dataset.worker, part]));
    /** What the line below each worker's name is to say, if there is room. */
    this.wished = new Map();
    this.place.replaceChildren(this.svg);
    this.place.scrollLeft = old;
  }

  /** The part of a worker, if the picture has it. */
  find(name) {
    return this.parts.get(name);
  }

  update(model) {
    if (!this.svg) return;
    const written = model.workers.filter((worker) => this.worker(model, worker)).map((worker) => this.find(worker.name));
    // Beside a long name there is no room for more; the mark and the colour tell the same. All are measured after all
    // were written: in turns, the browser would lay out the picture anew for each.
    const tight = written.filter((part) => !fits(part, part.querySelector(".now")));
    for (const part of tight) put(part.querySelector(".now"), "");
    // What is not laid out has no size yet.
    for (const part of written) if (!part.querySelector(".strong").getComputedTextLength()) this.wished.delete(part.dataset.worker);
    for (const card of this.svg.querySelectorAll(".gpu")) this.gpu(model, card);
    this.wires(model);
    this.lanes(model);
    for (const part of this.svg.querySelectorAll("[tabindex]")) {
      part.classList.toggle("selected", (part.dataset.worker ?? part.dataset.device) === this.selected);
    }
  }

  /** Shows a worker; says whether there are other words beside its name than before. */
  worker(model, worker) {
    const part = this.find(worker.name);
    if (!part) return false;
    const { tone, mark, short, word } = model.standing(worker);
    tell(part, tone);
    put(part.querySelector(".mark"), mark);
    const figures = model.last.processes[worker.name];
    const tall = part.querySelector(".doing");
    const busy = figures?.cpus == null ? "" : `${figures.cpus.toFixed(1)} CPU`;
    const now = tall ? (tone === "good" ? busy : "") : tone === "good" ? "" : short;
    if (tall) {
      const tasks = model.tasks(worker.name);
      const queue = tasks ? `${tasks.in_flight + tasks.queued} tasks` : "";
      const words = [bytes(figures?.resident_bytes), queue].filter(Boolean).join(" · ");
      // A worker that does nothing has the line below its name for the reason. What it has in memory is a bar, too.
      put(tall, tone !== "good" ? short : words.length > LINE ? queue : words);
    }
    const limit = worker.memory_limit_bytes;
    gauge(part, limit ? (figures?.resident_bytes ?? 0) / limit : 0);
    const isNew = this.wished.get(worker.name) !== now;
    if (isNew) {
      this.wished.set(worker.name, now);
      put(part.querySelector(".now"), now);
    }
    attribute(part, "aria-label", `${spoken(part)}, ${word}`);
    return isNew && now !== "";
  }

  gpu(model, card) {
    const index = card.dataset.device.slice(3);
    const figures = gpuFigures(model, index);
    gauge(card, figures.total ? figures.used / figures.total : 0);
    const words = [];
    if (figures.busy != null) words.push(`${figures.busy} %`);
    if (figures.celsius != null) words.push(`${figures.celsius} °C`);
    put(card.querySelector(".now"), words.join(" "));
    card.classList.toggle("hot", figures.celsius >= 85);
    attribute(card, "aria-label", spoken(card));
  }

  /** Traffic as the width of wires: 2 pixels at rest, 8 at 100 GB/s. */
  wires(model) {
    const width = (moved) => 2.2 + (moved > 1e6 ? Math.min(6, 2 * Math.log10(moved / 1e8 + 1)) : 0);
    const nics = model.about?.machine?.nics ?? [];
    for (const wire of this.svg.querySelectorAll(".wire, .nvlink")) {
      const device = wire.dataset.device;
      let moved = [];
      if (device.startsWith("GPU")) {
        const gpu = model.last.gpus[device.slice(3)];
        moved = (wire.classList.contains("nvlink") ? gpu?.nvlink_bytes_per_s : gpu?.pcie_bytes_per_s) ?? [];
      } else if (device) {
        moved = model.last.nics[nics[device.slice(3)]?.name] ?? [];
      }
      const all = moved.reduce((sum, part) => sum + (part ?? 0), 0);
      wire.classList.toggle("moving", all > 1e6);
      for (const line of wire.querySelectorAll("line")) attribute(line, "stroke-width", String(width(all)));
    }
  }

  /** The lanes of the selected worker, and of all pairs that lack one. */
  lanes(model) {
    const lines = [];
    const at = (name) => {
      const part = this.find(name);
      if (!part) return null;
      const box = part.querySelector("rect").getBBox();
      return [box.x + box.width / 2, box.y + box.height / 2];
    };
    const draw = (a, b, kind, words) => {
      const [from, to] = [at(model.workers[a]?.name), at(model.workers[b]?.name)];
      if (!from || !to) return;
      const dip = Math.max(from[1], to[1]) + 26 + Math.abs(to[0] - from[0]) * 0.06;
      const path = h("path", { class: `lane ${kind}`, d: `M${from} C${from[0]} ${dip} ${to[0]} ${dip} ${to}` });
      path.append(h("title", {}, words));
      lines.push(path);
    };
    for (const [a, b, expected] of model.lanes.missing.slice(0, MOST_LACKS)) {
      if (a < b || !model.lackOf.has(`${b} ${a}`)) {
        draw(a, b, "bad", `${model.workers[a]?.name} and ${model.workers[b]?.name}: ${expected} expected, ${model.laneOf.get(`${a} ${b}`)} used`);
      }
    }
    const chosen = model.workers.findIndex((worker) => worker.name === this.selected);
    if (chosen >= 0) {
      model.workers.forEach((worker, other) => {
        const pair = model.pair(chosen, other);
        if (other !== chosen && pair.lanes && !pair.bad) {
          draw(chosen, other, "good", `${pair.from} to ${pair.to}: ${pair.lanes}${pair.rate ? `, ${pair.rate.toFixed(1)} GB/s` : ""}`);
        }
      });
    }
    const key = JSON.stringify([this.selected, lines.map((line) => line.outerHTML)]);
    if (key !== this.drawn) this.overlay.replaceChildren(...lines);
    this.drawn = key;
  }
}

/** Memory, use and temperature of a GPU: from the driver, or else the memory of its workers' pools. */
export function gpuFigures(model, index) {
  const told = model.last.gpus[index];
  const card = model.about?.machine?.gpus.find((gpu) => String(gpu.index) === String(index));
  const pools = model.workers.filter((worker) => String(worker.gpu?.index) === String(index) && worker.device_pool);
  const used = told?.used_bytes || pools.reduce((sum, worker) => sum + worker.device_pool.held_bytes, 0);
  return {
    used,
    total: told?.total_bytes ?? card?.memory_bytes,
    busy: told?.busy_percent,
    celsius: told?.celsius,
    watts: told?.watts,
    nvlink: told?.nvlink_bytes_per_s ?? [null, null],
    pcie: told?.pcie_bytes_per_s ?? [null, null],
    rate,
  };
}

/** What a part of the picture shows, for who hears it. */
function spoken(part) {
  return [...part.querySelectorAll("text")].map((text) => text.textContent).filter(Boolean).join(" ");
}

/** Whether the words at the right end of a part leave its name free. */
function fits(part, now) {
  const name = part.querySelector(".strong");
  const left = Number(name.getAttribute("x")) + name.getComputedTextLength();
  return left + 4 <= Number(now.getAttribute("x")) - now.getComputedTextLength();
}

function tell(part, tone) {
  for (const other of ["good", "warn", "bad", "off"]) part.classList.toggle(other, other === tone);
}

function gauge(part, share) {
  const [track, fill] = [part.querySelector(".track"), part.querySelector(".fill")];
  if (!track) return;
  const full = Number(track.getAttribute("width"));
  attribute(fill, "width", (full * Math.min(1, Math.max(0, share))).toFixed(1));
  fill.classList.toggle("full", share > 0.9);
}
