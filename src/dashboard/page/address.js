// What the page's address names: a cluster, what of it is shown, and which of its time.

/** Names of what is said of the time. */
const TIME = ["range", "since", "until", "who", "at"];

/** Reads `#cluster=demo&worker=gpu3`, `#cluster=demo&line=gpu0:0:1234`, `#cluster=demo&task=3:17`, `#cluster=demo&range=1h&who=gpu3`, `#cluster=demo&since=MS&until=MS`, `#view=all`, and `#demo`. */
export function read(hash) {
  const text = hash.replace(/^#/, "");
  const [first] = text.split("&");
  // A part of the page is no cluster.
  const bare = first.includes("=") || document.getElementById(first) ? null : decodeURIComponent(first);
  const named = new URLSearchParams(text);
  const time = new URLSearchParams(TIME.filter((name) => named.has(name)).map((name) => [name, named.get(name)]));
  return { cluster: named.get("cluster") ?? (bare || null), worker: named.get("worker"), line: named.get("line"), task: named.get("task"), time, all: named.get("view") === "all" };
}

/** The address of a cluster, one of its workers, a line of a log, or a task, at a time. */
export function write({ cluster, worker, line, task, time = [] }) {
  const named = [["cluster", cluster], ["worker", worker], ["line", line], ["task", task], ...time].filter(([, value]) => value);
  return `#${named.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3A", ":")}`).join("&")}`;
}

/** Puts what is shown into the address, beside what else it names of the same cluster. */
export function tell(changes) {
  const now = read(location.hash);
  history.replaceState(null, "", write({ ...(now.cluster === changes.cluster ? now : {}), ...changes }));
}
