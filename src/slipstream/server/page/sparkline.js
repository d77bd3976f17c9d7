// A small curve of the last minute.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 48;

export class Sparkline {
  /** @param {SVGElement} place @param {number} seconds how far back it goes */
  constructor(place, seconds) {
    this.seconds = seconds;
    /** @type {{at: number, value: number | null}[]} */
    this.samples = [];
    place.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.area = svg("path", { class: "spark-area" });
    this.line = svg("path", { class: "spark-line", "vector-effect": "non-scaling-stroke" });
    place.append(svg("line", { class: "spark-base", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), this.area, this.line);
  }

  /** @param {number | null} value null: nothing was measured, the curve has a gap */
  add(value) {
    const now = performance.now() / 1000;
    this.samples.push({ at: now, value });
    this.samples = this.samples.filter(({ at }) => now - at <= this.seconds);
    this.#draw(now);
  }

  /** @returns {number} of the last minute */
  get peak() {
    return Math.max(0, ...this.samples.map(({ value }) => value ?? 0));
  }

  /** @param {number} now seconds */
  #draw(now) {
    const top = Math.max(this.peak, 1);
    let line = "";
    let area = "";
    let from = null;
    let x = 0;
    const close = () => {
      if (from !== null) area += `L${x},${HEIGHT}L${from},${HEIGHT}Z`;
      from = null;
    };
    for (const { at, value } of this.samples) {
      if (value === null) {
        close();
        continue;
      }
      x = Number((WIDTH * (1 - (now - at) / this.seconds)).toFixed(1));
      const y = Number((HEIGHT - 1 - (value / top) * (HEIGHT - 4)).toFixed(1));
      const step = `${from === null ? "M" : "L"}${x},${y}`;
      from ??= x;
      line += step;
      area += step;
    }
    close();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
