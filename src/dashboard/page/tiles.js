// Many workers at a glance: a tile for each, where the picture of the machine is wider than the window.

import { attribute, put, set } from "./dom.js";
import { h } from "./model.js";

/** Fewest workers that have tiles; fewer are seen in the picture. */
const LEAST = 17;

export class Tiles {
  constructor(place, select) {
    this.place = place;
    this.select = select;
  }

  update(model, selected) {
    const { workers } = model;
    this.place.hidden = workers.length < LEAST;
    if (this.place.hidden) return;
    const key = `${model.name} ${workers.map((worker) => worker.name).join(" ")}`;
    if (this.place.dataset.key !== key) {
      this.place.dataset.key = key;
      this.place.replaceChildren(...workers.map((worker) => h("button", { onclick: () => this.select(worker.name) }, h("span", { "aria-hidden": "true" }), worker.name)));
    }
    workers.forEach((worker, at) => {
      const tile = this.place.children[at];
      const { tone, mark, word } = model.standing(worker);
      const look = `tile ${tone}${worker.name === selected ? " selected" : ""}`;
      set(tile, "className", look);
      put(tile.firstChild, mark);
      attribute(tile, "aria-label", `${worker.name}, ${word}`);
    });
  }
}
