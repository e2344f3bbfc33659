// What is known of a selected worker, GPU or NIC.

import { bytes, clock, h, rate, sentence } from "./model.js";
import { cursor } from "./log_view.js";
import { gpuFigures } from "./machine.js";
import { profile } from "./profile.js";

/** Most lines and characters of a log that are kept on the page. */
const LOG_LINES = 1000;
const LOG_LENGTH = 512 * 1024;
const FOLLOW_MS = 1000;
/** Answers for new lines at a time; of more, the newest are shown alone. */
const FOLLOWED = 4;

export class Details {
  constructor(place, actions) {
    this.place = place;
    this.actions = actions;
    this.open = new Set(["Why", "Log"]);
    document.addEventListener("visibilitychange", () => this.follow());
    setInterval(() => this.follow(), FOLLOW_MS);
  }

  /** Shows something else; `name` is a worker, `GPU3`, `NIC0` or null. */
  show(model, name) {
    this.name = name;
    this.facts = null;
    this.log = null;
    this.place.hidden = !name;
    if (!name) return;
    const process = model.process(name);
    this.title = h("h2", { id: "details-title", tabindex: -1 }, name);
    this.list = h("dl");
    const close = h("button", { class: "quiet", "aria-label": "Close", onclick: () => this.actions.select(null) }, "✕");
    const buttons = h("div", { class: "buttons" });
    if (process) buttons.append(h("button", { class: "live danger", onclick: () => this.actions.restart(name) }, "Restart"));
    this.place.replaceChildren(h("div", { class: "head" }, this.title, buttons, close), this.list);
    const planned = model.planned(name) ?? (process && !process.host ? model.about?.plan.scheduler : null);
    if (planned) {
      this.section("Why", this.why(planned.why ?? []));
      const variables = Object.entries(planned.env ?? {});
      this.section("Environment", h("dl", { class: "mono" }, variables.map(([key, value]) => [h("dt", {}, key), h("dd", {}, value)])), `${variables.length}`);
    }
    if (process) {
      const log = h("pre", { class: "log", tabindex: 0, "aria-label": `log of ${name}` });
      this.section("Log", log);
      this.log = { name, place: log, after: null, length: 0, unfinished: [], asking: false };
      this.follow();
      this.section("Profile", profile(() => this.actions.profile(name)));
      const ends = h("div");
      this.section("Restarts and crashes", ends);
      this.ends = ends;
      this.crashes(model, name);
    }
    this.update(model);
  }

  section(title, content, count) {
    const box = h("details", { open: this.open.has(title) }, h("summary", {}, title, count ? h("span", { class: "muted" }, ` ${count}`) : null), content);
    box.addEventListener("toggle", () => (box.open ? this.open.add(title) : this.open.delete(title)));
    this.place.append(box);
  }

  why(reasons) {
    return h("ul", { class: "why" }, reasons.map(({ choice, chosen, reason, rejected }) => h("li", {},
      h("strong", {}, choice), " ", h("code", {}, chosen), h("br"), reason,
      rejected.length ? h("ul", {}, rejected.map(({ what, why }) => h("li", { class: "muted" }, h("code", {}, what), `: ${why}`))) : null)));
  }

  /** Asks for the end of the log, or what is new of it, as the view of all logs does. */
  async follow() {
    const { log } = this;
    if (!log || log.asking || document.hidden) return;
    log.asking = true;
    try {
      for (let pages = 0; pages < FOLLOWED; pages += 1) {
        const begins = log.after === null;
        const told = await this.actions.read(`log?${new URLSearchParams({ process: log.name, ...(begins ? {} : { after: log.after }) })}`);
        if (log !== this.log) return;
        log.after = cursor(told.bottom) || log.after || "";
        this.add(log, told, begins);
        if (begins || told.done) return;
      }
      // Faster than anyone can read.
      log.after = null;
      log.skips = true;
    } catch {
      // It is asked again.
    } finally {
      log.asking = false;
    }
  }

  /** Shows lines. What is there already stays, and with it a selection. */
  add(log, told, begins) {
    const { place } = log;
    const line = ({ at, text, more }) => h("span", {}, `${clock(at)}${at.slice(19, 23)}  ${text}${more ? `… (${more} more bytes)` : ""}\n`);
    const unfinished = JSON.stringify(told.unfinished);
    if (!begins && !told.lines.length && unfinished === log.key) return;
    log.key = unfinished;
    const atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 4;
    for (const one of log.unfinished) one.remove();
    if (begins) {
      place.replaceChildren();
      log.length = 0;
    }
    const lines = told.lines.map(line);
    if (log.skips) lines.unshift(h("span", { class: "muted" }, "[lines before these were too many to be shown]\n"));
    log.skips = false;
    log.length += lines.reduce((sum, one) => sum + one.textContent.length, 0);
    log.unfinished = told.unfinished.map(line);
    place.append(...lines, ...log.unfinished);
    // Somebody who reads or has selected something keeps it for as long as there is room for twice as much.
    const room = atEnd && getSelection().isCollapsed ? 1 : 2;
    while (place.childElementCount > LOG_LINES * room || log.length > LOG_LENGTH * room) {
      log.length -= place.firstElementChild.textContent.length;
      place.firstElementChild.remove();
    }
    if (atEnd) place.scrollTop = place.scrollHeight;
  }

  async crashes(model, name) {
    const all = await this.actions.read("crashes").catch(() => ({}));
    this.bundles = Object.entries(all).filter(([bundle]) => bundle.replace(/^\d+-/, "") === name);
    this.facts = null;
    if (this.name === name) this.update(model);
  }

  update(model) {
    if (!this.name) return;
    const facts = this.name.startsWith("GPU") ? this.gpu(model) : this.name.startsWith("NIC") ? this.nic(model) : this.process(model);
    const key = JSON.stringify(facts);
    if (key !== this.facts) {
      this.facts = key;
      this.list.replaceChildren(...facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
      if (this.ends) this.restarts(model);
    }
  }

  process(model) {
    const process = model.process(this.name);
    if (!process) return [["State", "not in this cluster"]];
    const figures = model.last.processes[this.name] ?? {};
    const planned = model.planned(this.name);
    const [dask, tasks] = [model.ofDask(this.name), model.tasks(this.name)];
    const pool = process.device_pool;
    const { word, why } = model.standing(process);
    const lanes = new Set();
    const at = model.workers.findIndex((worker) => worker.name === this.name);
    let lacks = 0;
    model.workers.forEach((_, other) => {
      const pair = model.pair(at, other);
      if (pair.lanes) lanes.add(pair.lanes);
      if (pair.bad) lacks += 1;
    });
    return [
      ["State", word + (process.step && process.state !== "ready" ? `: ${process.step}` : "")],
      ["Process", process.pid ?? "none"],
      ["Program", process.program],
      ["Brings up the workers of", process.host],
      ["GPU", planned?.gpu ? `${planned.gpu.index}${planned.gpu.pci ? ` at ${planned.gpu.pci}` : ""}` : null],
      ["CPUs", `${process.cpus ?? "any"}${figures.cpus != null ? `, ${figures.cpus.toFixed(2)} in use` : ""}`],
      ["Memory nodes", process.mems],
      ["Memory", `${bytes(figures.resident_bytes)}${process.memory_limit_bytes ? ` of ${bytes(process.memory_limit_bytes)}` : ""}`],
      ["Device pool", pool ? `${bytes(pool.used_bytes)} of ${bytes(pool.held_bytes)} in ${pool.slabs} slabs` : null],
      ["Tasks", dask ? `${dask.processing} at the worker, ${dask.kept} results kept` : tasks ? `${tasks.in_flight} in flight, ${tasks.queued} queued, ${tasks.finished} finished` : null],
      ["Transfers", dask ? `${dask.transfers} from other workers${dask.incoming_bytes ? `, ${bytes(dask.incoming_bytes)} on their way` : ""}${dask.sent_bytes == null ? "" : `; ${bytes(dask.sent_bytes)} sent to workers and clients`}` : null],
      ["NICs", planned?.nics.join(", ")],
      ["Missing ports", process.missing_ports?.map(({ port, why }) => `${port}: ${why}`).join("; ")],
      ["Lanes", [...lanes].join("; ")],
      ["Not as planned", lacks ? `${lacks} connections` : null],
      ["Restarts", String(process.restarts)],
      ["Last end", process.last_exit ? `${process.last_exit.reason} at ${clock(process.last_exit.at)}` : why],
      ["Held by", process.containment],
      ["UCX", process.ucx],
    ];
  }

  restarts(model) {
    const records = model.records.filter((record) => record.process === this.name && ["exited", "restarting", "failed", "killed", "ready"].includes(record.event));
    const bundles = (this.bundles ?? []).map(([name, crash]) => h("details", {}, h("summary", {}, `crash bundle ${name}`), h("pre", { class: "log" }, JSON.stringify(crash, null, 1))));
    this.ends.replaceChildren(
      h("ol", { class: "plain" }, records.slice(-20).map((record) => h("li", {}, h("time", {}, clock(record.at)), " ", sentence(record)))),
      ...bundles);
  }

  gpu(model) {
    const index = this.name.slice(3);
    const card = model.about?.machine?.gpus.find((gpu) => String(gpu.index) === index) ?? {};
    const figures = gpuFigures(model, index);
    const both = ([sent, received]) => (sent == null && received == null ? null : `${rate(sent)} sent, ${rate(received)} received`);
    const workers = model.about?.plan.workers.filter((worker) => String(worker.gpu?.index) === index) ?? [];
    return [
      ["Model", card.name],
      ["PCI", card.pci],
      ["UUID", card.uuid],
      ["NUMA node", card.numa],
      ["Memory", figures.total ? `${bytes(figures.used)} of ${bytes(figures.total)}` : null],
      ["Use", figures.busy == null ? "not told by a driver" : `${figures.busy} %`],
      ["Temperature", figures.celsius == null ? null : `${figures.celsius} °C`],
      ["Power", figures.watts == null ? null : `${Math.round(figures.watts)} W`],
      ["NVLink", both(figures.nvlink) ?? (card.nvlinks?.length ? `${card.nvlinks.filter((link) => link.active).length} links` : null)],
      ["PCIe", both(figures.pcie)],
      ["Workers", workers.map((worker) => worker.name).join(", ") || "none"],
      ["Preflight", found(model, this.name)],
    ];
  }

  nic(model) {
    const nic = model.about?.machine?.nics[Number(this.name.slice(3))] ?? {};
    const moved = model.last.nics[nic.name];
    const users = model.about?.plan.workers.filter((worker) => worker.nics.some((port) => port.split(":")[0] === nic.name)) ?? [];
    return [
      ["Name", nic.name],
      ["PCI", nic.pci],
      ...(nic.dma ? [["DMA function", nic.dma.pci ?? "unknown"]] : []),
      ["NUMA node", nic.numa],
      ["Ports", nic.ports?.map((port) => [`${port.port}: ${port.state ?? "state unknown"}`, port.link_layer, port.rate_gbps ? `${port.rate_gbps} Gbit/s` : null, port.netdev].filter(Boolean).join(", ")).join("; ")],
      ["Traffic", moved ? `${rate(moved[0])} sent, ${rate(moved[1])} received` : "not counted here"],
      ["Workers", users.map((worker) => worker.name).join(", ") || "none"],
    ];
  }
}

/** What preflight found about a GPU, if it is not well. */
function found(model, name) {
  const bad = model.about?.preflight?.filter((one) => one.about === name && ["error", "warning"].includes(one.severity)) ?? [];
  return bad.map((one) => one.text).join("; ");
}
