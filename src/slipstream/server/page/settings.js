// The fields for sampling: kept in the browser, sent only where filled in, with the server's objection beside them.

import { announce, byId, h } from "./dom.js";
import { lasting } from "./storage.js";

/**
 * @typedef {object} Field
 * @property {string} name of the request's field
 * @property {string} label
 * @property {string} help
 * @property {"real" | "whole" | "lines" | "text"} kind
 * @property {number} [step] of the arrow keys
 * @property {number} [low] where the arrow keys stop
 * @property {number} [high]
 * @property {string} [empty] shown where the server has no default
 */

/** @type {Field[]} */
const FIELDS = [
  { name: "system", label: "System prompt", kind: "text", help: "Stands before the conversation.", empty: "The model's own" },
  { name: "temperature", label: "Temperature", kind: "real", step: 0.1, low: 0, help: "0 is greedy" },
  { name: "top_p", label: "Top p", kind: "real", step: 0.05, low: 0.05, high: 1, help: "Above 0, up to 1" },
  { name: "top_k", label: "Top k", kind: "whole", step: 1, low: 0, help: "0 keeps all tokens" },
  { name: "min_p", label: "Min p", kind: "real", step: 0.01, low: 0, high: 1, help: "0 to 1, 0 is off" },
  { name: "repetition_penalty", label: "Repeat penalty", kind: "real", step: 0.05, low: 0.05, help: "Above 1: fewer repeats" },
  { name: "max_tokens", label: "Max tokens", kind: "whole", step: 16, low: 0, empty: "no limit", help: "Of one answer" },
  { name: "seed", label: "Seed", kind: "whole", step: 1, empty: "random", help: "The same seed gives the same answer" },
  { name: "stop", label: "Stop strings", kind: "lines", empty: "one in each line", help: "The answer ends before the first of them. \\n stands for a new line." },
];

const NUMBER = { real: /^[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?$/i, whole: /^[+-]?\d+$/ };

/** A line of the field as a stop string. @param {string} line */
function unescapeLine(line) {
  return line.replace(/\\([nt\\])/g, (_, mark) => ({ n: "\n", t: "\t", "\\": "\\" })[mark]);
}

export class Settings {
  constructor() {
    this.form = byId("settings-form");
    /** @type {Map<string, HTMLInputElement | HTMLTextAreaElement>} */
    this.inputs = new Map();
    const kept = lasting.read("settings") ?? {};
    for (const field of FIELDS) this.form.append(this.#draw(field, kept[field.name]));
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("settings-reset").addEventListener("click", () => this.reset());
  }

  /** @param {Field} field @param {unknown} value */
  #draw(field, value) {
    const id = `set-${field.name}`;
    const long = field.kind === "text" || field.kind === "lines";
    const wide = long || field.name === "seed";
    const input = h(long ? "textarea" : "input", {
      id, name: field.name, placeholder: field.empty ?? "", spellcheck: field.kind === "text" ? null : "false",
      "aria-describedby": `${id}-help ${id}-error`, rows: long ? (field.kind === "text" ? 3 : 2) : null,
      type: long ? null : "text", inputmode: long || field.name === "seed" ? null : field.kind === "real" ? "decimal" : "numeric",
    });
    input.value = typeof value === "string" ? value : "";
    input.addEventListener("input", () => {
      this.clearError(field.name);
      this.save();
    });
    if (!long) input.addEventListener("keydown", (event) => this.#step(event, field));
    this.inputs.set(field.name, input);
    return h("div", { class: wide ? "field wide" : "field" },
      h("label", { for: id }, field.label), input,
      h("p", { class: "help", id: `${id}-help` }, field.help),
      h("p", { class: "field-error", id: `${id}-error`, hidden: true }));
  }

  /** The arrow keys count up and down. @param {KeyboardEvent} event @param {Field} field */
  #step(event, field) {
    const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    const input = this.inputs.get(field.name);
    const from = (input.value || input.placeholder).replace(",", ".");
    if (!way || !field.step) return;
    event.preventDefault();
    const start = Number.isFinite(Number.parseFloat(from)) ? Number.parseFloat(from) : 0;
    const next = Math.min(Math.max(start + way * field.step, field.low ?? -Infinity), field.high ?? Infinity);
    input.value = String(Number(next.toFixed(4)));
    input.dispatchEvent(new Event("input"));
  }

  save() {
    lasting.write("settings", Object.fromEntries([...this.inputs].map(([name, input]) => [name, input.value])));
  }

  reset() {
    for (const [name, input] of this.inputs) {
      input.value = "";
      this.clearError(name);
    }
    this.save();
    announce("Settings are back at the defaults.");
  }

  /** Show the server's defaults in the empty fields. @param {Record<string, number | null>} defaults */
  showDefaults(defaults) {
    for (const field of FIELDS) {
      const value = defaults[field.name];
      if (typeof value === "number") this.inputs.get(field.name).placeholder = String(value);
    }
  }

  get system() {
    return this.inputs.get("system").value;
  }

  /** @returns {number | null} */
  get maxTokens() {
    const value = Number.parseInt(this.inputs.get("max_tokens").value, 10);
    return Number.isFinite(value) ? value : null;
  }

  /**
   * What is filled in, as the members of a JSON object: seeds have more digits than a JavaScript number.
   *
   * @returns {string[] | null} null if something is no number; then its field says so
   */
  members() {
    const members = [];
    let fine = true;
    this.clearErrors();
    for (const { name, label, kind } of FIELDS) {
      const text = this.inputs.get(name).value;
      if (name === "system" || !text.trim()) continue;
      if (kind === "lines") {
        members.push(`"${name}":${JSON.stringify(text.split("\n").filter(Boolean).map(unescapeLine))}`);
      } else if (NUMBER[kind].test(text.trim()) && Number.isFinite(Number(text.trim().replace(",", ".")))) {
        const plain = text.trim().replace(",", ".");
        members.push(`"${name}":${kind === "whole" ? BigInt(plain.replace("+", "")) : Number(plain)}`);
      } else {
        this.showError(name, `${label} must be a ${kind === "whole" ? "whole " : ""}number.`);
        fine = false;
      }
    }
    return fine ? members : null;
  }

  /** @param {string | null} name of a request's field */
  has(name) {
    return name !== null && this.inputs.has(name);
  }

  /** @param {string} name @param {string} text */
  showError(name, text) {
    const place = byId(`set-${name}-error`);
    place.textContent = text;
    place.hidden = false;
    this.inputs.get(name).setAttribute("aria-invalid", "true");
    place.parentElement.scrollIntoView({ block: "nearest" });
  }

  /** @param {string} name */
  clearError(name) {
    byId(`set-${name}-error`).hidden = true;
    this.inputs.get(name).removeAttribute("aria-invalid");
  }

  clearErrors() {
    for (const name of this.inputs.keys()) this.clearError(name);
  }

  /** Put the cursor into the first field with an error. */
  focusError() {
    this.form.querySelector("[aria-invalid]")?.focus();
  }
}
