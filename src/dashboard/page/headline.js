// What a cluster is, in a word, and since when; and what of it is bad.

import { clock, isDeath } from "./model.js";

/** From this age on a time is told with its day. */
const HALF_A_DAY_MS = 12 * 3600 * 1000;

/** The state of the cluster: tone, mark and words. */
export function headline(model) {
  const { state } = model;
  const is = (tone, ...words) => ({ tone, word: words.filter(Boolean).join(", "), mark: { good: "●", warn: "◐", bad: "✕", off: "■" }[tone] });
  if (model.end) return is(state?.state === "failed" ? "bad" : "off", `${state?.state === "failed" ? "failed" : "ended"}${since(state?.ended_at, "at")}`);
  if (model.lost) return is("bad", `no connection${since(model.lostAt)}`);
  if (model.silent) return is("bad", `not answering${since(model.silentAt)}`);
  if (state.state === "unresponsive") {
    const away = model.processes.filter((process) => process.state === "unresponsive");
    // If all answer, it is the guardian that does not.
    const first = away.map((process) => process.not_answering_since).filter(Boolean).sort()[0] ?? state.guardian_not_answering_since;
    return is("bad", `${counted(away, "guardian")} not answering${since(first)}`);
  }
  const tone = { ready: "good", degraded: "bad", failed: "bad", recovering: "bad", stopped: "off" }[state.state] ?? "warn";
  if (state.state === "ready") return is(tone, "READY");
  return is(tone, `${state.state}${since(changedAt(model))}`, tone === "bad" ? guilty(model) : null);
}

/** Why the cluster is not READY: the worst first. */
function guilty(model) {
  for (const [phase, word] of [["failed", "failed"], ["unresponsive", "not answering"], ["restarting", "restarting"], ["starting", "starting"]]) {
    const those = model.processes.filter((process) => process.state === phase);
    if (those.length) return `${counted(those)} ${word}`;
  }
  return null;
}

function counted(processes, none) {
  return processes.length > 1 ? `${processes.length} processes` : processes[0]?.name ?? none;
}

/** When the cluster came into its state, by its records; those that are long ago are not known. */
function changedAt(model) {
  const changes = model.records.filter((record) => record.event === "cluster");
  const last = changes.at(-1);
  return last?.state === model.state.state ? last.at : null;
}

function since(at, word = "since") {
  if (!at) return "";
  const age = Date.now() - new Date(at);
  const day = age > HALF_A_DAY_MS ? `${new Date(at).toLocaleDateString([], { day: "numeric", month: "short" })} ` : "";
  return ` ${word} ${day}${clock(at)}`;
}

/** What is bad of a cluster now: a sentence for each thing, by a key that stays while it does. */
export function troubles(model) {
  const all = new Map();
  const { state } = model;
  if (model.end) {
    if (state?.state === "failed") all.set("failed", `has failed${state.cause ? `: ${state.cause.text}` : ""}`);
    return all;
  }
  if (model.silent) all.set("silent", model.silent);
  if (!state || ["stopping", "stopped"].includes(state.state)) return all;
  for (const process of model.processes) {
    if (process.state === "unresponsive") all.set(`${process.name} silent`, `${process.name} does not answer`);
    if (process.state === "failed") all.set(`${process.name} failed`, `${process.name} has failed and is not started again`);
  }
  for (const [name, death] of model.deaths) all.set(`${name} died ${death.at}`, `${name} ${death.reason ?? "has died"}`);
  for (const one of state.joined ?? []) {
    if (one.state === "lost") all.set(`${one.name} lost ${one.since}`, `${one.name} of ${one.host} is lost`);
  }
  return all;
}

/** Whether a record tells of something bad. */
export function isBad(record) {
  return isDeath(record) || record.lost || ["failed", "not_answering", "killed", "stalled"].includes(record.event)
    || (record.event === "cluster" && ["degraded", "failed"].includes(record.state));
}
