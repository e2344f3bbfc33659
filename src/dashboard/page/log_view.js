// The logs of all processes as one: by text and level, older and newer lines, links to lines, a file.

import { write } from "./address.js";
import { put } from "./dom.js";
import { clock, h } from "./model.js";

/** Most lines on the page; twice as many while something is selected. */
const KEPT = 2000;
/** How far from an edge, in pixels, more lines are fetched. */
const NEAR = 200;
/** Lines that a search goes on for. */
const ENOUGH = 60;
const FOLLOW_MS = 1000;
/** Answers for new lines at a time; of more, the newest are shown alone. */
const FOLLOWED = 2;
const TYPED_MS = 250;
/** How long a page that was opened for a line keeps it in sight. */
const SOUGHT_MS = 5000;
/** Characters of a line that are laid out as one: browsers stop at long ones. */
const RUN = 16 * 1024;
const LEVELS = [["", "All levels"], ["info", "Info and above"], ["warning", "Warnings, errors"], ["error", "Errors"]];

/** The clock's time of a line; making a formatter takes longer than a line may, and most lines share their second. */
const format = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const last = { second: "", text: "" };
function timeOf(at) {
  const second = at.slice(0, 19);
  if (last.second !== second) Object.assign(last, { second, text: format.format(new Date(at)) });
  return `${last.text}${at.slice(19, 23)}`;
}

export class LogView {
  /** `actions.url` makes an address of the current cluster. */
  constructor(place, actions) {
    this.actions = actions;
    this.era = 0;
    this.chosen = new Set();
    this.processes = [];
    this.facts = h("p", { class: "muted", role: "status" });
    this.summary = h("summary", {}, "All processes");
    this.list = h("div", { class: "choices" });
    this.picker = h("details", { class: "picker" }, this.summary, this.list);
    this.text = h("input", { id: "log-text", type: "search", placeholder: "Text", "aria-label": "Only lines with this text", maxlength: 200, oninput: () => this.typed() });
    this.level = h("select", { id: "log-level", "aria-label": "Level", onchange: () => this.reset() }, LEVELS.map(([value, word]) => h("option", { value }, word)));
    this.button = h("button", { "aria-pressed": "true", onclick: () => this.follow(!this.following) }, "Follow");
    this.file = h("a", { class: "button", download: true }, "Download");
    this.box = h("div", { class: "lines", role: "group", "aria-label": "Lines", onscroll: () => this.scrolled(), onkeydown: (event) => this.pressed(event) });
    place.append(
      h("div", { class: "head" }, h("h2", { id: "logs-title" }, "Logs"), this.facts),
      h("div", { class: "controls" }, this.picker, this.text, this.level, this.button, this.file),
      this.box);
    document.addEventListener("click", (event) => { if (!this.picker.contains(event.target)) this.picker.open = false; });
    this.picker.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); this.picker.open = false; this.summary.focus(); } });
    new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      this.begin();
    }).observe(place);
    document.addEventListener("visibilitychange", () => this.begin());
    // What is above grows while it is loaded; who scrolls meanwhile means another place.
    new ResizeObserver(() => { if (Date.now() < this.sought) place.scrollIntoView({ block: "center" }); }).observe(document.body);
    for (const event of ["wheel", "touchmove", "keydown", "pointerdown"]) addEventListener(event, () => { this.sought = 0; this.held = false; }, { passive: true });
    setInterval(() => this.tick(), FOLLOW_MS);
  }

  /** Shows the logs of a cluster; of none with `null`. */
  open(cluster, line) {
    this.cluster = cluster;
    this.chosen.clear();
    this.processes = [];
    this.text.value = this.level.value = "";
    this.forget();
    this.link = line ?? null;
    this.sought = line ? Date.now() + SOUGHT_MS : 0;
    if (line) this.box.closest(".card").scrollIntoView({ block: "center" });
    this.begin();
  }

  /** Shows a line, as a link names it: `gpu0:0:1234`. */
  goTo(line) {
    this.box.closest(".card").scrollIntoView({ block: "nearest" });
    if (this.mark(line)) {
      this.held = true;
      this.follow(false);
      return;
    }
    this.chosen.clear();
    this.text.value = this.level.value = "";
    this.reset(line);
  }

  get active() {
    return this.seen && !document.hidden && Boolean(this.cluster);
  }

  /** Nothing is asked for until somebody sees it. */
  begin() {
    if (this.active && !this.begun) this.reset(this.link);
  }

  forget() {
    this.era += 1;
    this.begun = this.busy = this.live = this.start = false;
    [this.top, this.bottom, this.rows] = [{}, {}, 0];
    this.searched = this.skipped = null;
    this.missing = new Set();
    this.tail = h("div");
    this.box.replaceChildren(this.tail);
    this.pick();
    this.tell();
  }

  async reset(line) {
    const skipped = this.skipping;
    this.forget();
    this.begun = true;
    this.link = line ?? null;
    this.skipped = skipped;
    this.held = Boolean(line);
    this.pressedIs(!line);
    const era = this.era;
    const told = await this.ask(line ? { line } : {});
    // Asked again at the next tick, unless something else is.
    if (!told && era === this.era) this.begun = false;
    if (!told) return;
    this.processes = told.processes;
    this.pick();
    [this.top, this.bottom] = [told.top, told.bottom];
    this.live = !line || told.done;
    this.start = !line && told.done;
    this.append(told);
    // What comes before a linked line is shown, too.
    await this.fill(Boolean(line));
    if (line && !this.mark(line)) this.tell("the line is not there any more: the log was rotated");
  }

  /** Reads older lines until there are enough, or all were searched. */
  async fill(once) {
    const era = this.era;
    while (era === this.era && this.active && !this.start && (once || this.rows < ENOUGH)) {
      once = false;
      if (!await this.older()) break;
    }
    if (this.following) this.toEnd();
  }

  /** One question at a time; its answer, unless something else is shown meanwhile. */
  async ask(query) {
    if (this.busy) return null;
    const era = this.era;
    this.busy = true;
    try {
      const parameters = new URLSearchParams({ process: [...this.chosen].join(","), text: this.text.value, level: this.level.value, ...query });
      const response = await fetch(this.actions.url(`log?${parameters}`));
      const told = await response.json();
      if (era !== this.era) return null;
      if (!response.ok) throw new Error(told.error);
      for (const process of told.missing) this.missing.add(process);
      this.searched = told.searched_to;
      // It may have been scrolled meanwhile.
      requestAnimationFrame(() => this.near());
      return told;
    } catch (error) {
      if (era === this.era) this.tell(error.message);
      return null;
    } finally {
      if (era === this.era) this.busy = false;
    }
  }

  async older() {
    const told = await this.ask({ before: cursor(this.top) });
    if (!told) return false;
    Object.assign(this.top, told.top);
    this.start = told.done;
    // What was first stays where it is in sight; one layout tells where that is.
    const [first, at] = [this.box.firstElementChild, this.box.scrollTop];
    const before = first.offsetTop;
    this.box.prepend(...told.lines.map((line) => this.row(line)));
    this.rows += told.lines.length;
    this.trim(false);
    this.box.scrollTop = at + first.offsetTop - before;
    this.tell();
    return true;
  }

  async newer() {
    const told = await this.ask({ after: cursor(this.bottom) });
    if (!told) return false;
    // Of a process that is new, all lines are.
    for (const name of Object.keys(told.bottom)) this.top[name] ??= "0:0";
    Object.assign(this.bottom, told.bottom);
    this.live = told.done;
    if (told.processes.length !== this.processes.length) {
      this.processes = told.processes;
      this.pick();
    }
    this.append(told);
    return true;
  }

  append(told) {
    this.tail.before(...told.lines.map((line) => this.row(line)));
    this.rows += told.lines.length;
    const unfinished = JSON.stringify(this.live ? told.unfinished : []);
    if (this.tail.dataset.key !== unfinished) {
      this.tail.dataset.key = unfinished;
      this.tail.replaceChildren(...JSON.parse(unfinished).map((line) => this.row(line)));
    }
    this.trim(true);
    if (this.following) this.toEnd();
    this.tell();
  }

  /** Takes lines away that are too many; the cursors keep where they were. */
  trim(above) {
    const room = getSelection().isCollapsed || !this.box.contains(getSelection().anchorNode) ? KEPT : 2 * KEPT;
    if (this.rows <= room) return;
    const [height, at] = above && !this.following ? [this.box.scrollHeight, this.box.scrollTop] : [];
    for (; this.rows > room; this.rows -= 1) {
      const row = above ? this.box.firstElementChild : this.tail.previousElementSibling;
      const { process, part, offset } = row.dataset;
      if (above) this.top[process] = `${part}:${Number(offset) + 1}`;
      else this.bottom[process] = `${part}:${offset}`;
      row.remove();
    }
    if (above) {
      this.start = false;
      // Who follows is at the end anyway; a layout takes time.
      if (!this.following) this.box.scrollTop = at + this.box.scrollHeight - height;
    } else {
      this.live = false;
      this.tail.replaceChildren();
      delete this.tail.dataset.key;
    }
  }

  row({ process, place, at, level, text, more }) {
    const [part, offset] = place.split(":");
    const line = `${process}:${place}`;
    const words = h("span", { class: "text" }, text);
    const cut = more ? h("button", { class: "link more", onclick: () => this.whole(line, words, cut) }, `… ${more.toLocaleString()} more bytes`) : null;
    return h("div", { class: `line ${level ?? ""}`, "data-line": line, "data-process": process, "data-part": part, "data-offset": offset },
      h("a", { class: "at", href: write({ cluster: this.cluster, line }), tabindex: -1, title: `${at}: a link to this line` }, timeOf(at)), " ",
      h("span", { class: `from of${Math.max(0, this.processes.indexOf(process)) % 8}` }, process), " ", words, cut);
  }

  /** Opens a line that was cut. */
  async whole(line, words, cut) {
    cut.disabled = true;
    try {
      const response = await fetch(this.actions.url(`log/line?line=${encodeURIComponent(line)}`));
      const told = await response.json();
      if (!response.ok) throw new Error(told.error);
      const runs = [];
      for (let at = 0; at < told.text.length; at += RUN) runs.push(h("span", {}, told.text.slice(at, at + RUN)));
      words.replaceChildren(...runs);
      words.classList.add("whole");
      cut.replaceWith(told.more ? h("i", { class: "muted" }, ` … ${told.more.toLocaleString()} more bytes are in the file of the log alone`) : "");
    } catch (error) {
      cut.disabled = false;
      this.tell(error.message);
    }
  }

  /** Marks a line, if it is on the page. */
  mark(line) {
    for (const row of this.box.querySelectorAll(".marked")) row.classList.remove("marked");
    const row = this.box.querySelector(`[data-line="${CSS.escape(line)}"]`);
    if (!row) return false;
    row.classList.add("marked");
    this.box.scrollTop += row.getBoundingClientRect().top - this.box.getBoundingClientRect().top - this.box.clientHeight / 3;
    return true;
  }

  follow(on) {
    this.pressedIs(on);
    if (!on) return;
    if (this.live) this.toEnd();
    else this.reset();
  }

  pressedIs(on) {
    this.following = on;
    this.button.setAttribute("aria-pressed", String(on));
  }

  toEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  async tick() {
    this.begin();
    if (!this.active || !this.begun || this.busy) return;
    // A search that nobody saw goes on.
    if (!this.start && this.rows < ENOUGH) this.fill();
    if (!this.following || this.busy) return;
    for (let pages = 0; pages < FOLLOWED; pages += 1) {
      if (!await this.newer() || this.live) return;
    }
    if (this.searched) return;
    // Faster than anyone can read.
    this.skipping = true;
    this.reset().finally(() => { this.skipping = null; });
  }

  /** Pixels below what is in sight. */
  get below() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight;
  }

  scrolled() {
    const isAtEnd = this.below <= 8;
    // A line that a link leads to stays until somebody scrolls.
    if (this.begun && isAtEnd !== this.following) this.pressedIs(this.live && isAtEnd && !this.held);
    this.near();
  }

  /** Fetches what comes before or after, if little of that is left. */
  near() {
    if (this.busy || !this.begun || !this.active) return;
    if (this.box.scrollTop < NEAR && !this.start) this.older();
    else if (this.below < NEAR && !this.live) this.newer();
  }

  /** The arrow keys go from line to line, whose links are one stop of the Tab key. */
  pressed(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const row = event.target.closest(".line");
    if (!step || !row) return;
    const next = row[step]?.querySelector?.(".at");
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.reset(), TYPED_MS);
  }

  /** The choice of processes. */
  pick() {
    const chosen = [...this.chosen];
    this.summary.textContent = chosen.length ? (chosen.length > 2 ? `${chosen.length} processes` : chosen.join(", ")) : "All processes";
    const path = `log/file${chosen.length ? `?process=${encodeURIComponent(chosen.join(","))}` : ""}`;
    if (this.cluster) this.file.setAttribute("href", this.actions.url(path));
    const key = this.processes.join(" ");
    if (this.list.dataset.key !== key) {
      this.list.dataset.key = key;
      this.list.replaceChildren(...this.processes.map((name) => h("label", {}, h("input", { type: "checkbox", value: name, onchange: (event) => this.choose(name, event.target.checked) }), name)));
    }
    for (const field of this.list.querySelectorAll("input")) field.checked = this.chosen.has(field.value);
  }

  choose(name, on) {
    if (on) this.chosen.add(name);
    else this.chosen.delete(name);
    this.reset();
  }

  /** Says what is shown, or what went wrong. */
  tell(problem) {
    if (this.stop) this.stop.tabIndex = -1;
    this.stop = this.tail.previousElementSibling?.querySelector(".at");
    if (this.stop) this.stop.tabIndex = 0;
    const filtered = this.text.value || this.level.value;
    const words = problem ? [problem] : [
      this.begun ? `${this.rows.toLocaleString()} line${this.rows === 1 ? "" : "s"}${filtered ? " found" : ""}` : "",
      this.searched ? `searched back to ${clock(this.searched)}` : "",
      this.start && filtered ? "all was searched" : "",
      this.skipped ? "some were too many to be shown" : "",
      this.missing.size ? `older output of ${[...this.missing].join(", ")} is missing: the log was rotated` : "",
    ];
    const text = words.filter(Boolean).join(" · ");
    put(this.facts, text);
    this.box.classList.toggle("empty", this.begun && !this.rows && this.start);
  }
}

/** Places in several logs, as a request names them. */
export function cursor(places) {
  return Object.entries(places).map(([process, place]) => `${process}:${place}`).join(",");
}
