// The engine's figures: asked for once a second while the page can be seen, with growing pauses while nobody answers.

import { ApiError, KEY_CHANGED, getJson } from "./api.js";
import { byId, h, number } from "./dom.js";
import { Sparkline } from "./sparkline.js";

const EVERY_MS = 1000;
const ANSWER_WITHIN_MS = 5000;
const PAUSES_S = [1, 2, 4, 8, 15];

/** @type {Record<string, string>} */
const EXPLAINED = {
  "Prefill tokens/s": "Prompt tokens computed each second; those from the prefix cache do not count",
  Step: "How long the last step of the engine took",
  "Host part": "What of the last step was spent outside the model: scheduling, arrays, text",
  "Prefix hits": "Part of all prompt tokens that was found in the prefix cache",
  Preemptions: "How often a request had to give its cache back and was computed again",
};

/** @type {Record<string, string>} */
const STATES = {
  loading: "The model is loading.",
  draining: "The server is shutting down and takes no new messages.",
  stalled: "The engine is not getting on.",
  restarting: "The engine is starting again.",
  dead: "The engine has stopped; the server has to be started again.",
};

/** @typedef {Record<string, any>} Stats what GET /stats answers */

/** What happened between two readings, per second. @param {Stats | null} before @param {Stats} now */
export function ratesBetween(before, now) {
  const seconds = before ? now.uptime_s - before.uptime_s : 0;
  if (!(seconds > 0) || now.output_tokens < before.output_tokens) return { output: null, prefill: null };
  const computed = (/** @type {Stats} */ stats) => stats.prompt_tokens - stats.cached_prompt_tokens;
  return {
    output: (now.output_tokens - before.output_tokens) / seconds,
    prefill: Math.max(0, computed(now) - computed(before)) / seconds,
  };
}

/** @param {number} ms */
function milliseconds(ms) {
  return `${number(ms, ms < 10 ? 2 : 1)} ms`;
}

export class StatsPanel {
  /**
   * @param {object} parts
   * @param {(stats: Stats) => void} parts.onStats
   * @param {() => Promise<boolean>} parts.askKey
   */
  constructor({ onStats, askKey }) {
    this.onStats = onStats;
    this.askKey = askKey;
    /** @type {Stats | null} */
    this.last = null;
    this.failures = 0;
    this.timer = 0;
    this.asking = false;
    this.refused = false;
    this.spark = new Sparkline(byId("spark"), 60);
    /** @type {Map<string, HTMLElement>} */
    this.figures = new Map();
    for (const name of ["Running", "Waiting", "Prefill tokens/s", "Step", "Host part", "Prefix hits", "Preemptions", "Context"]) {
      const value = h("dd", {}, "–");
      byId("figures").append(h("div", { title: EXPLAINED[name] ?? null }, h("dt", {}, name), value));
      this.figures.set(name, value);
    }
    document.addEventListener("visibilitychange", () => this.#wake());
    window.addEventListener("online", () => this.#wake());
    window.addEventListener(KEY_CHANGED, () => {
      this.refused = false;
      this.#wake();
    });
  }

  start() {
    this.#poll();
  }

  /** Ask now, if the page can be seen and no question is under way. */
  #wake() {
    if (document.visibilityState !== "visible") {
      clearTimeout(this.timer);
      // What passes while nobody looks is no rate of a second.
      this.last = null;
      return;
    }
    this.#poll();
  }

  async #poll() {
    if (this.asking) return;
    clearTimeout(this.timer);
    this.asking = true;
    let pause = EVERY_MS;
    try {
      const stats = await getJson("stats", AbortSignal.timeout(ANSWER_WITHIN_MS));
      this.failures = 0;
      this.#show(stats);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) pause = await this.#wantsKey();
      else pause = this.#gone(error);
    }
    this.asking = false;
    if (document.visibilityState === "visible") this.timer = setTimeout(() => this.#poll(), pause);
  }

  /** @returns {Promise<number>} milliseconds to wait */
  async #wantsKey() {
    if (!this.refused && (await this.askKey())) return 0;
    this.refused = true;
    this.#state("key", "needs a key", "");
    this.#banner("This server asks for an API key.", { label: "Enter the key", run: () => this.askKey() });
    return 60_000;
  }

  /** @param {any} error @returns {number} milliseconds to wait */
  #gone(error) {
    const pause = PAUSES_S[Math.min(this.failures, PAUSES_S.length - 1)];
    this.failures += 1;
    this.last = null;
    this.spark.add(null);
    byId("rate").textContent = "–";
    byId("engine-brief").textContent = "";
    const refused = error instanceof ApiError && error.kind === "http";
    this.#state("gone", refused ? "no figures" : "no connection", "");
    // One lost reading is no reason to worry anybody.
    if (this.failures > 1) {
      const text = refused ? `The server gives no figures: ${error.message}` : "No connection to the server.";
      this.#banner(`${text} Trying again every ${pause} s.`, { label: "Try now", run: () => this.#wake() });
    }
    return pause * 1000;
  }

  /** @param {string} text @param {{label: string, run: () => void} | null} action */
  #banner(text, action) {
    const banner = byId("banner");
    // Drawn once: a screen reader would say it again, and a focus on the button would be lost.
    if (banner.dataset.text === text && !banner.hidden) return;
    const button = action && h("button", { type: "button", class: "button small", onclick: action.run }, action.label);
    banner.dataset.text = text;
    banner.dataset.state = "gone";
    banner.replaceChildren(h("span", {}, text), ...(button ? [button] : []));
    banner.hidden = false;
  }

  /** Say above the chat if the engine takes no questions. @param {Stats} stats */
  #noteState({ state }) {
    if (STATES[state]) this.#banner(STATES[state], null);
    else byId("banner").hidden = true;
    byId("banner").dataset.state = state;
  }

  /** @param {string} state @param {string} text @param {string} detail */
  #state(state, text, detail) {
    byId("state").dataset.state = state;
    byId("state-text").textContent = text;
    byId("state-detail").textContent = detail;
    byId("state-detail").hidden = detail === "";
  }

  /** @param {Stats} stats */
  #show(stats) {
    this.#noteState(stats);
    const { output, prefill } = ratesBetween(this.last, stats);
    this.last = stats;
    this.spark.add(output);
    this.#state(stats.state, stats.state, stats.detail ?? "");
    byId("rate").textContent = output === null ? "–" : number(output, 1);
    byId("rate-peak").textContent = this.spark.peak > 0 ? `peak ${number(this.spark.peak, 1)}` : "";
    byId("engine-brief").textContent = stats.running ? `${number(output ?? 0, 1)} tokens/s, ${number(stats.running)} running` : "idle";
    this.#showCache(stats.cache_usage);
    const hits = stats.prompt_tokens ? `${number((100 * stats.cached_prompt_tokens) / stats.prompt_tokens)} %` : "–";
    const values = {
      Running: number(stats.running),
      Waiting: number(stats.waiting),
      "Prefill tokens/s": prefill === null ? "–" : number(prefill, 1),
      Step: stats.steps ? milliseconds(stats.step_ms) : "–",
      "Host part": stats.steps ? milliseconds(stats.host_ms) : "–",
      "Prefix hits": hits,
      Preemptions: number(stats.preemptions),
      Context: stats.context ? number(stats.context) : "–",
    };
    for (const [name, value] of Object.entries(values)) this.figures.get(name).textContent = value;
    byId("engine-foot").textContent = [stats.model, stats.device, `Slipstream ${stats.version}`].filter(Boolean).join(" · ");
    this.onStats(stats);
  }

  /** @param {number} usage from 0 to 1 */
  #showCache(usage) {
    const percent = Math.min(Math.max(100 * usage, 0), 100);
    const meter = byId("cache-meter");
    byId("cache-value").textContent = `${number(percent, percent > 0 && percent < 10 ? 1 : 0)} %`;
    meter.setAttribute("aria-valuenow", percent.toFixed(1));
    meter.firstElementChild.style.width = `${percent}%`;
    meter.dataset.level = percent > 90 ? "high" : "normal";
  }
}
