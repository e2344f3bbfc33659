// What a process's threads do, as sampled on request: their stacks merged to a tree, with shares.

import { h } from "./model.js";

/** Branches with at least this share of their thread are open at first. */
const OPEN = 0.3;

/** A button that samples a process, and the place for what it shows; `sample` asks for it. */
export function profile(sample) {
  const facts = h("p", { class: "muted", role: "status" }, "Its stacks are read for some seconds, from outside: nothing is stopped.");
  const tree = h("div", { class: "tree" });
  const button = h("button", { class: "live", "data-profile": true, onclick: () => take() }, "Sample its stacks");
  const take = async () => {
    button.disabled = true;
    facts.textContent = "sampling …";
    try {
      const seen = await sample();
      const unseen = seen.unseen ? `; ${seen.unseen} stacks could not be read` : "";
      const python = seen.python ? `, of Python ${seen.python} alone` : "";
      facts.textContent = `${seen.samples} samples in ${(seen.ms / 1000).toFixed(1)} s${python}${unseen}. A share is of the thread's samples; "on CPU" is the part in which the thread ran.`;
      tree.replaceChildren(...seen.threads.map((thread) => branch(thread, thread.samples, true)));
    } catch (error) {
      facts.textContent = `Not sampled: ${error.message}`;
      tree.replaceChildren();
    }
    button.disabled = false;
  };
  return h("div", {}, button, facts, tree);
}

function branch({ name, samples, running, calls = [] }, all, isThread) {
  const percent = (count) => `${Math.round((100 * count) / all)} %`;
  const bar = h("span", { class: "share", "aria-hidden": "true" });
  // The page's policy forbids style attributes, not the script's own.
  bar.style.width = `${(60 * samples) / all}px`;
  const words = isThread ? [h("strong", {}, name), ` ${samples} samples, ${percent(running)} on CPU`] : [bar, ` ${percent(samples)} `, h("code", {}, name), running ? h("span", { class: "muted" }, ` ${percent(running)} on CPU`) : null];
  if (!calls.length) return h("p", { class: "leaf" }, words);
  return h("details", { open: isThread || samples / all >= OPEN }, h("summary", {}, words), calls.map((call) => branch(call, all, false)));
}
