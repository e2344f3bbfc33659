// What preflight had found before the cluster was started.

import { h } from "./model.js";

/** Severities as they are told, the worst first: word and tone. */
const WORDS = { error: ["error", "bad"], warning: ["warning", "warn"], note: ["note", "off"], cannot_tell: ["cannot tell", "off"] };

export class Preflight {
  constructor(card, facts, list) {
    [this.card, this.facts, this.list] = [card, facts, list];
  }

  /** Shows findings; `null` where there are none, because the GPUs are simulated. */
  show(findings) {
    this.card.hidden = !findings;
    if (!findings) return;
    const order = Object.keys(WORDS);
    const told = findings.filter((one) => one.severity in WORDS && !one.minor).sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity));
    const groups = grouped(told);
    const well = new Set(findings.filter((one) => one.severity === "ok").map((one) => one.id)).size;
    const counts = order.map((severity) => [groups.filter((one) => one.severity === severity).length, WORDS[severity][0]]);
    const words = counts.filter(([count]) => count).map(([count, word]) => `${count} ${word}${count > 1 && word !== "cannot tell" ? "s" : ""}`);
    this.facts.textContent = [...words, `${well} checks were well`, "before the start"].join(" · ");
    this.list.replaceChildren(...groups.map((one) => this.finding(one)));
  }

  finding({ id, severity, about, text, evidence = [], consequence, remedy, concerns = [] }) {
    const [word, tone] = WORDS[severity];
    const rows = [
      ...evidence.map(({ from, value }) => ["seen", `${from}: ${value}`]),
      ["so", consequence],
      ["do", remedy],
      ["for", concerns.join(", ")],
      ["more", `cuda-cluster doctor --explain ${id}`],
    ];
    return h("details", { "data-check": id },
      h("summary", {}, h("span", { class: `pill ${tone}` }, word), " ", about ? `${about}: ` : "", text),
      h("dl", { class: "mono" }, rows.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
  }
}

/** Findings, with those that differ only in what they are about as one. */
function grouped(findings) {
  const all = new Map();
  for (const one of findings) {
    const { about, concerns = [], ...rest } = one;
    const key = JSON.stringify(rest);
    const same = all.get(key);
    if (same && about && same.about) {
      same.about += `, ${about}`;
      same.concerns = [...new Set([...same.concerns, ...concerns])];
    } else {
      all.set(same ? `${key} ${all.size}` : key, { ...one, concerns: [...concerns] });
    }
  }
  return [...all.values()];
}
