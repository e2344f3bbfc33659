// The page: hears of a cluster by server-sent events, shows it, and asks for changes.

import { read as readAddress, tell } from "./address.js";
import { Details } from "./details.js";
import * as dom from "./dom.js";
import { Flows } from "./flows.js";
import { headline, isBad } from "./headline.js";
import { legend, zone } from "./legend.js";
import { LogView } from "./log_view.js";
import { Machine } from "./machine.js";
import { Matrix } from "./matrix.js";
import { Model, bytes, clock, h, percent, sentence, span, visible } from "./model.js";
import { Notifier } from "./notify.js";
import { Overview } from "./overview.js";
import { Preflight } from "./preflight.js";
import { Strips } from "./strips.js";
import { Tasks } from "./tasks.js";
import { Tiles } from "./tiles.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const LOOK_EVERY_MS = 5000;
/** So long the page draws at once; the rest follows in the next picture, so that it answers meanwhile. */
const DRAW_MS = 10;

let model = null;
let stream = null;
/** Whether a picture is due, whether there is news since the last one began, and what is missing in that. */
let due = false;
let news = false;
let missing = [];
let looking = false;
/** What had the focus before details were shown. */
let opener = null;
/** What the address asks to select, until it is known. */
let wanted = null;

const actions = {
  select,
  read,
  url: (path) => url(path),
  profile: async (name) => (await order(`profile/${encodeURIComponent(name)}`)).json(),
  restart: (name) => confirm(`Restart ${name}? Its tasks run again elsewhere.`, "Restart", () => post(`restart/${encodeURIComponent(name)}`), { kind: "danger filled" }),
};
const machine = new Machine($("machine"), select);
const details = new Details($("details"), actions);
const matrix = new Matrix($("matrix"), (text) => set($("pair"), "textContent", text), () => flows.load());
const preflight = new Preflight($("preflight"), $("preflight-facts"), $("findings"));
const tiles = new Tiles($("tiles"), select);
const strips = new Strips($("strips"), select);
const notifier = new Notifier($("notify"));
legend($("keys"));
$("zone").textContent = zone();
const timeline = new Timeline({ read, moved: () => flows.load() });
const flows = new Flows({ read, part: () => timeline.part, changed: () => later() });
const logs = new LogView($("logs"), actions);
const tasks = new Tasks($("tasks"), { read, chosen: (task) => tell({ cluster: model.name, task }) });
const overview = new Overview($("overview"), say);

/** A path of the current cluster; relative, so that a proxy may put anything before it. */
const url = (path) => `api/clusters/${encodeURIComponent(model.name)}/${path}`;

async function read(path) {
  const response = await fetch(url(path));
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? response.statusText);
  return response.json();
}

async function order(path) {
  const response = await fetch(url(path), { method: "POST", headers: { "X-Cuda-Cluster": "page" } });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? response.statusText);
  return response;
}

async function post(path) {
  try {
    await order(path);
  } catch (error) {
    say(`Not done: ${error.message}`);
  }
}

function say(text) {
  set($("banner"), "textContent", text);
  $("banner").hidden = !text;
}

/** Asks before a change; `field` is an input whose value is given to `then`; `kind` is the look of the button that does it. */
function confirm(text, word, then, { field, kind = "primary" } = {}) {
  const dialog = $("dialog");
  $("dialog-text").textContent = text;
  $("dialog-field").replaceChildren(...(field ? [field] : []));
  $("dialog-ok").textContent = word;
  $("dialog-ok").className = kind;
  dialog.returnValue = "";
  dialog.onclose = () => { if (dialog.returnValue === "yes") then(field?.value); };
  dialog.showModal();
}

function select(name) {
  tell({ cluster: model.name, worker: name, line: null });
  if (name && !$("details").contains(document.activeElement)) opener = document.activeElement;
  machine.selected = name;
  details.show(model, name);
  later();
  if (name) {
    details.title.focus({ preventScroll: true });
    $("details").scrollIntoView({ behavior: "smooth", block: innerWidth < 900 ? "start" : "nearest" });
  } else {
    opener?.focus();
  }
}

/** Draws soon, once for all news until then. */
function later() {
  news = true;
  soon();
}

function soon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw();
  });
}

async function open(name, { worker, line, task } = {}) {
  stream?.close();
  model = new Model(name);
  missing = [];
  wanted = worker;
  overview.hide();
  document.body.classList.remove("all");
  $("clusters").hidden = $("clusters").options.length < 2;
  $("clusters").value = name;
  const mine = model;
  details.show(model, null);
  machine.selected = null;
  say("");
  $("name").textContent = name;
  $("clusters").value = name;
  document.title = `${name} – cuda-cluster`;
  tell({ cluster: name, worker, line, task });
  flows.close();
  timeline.open(model);
  flows.open(model);
  logs.open(name, line);
  tasks.open(model, task);
  try {
    mine.about = await read("about");
  } catch (error) {
    if (mine === model) say(error.message);
  }
  if (mine !== model) return;
  machine.mount(mine.about?.picture);
  preflight.show(mine.about?.preflight);
  listen(mine);
  for (const record of await read("events").catch(() => [])) mine.addRecord(record, false);
  later();
}

function listen(mine) {
  stream = new EventSource(url("live"));
  const on = (kind, hear) => stream.addEventListener(kind, (event) => {
    if (mine !== model) return;
    hear(JSON.parse(event.data));
    notifier.heed(mine);
    later();
  });
  on("state", (state) => { mine.state = state; mine.silent = mine.silentAt = null; });
  on("lanes", (lanes) => mine.setLanes(lanes));
  on("figures", (figures) => mine.addFigures(figures));
  on("event", (record) => mine.addRecord(record, true));
  on("audit", (audit) => { mine.audit = audit; });
  on("verification", (verification) => mine.setVerification(verification));
  on("silent", ({ text }) => { [mine.silent, mine.silentAt] = [text, mine.silentAt ?? Date.now()]; });
  on("end", ({ text }) => { mine.end = text; });
  on("begin", () => open(mine.name));
  stream.onopen = () => { mine.lost = false; later(); };
  stream.onerror = () => { [mine.lost, mine.lostAt] = [true, mine.lost ? mine.lostAt : Date.now()]; later(); };
}

async function draw() {
  if (!model) return;
  const began = performance.now();
  // What was begun is ended first: else the last parts would never be drawn on a busy day.
  if (!missing.length && news) {
    news = false;
    missing = parts();
  }
  while (missing.length && performance.now() - began < DRAW_MS) {
    missing.shift()();
    // uPlot draws at the end of what runs, which counts, too.
    await null;
  }
  if (missing.length || news) soon();
}

/** What is drawn, one after another. */
function parts() {
  document.body.classList.toggle("ended", Boolean(model.end));
  document.body.classList.toggle("lost", model.lost && !model.end);
  const of = !model.state ? [] : [
    () => head(model.state),
    wish,
    () => machine.update(model),
    () => tiles.update(model, machine.selected),
    () => processes($("worker-table"), COLUMNS, model.processes.filter((process) => !process.host)),
    () => processes($("host-table"), HOSTS, model.hosts),
    () => joined(model.state),
    wires,
    pairs,
    () => strips.update(model),
    () => details.update(model),
    () => tasks.update(),
    events,
    ...timeline.parts(),
  ];
  return [banner, ...of, buttons, () => { if (model.fading) setTimeout(later, 500); }];
}

/** Selects what the address asks for, once it is known. */
function wish() {
  if (!wanted) return;
  const name = wanted;
  wanted = null;
  select(name);
}

function banner() {
  // The program tells times as texts of UTC; this page has one clock.
  const end = model.end?.replace(/\d{4}-\d\d-\d\dT[\d:.]+Z/g, clock);
  if (model.end) say(`${model.name}: ${end}. The page shows the last that was known.`);
  else if (model.lost) say("The page has lost its server, and tries again. It shows the last that was known.");
  else if (model.silent) say(model.silent);
  else if (model.state?.cause) say(model.state.cause.text);
  else say("");
}

function head(state) {
  const ready = model.workers.filter((worker) => worker.state === "ready").length;
  const wanted = model.workers.filter((worker) => !["stopped"].includes(worker.state)).length;
  const { tone, mark, word } = headline(model);
  set($("phase"), "className", `pill ${tone}`);
  set($("phase"), "textContent", `${mark} ${word}`);
  const up = model.end || model.lost ? null : `up ${span(Date.now() - Date.parse(state.started_at))}`;
  const all = Object.values(model.last.processes).reduce((sum, one) => sum + (one.resident_bytes ?? 0), 0);
  const count = model.end ? `${model.workers.length} workers` : `${ready} of ${wanted} workers READY`;
  const words = [model.lost ? `last known: ${count}` : count, `${state.engine} engine`, state.simulated ? "simulated GPUs" : null, up, all ? bytes(all) : null];
  set($("summary"), "textContent", words.filter(Boolean).join(" · "));
  const facts = model.about?.machine;
  const gpus = facts?.gpus.length ?? 0;
  set($("machine-facts"), "textContent", facts ? [facts.name, `${gpus} GPU${gpus === 1 ? "" : "s"}`, facts.nics.length ? `${facts.nics.length} NICs` : null, facts.driver ? `driver ${facts.driver}` : null].filter(Boolean).join(" · ") : "");
  const notes = [...state.notes, ...(model.about?.plan.notes ?? []).map((note) => `${note.about}: ${note.text}`)];
  if ($("notes").dataset.key !== JSON.stringify(notes)) {
    $("notes").dataset.key = JSON.stringify(notes);
    $("notes").replaceChildren(...notes.map((note) => h("li", {}, note)));
  }
}

const COLUMNS = [
  ["Worker", (process) => process.name],
  ["State", null],
  ["GPU", (process) => process.gpu?.index ?? "–"],
  ["CPUs", (process) => model.last.processes[process.name]?.cpus?.toFixed(2) ?? "–", "number"],
  ["Memory", memory, "number"],
  ["Pool", (process) => (process.device_pool ? bytes(process.device_pool.held_bytes) : "–"), "number wide"],
  ["Tasks", (process) => { const tasks = model.tasks(process.name); return tasks ? tasks.in_flight + tasks.queued : "–"; }, "number wide"],
  ["Restarts", (process) => process.restarts, "number"],
  ["NIC", (process) => model.planned(process.name)?.nics.join(",") || "–", "wide"],
  ["Last end", (process) => process.last_exit?.reason ?? "", "wide"],
];

/** What a process has in memory, and how much that is of its limit. */
function memory(process) {
  const [used, limit] = [model.last.processes[process.name]?.resident_bytes, process.memory_limit_bytes];
  return used != null && limit ? `${bytes(used)} (${percent((100 * used) / limit)})` : bytes(used);
}

/** The processes that bring up the workers of other machines. */
const HOSTS = [
  ["Over ssh", (process) => process.name],
  ["State", null],
  ["Machine", (process) => process.host],
  ["Restarts", (process) => process.restarts, "number"],
  ["Last end", (process) => (process.last_exit ? `${clock(process.last_exit.at)} ${process.last_exit.reason}` : ""), "text"],
];

/** A table of processes, each of which can be selected. */
function processes(table, columns, all) {
  const names = all.map((process) => process.name).join(" ");
  if (table.dataset.key !== `${model.name} ${names}`) {
    table.dataset.key = `${model.name} ${names}`;
    table.replaceChildren(
      h("thead", {}, h("tr", {}, columns.map(([heading, , kind]) => h("th", { scope: "col", class: kind }, heading)))),
      h("tbody", {}, all.map((process) => h("tr", { "data-row": process.name },
        columns.map(([heading, , kind], at) => (at ? h("td", { class: kind }) : h("th", { scope: "row" }, h("button", { class: "link", onclick: () => select(process.name) }, process.name))))))));
  }
  for (const process of all) {
    const row = table.querySelector(`[data-row="${CSS.escape(process.name)}"]`);
    const { tone, mark, word, why } = model.standing(process);
    set(row, "className", `${tone}${machine.selected === process.name ? " selected" : ""}`);
    columns.forEach(([, cell], at) => {
      if (!at) return;
      const text = cell ? String(cell(process)) : `${mark} ${word}`;
      set(row.children[at], "textContent", text);
      if (!cell) set(row.children[at], "title", why ?? "");
    });
  }
}

const JOINED = [
  ["Worker", (one) => one.name],
  ["State", (one) => `${{ ready: "● READY", lost: "✕ lost", left: "■ left" }[one.state]}${one.reason ? `: ${one.reason}` : ""}`],
  ["Machine", (one) => one.host],
  ["Cluster", (one) => one.cluster ?? "–"],
  ["GPU", (one) => one.gpu ?? "–"],
  ["CPUs", (one) => one.cpus ?? "–", "wide"],
  ["NIC", (one) => one.nics?.join(",") || "–", "wide"],
  ["Since", (one) => clock(one.since)],
];

function joined(state) {
  const all = state.joined ?? [];
  $("host-table").hidden = !model.hosts.length;
  $("joined").hidden = !all.length && !model.hosts.length;
  const table = $("joined-table");
  table.hidden = !all.length;
  if (table.dataset.key === JSON.stringify(all)) return;
  table.dataset.key = JSON.stringify(all);
  const there = all.filter((one) => one.state === "ready");
  const [lost, machines] = [all.filter((one) => one.state === "lost").length, new Set(there.map((one) => one.host)).size];
  set($("joined-facts"), "textContent", [there.length ? `${there.length} of ${machines} machine${machines === 1 ? "" : "s"}` : "none is there", lost ? `${lost} lost` : null].filter(Boolean).join(" · "));
  const tone = { ready: "good", lost: "bad" };
  table.replaceChildren(
    h("thead", {}, h("tr", {}, JOINED.map(([heading, , kind]) => h("th", { scope: "col", class: kind }, heading)))),
    h("tbody", {}, all.map((one) => h("tr", { class: tone[one.state] }, JOINED.map(([, cell, kind], at) => h(at ? "td" : "th", { scope: at ? null : "row", class: kind }, String(cell(one))))))));
}

function wires() {
  const audit = model.audit;
  $("wires").hidden = !audit;
  if (!audit) return;
  set($("wires-facts"), "textContent", `in ${span(audit.ms)}`);
  const list = $("wires-list");
  const key = JSON.stringify(audit);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(
    ...audit.findings.map(({ text }) => h("li", { class: "bad" }, "✕ ", text)),
    ...audit.causes.map(({ text, line }) => h("li", {}, text, h("br"), h("code", { class: "muted" }, line))),
    ...audit.lines.map((line) => h("li", {}, line)),
    ...audit.unseen.map((what) => h("li", { class: "muted" }, `not seen: ${what}`)));
}

function pairs() {
  matrix.update(model);
  const lack = model.flowsLack && `what went between them is not known: ${model.flowsLack}`;
  set($("pairs-answer"), "textContent", [model.answer, lack].filter(Boolean).join("; "));
  $("pairs").hidden = model.workers.length < 2 || (!model.lanes.pairs.length && !model.measured && !model.verification && !model.flows?.pairs.length);
}

function events() {
  const list = $("events");
  const count = `${model.name} ${model.records.length} ${model.records.at(-1)?.at}`;
  if (list.dataset.key === count) return;
  list.dataset.key = count;
  const told = model.records.filter((record) => record.event !== "step").slice(-300).reverse();
  list.replaceChildren(...told.map((record) => h("li", { class: isBad(record) ? "bad" : record.event === "ready" ? "good" : "" },
    h("time", { datetime: record.at }, clock(record.at)), h("b", {}, record.process ?? "cluster"), h("span", {}, sentence(record)))));
}

function buttons() {
  const nav = $("actions");
  if (!nav.children.length) {
    nav.append(
      h("button", { class: "live", id: "verify", onclick: () => post("verify") }, "Verify links"),
      h("button", { class: "live", id: "scale", onclick: scale }, "Scale…"),
      h("a", { class: "button", id: "report", download: true }, "Bug report"),
      h("a", { class: "button", id: "dask", target: "_blank", rel: "noreferrer noopener", hidden: true }, "Dask dashboard"),
      h("button", { class: "live danger", id: "stop", onclick: () => confirm(`Stop ${model.name}? All of its processes end.`, "Stop the cluster", () => post("stop"), { kind: "danger filled" }) }, "Stop…"));
  }
  $("report").setAttribute("href", url("report"));
  const dask = model.state?.scheduler?.dashboard;
  $("dask").hidden = !dask;
  if (dask?.startsWith("http")) $("dask").setAttribute("href", dask);
  const dead = Boolean(model.end) || model.lost || !model.state;
  for (const button of document.querySelectorAll(".live")) button.disabled = dead;
  // Programs of the command engine answer no questions.
  $("verify").hidden = !model.state || model.state.engine === "command" || model.workers.length < 2;
  $("verify").disabled = dead || model.verification?.state === "running";
}

function scale() {
  const most = model.workers.length;
  const now = model.workers.filter((worker) => worker.state !== "stopped").length;
  const field = h("input", { type: "number", min: 0, max: most, value: now, "aria-label": "workers" });
  confirm(`How many of the ${most} planned workers are to run?`, "Scale", (value) => post(`scale?workers=${Number(value)}`), { field });
}

/** Shows a text, whatever is in it. */
function set(element, name, value) {
  dom.set(element, name, visible(value));
}

/** Asks which clusters there are, and for all of them what the overview shows while it is shown; opens the one in the address, or the first. */
async function look() {
  const whole = overview.shown;
  if (looking || whole && document.hidden) return;
  looking = true;
  let found;
  try {
    const response = await fetch(whole ? "api/overview" : "api/clusters");
    found = await response.json();
    if (!response.ok) throw new Error(found.error);
  } catch (error) {
    found = null;
    if (whole && overview.shown) say(`What there is can't be read: ${error.message}`);
  }
  looking = false;
  // Meanwhile something else is to be shown.
  if (whole !== overview.shown) return void look();
  if (!found) return;
  if (whole) overview.draw(found);
  clusters(found.clusters);
  set($("footer"), "textContent", `cuda-cluster ${found.version}`);
}

function clusters(found) {
  const names = found.map((one) => one.name);
  const chosen = $("clusters");
  chosen.hidden = names.length < 2 || overview.shown;
  if (chosen.dataset.key !== names.join(" ")) {
    chosen.dataset.key = names.join(" ");
    chosen.replaceChildren(...found.map(({ name, is_running: runs }) => h("option", { value: name }, runs ? name : `${name} (ended)`)));
  }
  if (!model && !(overview.shown && asked().all)) {
    const first = names.includes(asked().cluster) ? asked().cluster : names.length === 1 && !asked().all ? names[0] : null;
    if (first) open(first, asked());
    else if (!overview.shown) all();
  }
  if (model) chosen.value = model.name;
}

const asked = () => readAddress(location.hash);

/** Shows all clusters, and none of them in full. */
function all() {
  stream?.close();
  [model, stream, wanted, machine.selected] = [null, null, null, null];
  details.show(null, null);
  timeline.close();
  flows.close();
  logs.open(null);
  tasks.open(null);
  say("");
  document.body.classList.remove("ended", "lost");
  document.body.classList.add("all");
  set($("name"), "textContent", "All clusters");
  set($("summary"), "textContent", "");
  $("clusters").hidden = true;
  document.title = "All clusters – cuda-cluster";
  overview.show();
  look();
}

$("clusters").addEventListener("change", (event) => open(event.target.value));
addEventListener("hashchange", () => {
  const { cluster, worker, line, task, all: everything } = asked();
  if (everything) return all();
  if (cluster && cluster !== model?.name) return void open(cluster, { worker, line, task });
  if (line) logs.goTo(line);
  else if (task) tasks.explain(task, true);
  else if (worker && worker !== machine.selected) select(worker);
  if (cluster && model) timeline.follow();
  return undefined;
});
addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("dialog").open && machine.selected) select(null); });
addEventListener("resize", later);
document.addEventListener("visibilitychange", look);
setInterval(look, LOOK_EVERY_MS);
setInterval(later, 1000);
look();
