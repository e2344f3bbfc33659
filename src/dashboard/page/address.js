// What the page's address names: a cluster, and what of it is shown.

/** Reads `#cluster=demo&worker=gpu3`, `#cluster=demo&line=gpu0:0:1234`, `#view=all`, and `#demo`, which the program's link leads to. */
export function read(hash) {
  const text = hash.replace(/^#/, "");
  if (text.includes("=")) {
    const named = new URLSearchParams(text);
    return { cluster: named.get("cluster"), worker: named.get("worker"), line: named.get("line"), all: named.get("view") === "all" };
  }
  // A part of the page is no cluster.
  const part = text && document.getElementById(text);
  return { cluster: (!part && text) || null };
}

/** The address of a cluster, one of its workers, or a line of a log. */
export function write({ cluster, worker, line }) {
  const named = [["cluster", cluster], ["worker", worker], ["line", line]].filter(([, value]) => value);
  return `#${named.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3A", ":")}`).join("&")}`;
}
