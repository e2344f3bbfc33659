// What the page knows of one cluster, and what it means. Draws nothing.

/** How long a death stays red: a worker is often READY again before anyone can see it. */
const SEEN_MS = 5000;
/** Readings that are kept: five minutes. */
const KEPT = 150;

/** What a process's state means: tone, mark and word. */
export const STANDINGS = {
  ready: ["good", "●", "READY"],
  limited: ["warn", "▲", "READY, port missing"],
  starting: ["warn", "◐", "starting"],
  stopping: ["warn", "◑", "stopping"],
  restarting: ["bad", "↻", "restarting"],
  unresponsive: ["bad", "!", "not answering"],
  failed: ["bad", "✕", "failed"],
  waiting: ["off", "○", "waiting"],
  stopped: ["off", "■", "stopped"],
};

export class Model {
  constructor(name) {
    this.name = name;
    this.about = null;
    this.state = null;
    this.lanes = { sets: [], pairs: [], missing: [] };
    this.figures = [];
    this.records = [];
    this.verification = null;
    this.audit = null;
    this.dask = null;
    this.end = null;
    this.silent = null;
    this.lost = false;
    this.deaths = new Map();
    this.known = new Set();
    this.laneOf = new Map();
    this.lackOf = new Map();
    /** What went between workers in a part of the time, once it was read from the history. */
    this.flows = null;
    /** Why that is not known. */
    this.flowsLack = "";
    /** Which figures of pairs are shown: those that were `measured`, those of tasks `now`, or the means of the `past`. */
    this.chosen = null;
  }

  setLanes(lanes) {
    this.lanes = lanes;
    this.laneOf = new Map(lanes.pairs.map(([a, b, set]) => [`${a} ${b}`, lanes.sets[set]]));
    this.lackOf = new Map(lanes.missing.map(([a, b, expected]) => [`${a} ${b}`, expected]));
  }

  addFigures(figures) {
    this.figures.push(figures);
    if (this.figures.length > KEPT) this.figures.shift();
  }

  /** Adds a record, unless it is known; `live` ones happen now. */
  addRecord(record, live) {
    const key = JSON.stringify([record.at, record.process, record.event, record.pid, record.step]);
    if (this.known.has(key)) return;
    this.known.add(key);
    this.records.push(record);
    if (this.records.length > 1000) this.records.shift();
    if (live && isDeath(record) && this.state?.state !== "stopping") {
      this.deaths.set(record.process, { at: Date.now(), reason: record.reason });
    }
  }

  get last() {
    return this.figures[this.figures.length - 1] ?? { processes: {}, gpus: {}, nics: {} };
  }

  get workers() {
    return this.state?.workers ?? [];
  }

  /** Those that each bring up the workers of another machine over ssh. */
  get hosts() {
    return this.state?.hosts ?? [];
  }

  get processes() {
    return this.state ? [this.state.scheduler, ...this.state.workers, ...this.hosts].filter(Boolean) : [];
  }

  process(name) {
    return this.byName().get(name);
  }

  /** The processes by name, for those who ask of each pair of many. */
  byName = lookUp(() => this.state, () => new Map(this.processes.map((process) => [process.name, process])));

  /** What tasks moved between workers, by sender and receiver. */
  byPair = lookUp(() => this.last.tasks, (tasks) => new Map(tasks?.links.map((link) => [`${link.from} ${link.to}`, link])));

  planned(name) {
    return this.about?.plan.workers.find((worker) => worker.name === name);
  }

  /** The tasks of a worker, by the native scheduler or Dask's. */
  tasks(name) {
    const worker = this.ofDask(name);
    if (worker) return { in_flight: worker.processing, queued: 0 };
    return this.last.tasks?.workers.find((worker) => worker.name === name);
  }

  /** What Dask's scheduler counts of a worker. */
  ofDask(name) {
    const pid = this.dask && this.process(name)?.pid;
    return pid ? this.dask.workers.find((worker) => worker.pid === pid) : undefined;
  }

  /** What a process's state means: a mark and a word beside the colour. */
  standing(process) {
    const death = this.deaths.get(process.name);
    if (death && Date.now() - death.at < SEEN_MS && process.state !== "failed") {
      const word = process.state === "ready" ? "died, READY again" : `died, ${process.state}`;
      return { tone: "bad", mark: "✕", word, short: "died", why: death.reason };
    }
    const kind = process.state === "ready" && process.missing_ports?.length ? "limited" : process.state;
    const [tone, mark, word] = STANDINGS[kind] ?? ["warn", "?", process.state];
    return { tone, mark, word, short: word.split(",")[0], why: process.last_exit?.reason };
  }

  /** Whether a death is shown that will turn into something else without news. */
  get fading() {
    return [...this.deaths.values()].some((death) => Date.now() - death.at < SEEN_MS + 500);
  }

  /** What is known of an ordered pair of workers, by place. */
  pair(a, b) {
    const key = `${a} ${b}`;
    const from = this.workers[a]?.name;
    const to = this.workers[b]?.name;
    const measured = this.measured?.get(`${from} ${to}`) ?? [];
    const current = this.isAsMeasured(from) && this.isAsMeasured(to);
    const rows = current ? measured : [];
    const seen = this.byPair().get(`${from} ${to}`);
    const past = this.shows === "past";
    const [row, shown] = [rows.at(-1), this.shows === "measured" || past && this.measured];
    const rate = shown ? measured.at(-1)?.gb_per_s : seen && seen.quartiles[1] / 1e9;
    return {
      from,
      to,
      lanes: row?.lanes.join(" ") || this.laneOf.get(key),
      lacks: this.lackOf.get(key),
      rows,
      verdict: row?.verdict,
      rate: rate ?? null,
      /** What went between them in the part of the time that is shown. */
      moved: past ? this.flows.byPair.get(`${from} ${to}`) : undefined,
      /** What was measured before one of them ended or stopped answering. */
      before: current ? [] : measured,
      stale: shown && !current && rate != null,
      seen,
      bad: this.lackOf.has(key) || rows.some((row) => row.verdict !== "ok" && !row.verdict.startsWith("slow")),
    };
  }

  /** Which figures are shown: the chosen ones, or else those that there are. */
  get shows() {
    if (this.chosen) return this.chosen;
    if (this.measured) return "measured";
    // Nobody was there to see what tasks did.
    return this.flows?.pairs.length && this.end && !this.last.tasks ? "past" : "now";
  }

  /** What went between workers in a part of the time, in the unit in which the largest mean is a number above one. */
  setFlows(flows, name) {
    const largest = flows.pairs.reduce((most, flow) => Math.max(most, flow.mean_bytes_per_s), 0);
    const unit = [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]].find(([, size]) => largest >= size) ?? ["B/s", 1];
    this.flows = { ...flows, name, unit, byPair: new Map(flows.pairs.map((flow) => [`${flow.from} ${flow.to}`, flow])) };
  }

  /** Whether a process is still the one that was measured, and would do the same again. */
  isAsMeasured(name) {
    const process = this.process(name);
    const pid = this.verification?.processes?.[name];
    return Boolean(this.end) || (process?.state === "ready" && (pid === undefined || pid === process.pid));
  }

  /** The rows of the last measurement, without those of workers that have ended or don't answer. */
  get valid() {
    const rows = this.measured ? [...this.measured.values()].flat() : [];
    return rows.filter((row) => this.isAsMeasured(row.from) && this.isAsMeasured(row.to));
  }

  /** The answer to how the pairs are connected, in a sentence. */
  get answer() {
    const { verification, lanes } = this;
    const [bad, all] = [lanes.missing.length, lanes.pairs.length];
    if (verification?.state === "running") return "measuring…";
    if (verification?.state === "failed") return `not measured: ${verification.text}`;
    const lacks = bad ? `${bad} of ${all} connections are not as planned` : "";
    if (!this.measured) return lacks || (all ? `all ${all} connections use lanes as planned` : "");
    const [rows, before] = [this.valid, verification.pairs.length];
    const slow = rows.filter((row) => row.verdict.startsWith("slow")).length;
    const ok = rows.filter((row) => row.verdict === "ok").length + slow;
    const gone = before - rows.length;
    return [
      `${ok} of ${rows.length} ok${slow ? `, ${slow} of them slow` : ""}, measured at ${clock(verification.at)}`,
      gone ? `${gone} are out of date: a worker has ended or does not answer` : "",
      lacks,
    ].filter(Boolean).join("; ");
  }

  setVerification(verification) {
    this.verification = verification;
    if (verification.state === "done") {
      this.measured = new Map();
      for (const row of verification.pairs) {
        const key = `${row.from} ${row.to}`;
        this.measured.set(key, [...(this.measured.get(key) ?? []), row]);
      }
    }
  }
}

/** A table that is made anew when what it is made of is another. */
function lookUp(of, make) {
  let [made, table] = [undefined, make()];
  return () => {
    const now = of();
    if (now !== made) [made, table] = [now, make(now)];
    return table;
  };
}

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let at = 0;
  while (value >= 1024 && at < BINARY.length - 1) [value, at] = [value / 1024, at + 1];
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${BINARY[at]}`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value)} %`;
}

/** Bytes per second, in the decimal units of links. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(value >= 1e10 ? 0 : 1)} GB/s`;
  if (value >= 1e6) return `${Math.round(value / 1e6)} MB/s`;
  return `${Math.round(value / 1e3)} kB/s`;
}

/** Made once, because that takes long. */
const CLOCK = new Intl.DateTimeFormat([], { hour: "numeric", minute: "numeric", second: "numeric", hour12: false });

/** A time as the browser's clock shows it; from milliseconds or a record's text. */
export function clock(at) {
  const date = new Date(at);
  return Number.isNaN(date.getTime()) ? "–" : CLOCK.format(date);
}

/** The same with its day. */
export function dayAndClock(at) {
  return `${new Date(at).toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" })} ${clock(at)}`;
}

export function span(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

/** Whether a record is of a process that ended otherwise than it should. */
export function isDeath(record) {
  return record.event === "exited" && record.exit?.code !== 0;
}

/** An event as a sentence. */
export function sentence(record) {
  switch (record.event) {
    case "cluster": return record.cause ? `${record.state}: ${record.cause.text}` : record.state;
    case "started": return `started as process ${record.pid}${record.restarts ? `, restart ${record.restarts}` : ""}`;
    case "step": return record.step;
    case "ready": return `READY after ${record.after_ms} ms`;
    case "not_answering": return `not answering: ${record.reason}`;
    case "answers": return `answers again, after ${record.after_ms} ms`;
    case "stopping": return `told to end: ${record.reason}`;
    case "killed": return `killed: ${record.reason}`;
    case "exited": return record.reason;
    case "restarting": return `starts again in ${record.in_ms} ms`;
    case "regrouping": return `all ranks are started again together (${record.restart} of ${record.limit})`;
    case "replaced": return record.by ? `replaced by ${record.by}` : "left out: the job has one rank less";
    case "failed": return `failed: ${record.reason}`;
    case "joined": return `${record.worker.name} of ${record.worker.host} has joined`;
    case "parted": return `${record.name} of ${record.host} ${record.lost ? "is lost" : "has left"}: ${record.reason}`;
    case "stalled": return record.text;
    case "goes_on": return "its processes go on";
    case "note": return record.text;
    default: return record.event;
  }
}

/** A text with the characters made visible that hide or reorder others: control characters but for line feeds and tabs, and those of `is_deceptive` in `text/mod.rs`. */
export function visible(text) {
  return String(text).replace(/[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]/g,
    (hidden) => `\\u{${hidden.codePointAt(0).toString(16)}}`);
}

/** Creates an element; texts become text, never markup. */
export function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "text", "path", "title", "line"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : visible(child)));
  return element;
}
