// All clusters of this user, the hosts that have joined them, and this machine's GPUs and NICs with who holds them.

import { write } from "./address.js";
import { STANDINGS, bytes, clock, dayAndClock, h, span } from "./model.js";

const TONES = { ready: ["good", "●", "READY"], degraded: ["bad", "✕", "degraded"], failed: ["bad", "✕", "failed"], recovering: ["bad", "↻", "recovering"], unresponsive: ["bad", "!", "not answering"], stopped: ["off", "■", "ended"] };

const CLUSTERS = [
  ["Cluster", (one) => h("a", { href: write({ cluster: one.name }) }, one.name)],
  ["State", (one) => standing(one).slice(1).join(" "), "short"],
  ["Engine", (one) => [one.engine, one.simulated ? "simulated" : null].filter(Boolean).join(", ") || "–", "wide"],
  ["Since", since, "wide"],
  ["Workers READY", (one) => (one.state ? `${one.ready} of ${one.workers}` : "–"), "short"],
  ["GPUs", (one) => (one.state ? one.gpus : "–"), "number wide"],
  ["Cause", (one) => one.cause ?? "", "text"],
];

const HOSTS = [
  ["Host", ({ host }) => host.name],
  ["State", ({ host }) => [host.ready ? `● ${host.ready} READY` : null, host.lost ? `✕ ${host.lost} lost` : null, host.left ? `■ ${host.left} left` : null].filter(Boolean).join(", ") || "–"],
  ["Over ssh", ({ cluster, host }) => (host.process ? [h("a", { href: write({ cluster, worker: host.process.name }) }, host.process.name), ` ${reached(host).slice(1).join(" ")}${host.process.why ? `: ${host.process.why}` : ""}`] : "–"), "text"],
  ["Cluster", ({ cluster }) => h("a", { href: write({ cluster }) }, cluster)],
  ["GPUs", ({ host }) => host.gpus || "–", "number"],
  ["Since", ({ host }) => (host.since ? clock(host.since) : "–")],
];

const GPUS = [
  ["GPU", (gpu) => `GPU${gpu.index}`],
  ["Held by", holders],
  ["Memory", ({ gauges }) => (gauges?.total_bytes ? `${bytes(gauges.used_bytes)} of ${bytes(gauges.total_bytes)}` : "–")],
  ["Use", ({ gauges }) => (gauges?.busy_percent == null ? "–" : `${gauges.busy_percent} %`), "number short"],
  ["Temperature", ({ gauges }) => (gauges?.celsius == null ? "–" : `${gauges.celsius} °C`), "number wide"],
  ["Power", ({ gauges }) => (gauges?.watts == null ? "–" : `${Math.round(gauges.watts)} W`), "number wide"],
  ["Model", (gpu) => gpu.name ?? "–", "wide"],
  ["PCI", (gpu) => gpu.pci ?? "–", "wide"],
];

const NICS = [
  ["NIC", (nic) => nic.name],
  ["Used by", (nic) => workers(nic.workers) ?? "nobody"],
  ["Ports", (nic) => nic.ports.join("; ") || "–", "text"],
];

export class Overview {
  /** `say` is told what keeps all of it from being shown. */
  constructor(place, say) {
    [this.place, this.say] = [place, say];
    this.shown = false;
  }

  show() {
    this.shown = true;
    this.place.hidden = false;
  }

  hide() {
    this.shown = false;
    this.place.hidden = true;
  }

  draw({ clusters, unreadable, machine }) {
    this.say(unreadable.join("\n"));
    const running = clusters.filter((one) => one.is_running).length;
    const ended = clusters.length - running;
    const hosts = clusters.flatMap((one) => one.hosts.map((host) => ({ cluster: one.name, host, tone: tone(host) })));
    const gpus = machine.gpus ?? [];
    const held = gpus.filter((gpu) => gpu.workers.length || gpu.others.length).length;
    this.part("Clusters", [`${running} running`, ended ? `${ended} ended` : null], CLUSTERS, clusters.map((one) => [standing(one)[0], one]), "no cluster is running; start one: cuda-cluster up");
    if (hosts.length) this.part("Hosts of these clusters", [], HOSTS, hosts.map((one) => [one.tone, one]));
    else this.drop("Hosts of these clusters");
    this.part("GPUs of this machine", [machine.name, machine.driver ? `driver ${machine.driver}` : null, gpus.length ? `${held} of ${gpus.length} held` : null], GPUS, gpus.map((gpu) => [gpu.unseen ? "warn" : "", gpu]), machine.unseen ?? "there are none");
    this.part("NICs of this machine", [], NICS, (machine.nics ?? []).map((nic) => ["", nic]), machine.unseen ?? "there are none");
  }

  /** A table; it is drawn anew only if it says something else, so that a selection and the focus stay. */
  part(title, facts, columns, rows, none) {
    const id = title.split(" ")[0].toLowerCase();
    let part = this.place.querySelector(`[data-part="${id}"]`);
    if (!part) {
      part = h("div", { "data-part": id, class: "part" }, h("div", { class: "head" }, h("h2", {}, title), h("p", { class: "muted" })), h("div", { class: "scroll" }));
      // In the order of the calls.
      const order = ["clusters", "hosts", "gpus", "nics"];
      const after = [...this.place.querySelectorAll("[data-part]")].find((other) => order.indexOf(other.dataset.part) > order.indexOf(id));
      this.place.insertBefore(part, after ?? null);
    }
    part.querySelector("p").textContent = facts.filter(Boolean).join(" · ");
    const cells = rows.map(([, row]) => columns.map(([, cell, kind], at) => h(at ? "td" : "th", { scope: at ? null : "row", class: kind }, cell(row))));
    const body = cells.length
      ? h("table", {}, h("thead", {}, h("tr", {}, columns.map(([heading, , kind]) => h("th", { scope: "col", class: kind }, heading)))), h("tbody", {}, cells.map((row, at) => h("tr", { class: rows[at][0] || null }, row))))
      : h("p", { class: "muted" }, none);
    const place = part.lastElementChild;
    if (place.firstElementChild?.outerHTML !== body.outerHTML) place.replaceChildren(body);
  }

  drop(title) {
    this.place.querySelector(`[data-part="${title.split(" ")[0].toLowerCase()}"]`)?.remove();
  }
}

/** The tone, mark and word of a cluster. */
function standing(one) {
  if (!one.is_running) return one.state === "failed" ? ["bad", "✕", "failed"] : ["off", "■", "ended"];
  if (!one.state) return ["bad", "!", "not answering"];
  return TONES[one.state] ?? ["warn", "◐", one.state];
}

/** The tone, mark and word of the process that brings up a host's workers. */
function reached(host) {
  return STANDINGS[host.process.state] ?? ["warn", "?", host.process.state];
}

function tone(host) {
  if (host.process && host.process.state !== "ready") return reached(host)[0];
  return host.lost ? "bad" : host.ready ? "good" : "off";
}

function since(one) {
  if (one.ended_at) return `ended ${moment(one.ended_at)}`;
  if (!one.started_at) return "–";
  return one.is_running ? `${moment(one.started_at)}, for ${span(Date.now() - Date.parse(one.started_at))}` : moment(one.started_at);
}

/** A time, with its day unless that is today. */
function moment(at) {
  const [day, today] = [new Date(at).toDateString(), new Date().toDateString()];
  return day === today ? clock(at) : dayAndClock(at);
}

/** Links to workers; those of a cluster come together. */
function workers(all) {
  if (!all.length) return null;
  return all.map(({ cluster, worker }, at) => [at ? ", " : "", h("a", { href: write({ cluster, worker }) }, `${cluster}/${worker}`)]);
}

function holders(gpu) {
  const others = gpu.others.map(({ pid, name, user, bytes: held }) => {
    const who = pid ? `process ${pid}${name ? ` ${name}` : ""}` : "a process of another container";
    return [who, user ? `of ${user}` : null, held ? `with ${bytes(held)}` : null].filter(Boolean).join(" ");
  });
  const parts = [workers(gpu.workers), ...others, gpu.unseen ? `unknown who else: ${gpu.unseen}` : null].filter(Boolean);
  return parts.length ? parts.flatMap((part, at) => [at ? "; " : "", part]) : "nobody";
}
