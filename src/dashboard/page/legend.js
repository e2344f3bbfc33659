// The keys of the picture's marks and colours, and which clock the page's times are of.

import { STANDINGS, h } from "./model.js";

/** What the picture shows besides marks: the look of the key and its words. */
const SIGNS = [
  ["bar", "memory in use, of a worker's limit or of a GPU's memory"],
  ["bar full", "more than 90 % of it"],
  ["wire", "a wire; the thicker, the more bytes"],
  ["arc", "a lane of the selected worker"],
  ["arc bad", "a connection that is not as planned"],
];

export function legend(place) {
  const marks = Object.values(STANDINGS).map(([tone, mark, word]) => h("li", {}, h("span", { class: `sign ${tone}`, "aria-hidden": "true" }, mark), word));
  const signs = SIGNS.map(([look, words]) => h("li", {}, h("span", { class: `sign ${look}`, "aria-hidden": "true" }), words));
  place.replaceChildren(...marks, ...signs);
}

/** The time zone of all times of the page, such as `times are those of Europe/Berlin (UTC+01:00)`. */
export function zone(now = new Date()) {
  const minutes = -now.getTimezoneOffset();
  const [hours, rest] = [Math.floor(Math.abs(minutes) / 60), Math.abs(minutes) % 60].map((part) => String(part).padStart(2, "0"));
  const offset = minutes ? ` (UTC${minutes < 0 ? "−" : "+"}${hours}:${rest})` : "";
  const name = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return `all times of this page are those of ${name ?? "this browser"}${offset}`;
}
