// Tells by the browser's notifications when something goes bad, if somebody has asked for that.

import { headline, troubles } from "./headline.js";
import { visible } from "./model.js";

/** How long news are collected: a machine that fails takes all of its workers with it. */
const COLLECTED_MS = 700;
/** Most sentences of a notification. */
const MOST = 3;
const WISH = "cuda-cluster notify";

export class Notifier {
  constructor(button) {
    this.button = button;
    this.wanted = wish();
    this.fresh = [];
    button.addEventListener("click", () => this.toggle());
    this.show();
  }

  get possible() {
    // There are none on a page that was not loaded over HTTPS or from this machine.
    return "Notification" in window && isSecureContext;
  }

  get on() {
    return this.possible && this.wanted && Notification.permission === "granted";
  }

  async toggle() {
    this.wanted = !this.on;
    // A browser asks only after a click.
    if (this.wanted && Notification.permission === "default") await Notification.requestPermission();
    keep(this.wanted);
    this.show();
  }

  show() {
    const { button } = this;
    button.hidden = !this.possible;
    if (!this.possible) return;
    const blocked = Notification.permission === "denied";
    button.disabled = blocked;
    button.textContent = blocked ? "Notifications are blocked by the browser" : this.on ? "Notifications are on" : "Notify me of trouble";
    button.setAttribute("aria-pressed", String(this.on));
  }

  /** Looks for what is bad that was not before. What is bad already when the page is opened is on the page. */
  heed(model) {
    if (!model.state) return;
    const now = troubles(model);
    const before = this.model === model ? this.before : now;
    [this.model, this.before] = [model, now];
    const fresh = [...now].filter(([key]) => !before.has(key)).map(([, text]) => text);
    if (!fresh.length || !this.on) return;
    this.fresh.push(...fresh);
    this.timer ??= setTimeout(() => this.tell(model), COLLECTED_MS);
  }

  tell(model) {
    const [fresh, more] = [this.fresh.slice(0, MOST), this.fresh.length - MOST];
    [this.fresh, this.timer] = [[], null];
    const body = [...fresh, ...(more > 0 ? [`and ${more} more`] : [])].map(visible).join("\n");
    const told = new Notification(`${model.name}: ${headline(model).word}`, { body, icon: "icon.svg", tag: `cuda-cluster ${model.name}`, renotify: true });
    told.addEventListener("click", () => window.focus());
  }
}

/** The wish of this browser, for this address. A browser that keeps nothing asks again. */
function wish() {
  try {
    return localStorage.getItem(WISH) === "yes";
  } catch {
    return false;
  }
}

function keep(wanted) {
  try {
    localStorage.setItem(WISH, wanted ? "yes" : "no");
  } catch {
    // It holds for as long as the page is open.
  }
}
