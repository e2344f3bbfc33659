// What went from which worker to which in a part of the time, read from the history.

/** Time between two readings while that is shown; what there is to show is looked for less often. */
const AGAIN_MS = 10e3;
const LOOK_MS = 60e3;

export class Flows {
  /** `read` reads a path of the cluster; `part` says which part of the time is shown, and its name. */
  constructor({ read, part, changed }) {
    Object.assign(this, { read, part, changed, model: null, asked: 0, at: 0, isLast: false });
    setInterval(() => { if (!document.hidden && this.isDue) this.load(); }, AGAIN_MS / 2);
  }

  get isDue() {
    if (!this.model || this.isLast) return false;
    return Date.now() - this.at >= (this.model.shows === "past" ? AGAIN_MS : LOOK_MS);
  }

  open(model) {
    this.model = model;
    this.isLast = false;
    this.load();
  }

  close() {
    this.model = null;
  }

  async load() {
    const { model } = this;
    if (!model) return;
    const asked = ++this.asked;
    this.at = Date.now();
    const { query, name } = this.part();
    const isLast = Boolean(model.end);
    try {
      const flows = await this.read(`history/pairs?${query}`);
      if (asked !== this.asked || model !== this.model) return;
      this.isLast = isLast;
      model.flowsLack = "";
      // Of a cluster that was stopped no files are left, and the page keeps what it has.
      if (flows.until || !isLast || !model.flows) model.setFlows(flows, name);
      this.changed();
    } catch (error) {
      if (asked !== this.asked || model !== this.model) return;
      model.flowsLack = error.message;
      this.changed();
    }
  }
}
