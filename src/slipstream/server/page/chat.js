// Sends questions, shows answers as they come, and deals with what goes wrong in between.

import { ApiError, streamChat } from "./api.js";
import { Conversation } from "./conversation.js";
import { announce, byId, clearAnnouncements, hideToast, number, sentence, toast } from "./dom.js";
import { AnswerView, QuestionView } from "./message_view.js";
import { Follower } from "./scroll.js";

/** @typedef {import("./message_view.js").Action} Action */

const MOST_TRIES = 8;
const LONGEST_WAIT_S = 60;

export class Chat {
  /**
   * @param {object} parts
   * @param {import("./settings.js").Settings} parts.settings
   * @param {() => Promise<string>} parts.modelName
   * @param {() => Promise<boolean>} parts.askKey
   * @param {() => void} parts.openSettings
   * @param {(text: string) => void} parts.putBack a question into the message box
   * @param {() => void} parts.focus the message box
   * @param {() => void} parts.onChange when an answer starts or ends
   */
  constructor(parts) {
    Object.assign(this, parts);
    this.conversation = Conversation.restore();
    this.place = byId("messages");
    this.follower = new Follower(byId("scroller"), byId("jump"));
    /** @type {(QuestionView | AnswerView)[]} */
    this.views = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.#drawAll();
    this.follower.toEnd();
    // What has come of an answer survives, too.
    window.addEventListener("pagehide", () => this.conversation.save());
    document.addEventListener("visibilitychange", () => this.conversation.save());
  }

  /** @returns {AnswerView | undefined} */
  get #lastView() {
    return /** @type {AnswerView | undefined} */ (this.views.at(-1));
  }

  #drawAll() {
    this.views = this.conversation.messages.map((message, at) => {
      if (message.role === "assistant") return new AnswerView(message, () => this.regenerate());
      return new QuestionView(message, () => this.#edit(at));
    });
    this.place.replaceChildren(...this.views.map((view) => view.element));
    byId("empty").hidden = this.views.length > 0;
    this.#update();
  }

  /** @param {Action[]} [actions] under the last answer's notice */
  #update(actions) {
    const running = this.running !== null;
    const lastQuestion = this.conversation.lastQuestion;
    const lastAnswer = this.views.length - 1;
    this.views.forEach((view, at) => {
      if (view instanceof QuestionView) view.update(at === lastQuestion && !running);
      else view.update({ running: running && at === lastAnswer, last: at === lastAnswer }, at === lastAnswer ? (actions ?? this.#actions()) : []);
    });
    this.follower.update();
    this.onChange();
  }

  /** What can be done about the last answer's notice. @returns {Action[]} */
  #actions() {
    const answer = this.conversation.last;
    const again = { label: "Try again", run: () => this.regenerate(), primary: true };
    switch (answer?.notice?.kind) {
      case undefined:
        return answer?.finish === "length" ? [{ label: "Open settings", run: () => this.openSettings() }] : [];
      case "context":
        return this.conversation.canDrop
          ? [{ label: "Drop the oldest messages", run: () => this.#dropOldest(), primary: true }, { label: "New chat", run: () => this.#startOver() }]
          : [{ label: "Edit the message", run: () => this.#edit(this.conversation.lastQuestion), primary: true }, { label: "New chat", run: () => this.#startOver() }];
      case "field":
        return [{ label: "Open settings", run: () => this.openSettings() }, again];
      case "key":
        return [{ label: "Enter the key", run: () => this.#askKeyAndRetry(), primary: true }];
      default:
        return [again];
    }
  }

  /** @param {string} text @returns {boolean} whether it was taken */
  send(text) {
    if (this.running || !text.trim()) return false;
    this.conversation.ask(text.trim());
    this.#drawAll();
    this.#answer();
    return true;
  }

  stop() {
    this.running?.abort();
  }

  regenerate() {
    if (this.running) return;
    this.conversation.askAgain();
    this.#drawAll();
    this.#answer();
  }

  clear() {
    this.stop();
    const before = this.conversation.clear();
    this.running = null;
    this.#drawAll();
    if (before.length === 0) return;
    const undo = () => {
      if (this.running || this.conversation.messages.length) return;
      this.conversation.messages = before;
      this.conversation.save();
      this.#drawAll();
      this.follower.toEnd();
    };
    toast("New chat started.", { label: "Undo", run: undo });
  }

  #startOver() {
    const question = this.conversation.messages[this.conversation.lastQuestion].content;
    this.clear();
    this.putBack(question);
    this.focus();
  }

  #dropOldest() {
    this.conversation.dropOldest();
    this.regenerate();
  }

  async #askKeyAndRetry() {
    if (await this.askKey()) this.regenerate();
  }

  /** @param {number} at */
  #edit(at) {
    const view = this.views[at];
    if (!(view instanceof QuestionView) || this.running) return;
    view.openEditor((text) => {
      this.conversation.askAgain(text);
      this.#drawAll();
      this.#answer();
    });
  }

  /** Get the answer to the last question, with further tries while the server is busy. */
  async #answer() {
    const abort = new AbortController();
    const { conversation } = this;
    const answer = conversation.last;
    const view = this.#lastView;
    this.running = abort;
    hideToast();
    clearAnnouncements();
    // What started this, a button or an editor, is no longer there.
    this.focus();
    this.follower.toEnd();
    this.#update();
    try {
      await this.#tryRepeatedly(answer, view, abort.signal);
    } catch (error) {
      this.#failed(error, answer, abort.signal);
    }
    // A new chat may have been started in the meantime.
    if (this.running !== abort) return;
    this.running = null;
    view.finish();
    conversation.save();
    this.#update();
    if (answer.notice) announce(answer.notice.text);
    else announce(answer.finish === "stopped" ? "Stopped." : "Answer complete.");
  }

  async #tryRepeatedly(answer, view, signal) {
    const members = this.settings.members();
    if (!members) throw new ApiError("A setting is not a number.", { kind: "http", status: 400, param: "settings" });
    answer.limit = this.settings.maxTokens;
    for (let tries = 1; ; tries += 1) {
      try {
        return await this.#stream(members, answer, view, signal);
      } catch (error) {
        // A model may load for minutes; the reader can cancel.
        const again = error.status === 503 && (tries < MOST_TRIES || error.code === "loading");
        if (error.status === 401 && tries < MOST_TRIES && (await this.askKey())) continue;
        if (!again) throw error;
        if (tries === 1) announce(`${sentence(error.message)} The message will be sent again.`);
        await this.#countdown(Math.min(error.retryAfter ?? 2 ** tries, LONGEST_WAIT_S), error, view, signal);
      }
    }
  }

  /** @param {number} wait seconds @param {ApiError} error @param {AnswerView} view @param {AbortSignal} signal */
  #countdown(wait, error, view, signal) {
    view.wait.hidden = true;
    return new Promise((resolve, reject) => {
      const until = performance.now() + wait * 1000;
      const done = (/** @type {() => void} */ settle) => {
        clearInterval(timer);
        signal.removeEventListener("abort", stopped);
        view.showNotice(null, "hint");
        view.wait.hidden = false;
        settle();
      };
      const stopped = () => done(() => reject(new DOMException("stopped", "AbortError")));
      const now = { label: "Try now", run: () => done(() => resolve(undefined)), primary: true };
      const show = () => {
        const left = Math.ceil((until - performance.now()) / 1000);
        if (left <= 0) done(() => resolve(undefined));
        else view.showNotice(`${sentence(error.message)} Trying again in ${left} s.`, "hint", [now, { label: "Cancel", run: () => this.stop() }]);
        this.follower.update();
      };
      const timer = setInterval(show, 1000);
      signal.addEventListener("abort", stopped);
      show();
    });
  }

  /** @param {string[]} members @param {import("./conversation.js").Message} answer @param {AnswerView} view @param {AbortSignal} signal */
  async #stream(members, answer, view, signal) {
    const model = await this.modelName();
    const head = JSON.stringify({
      model,
      messages: this.conversation.toRequest(this.settings.system),
      stream: true,
      stream_options: { include_usage: true },
    });
    const body = `${[head.slice(0, -1), ...members].join(",")}}`;
    const figures = { firstMs: null, spanMs: null, chunks: 0, tokens: null, promptTokens: null, cachedTokens: null };
    const start = performance.now();
    let drawn = true;
    for await (const chunk of streamChat(body, signal)) {
      const choice = chunk.choices[0];
      if (choice?.delta?.content) {
        answer.content += choice.delta.content;
        answer.figures = figures;
        figures.chunks += 1;
        figures.firstMs ??= performance.now() - start;
        figures.spanMs = performance.now() - start - figures.firstMs;
        if (drawn) {
          drawn = false;
          requestAnimationFrame(() => {
            drawn = true;
            view.draw();
            this.follower.update();
          });
        }
      }
      if (choice?.finish_reason) answer.finish = choice.finish_reason;
      if (chunk.usage) {
        answer.figures = figures;
        figures.tokens = chunk.usage.completion_tokens;
        figures.promptTokens = chunk.usage.prompt_tokens;
        figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? null;
      }
    }
  }

  /** @param {any} error @param {import("./conversation.js").Message} answer @param {AbortSignal} signal */
  #failed(error, answer, signal) {
    if (signal.aborted) {
      answer.finish = "stopped";
      return;
    }
    answer.finish = null;
    answer.notice = this.#notice(error, answer);
  }

  /** @returns {import("./conversation.js").Notice} */
  #notice(error, answer) {
    if (!(error instanceof ApiError)) {
      console.error(error);
      return { kind: "other", text: `The page failed: ${error.message}` };
    }
    const { message, status, kind, param } = error;
    if (param === "settings") return { kind: "field", text: message };
    if (error.code === "context_length_exceeded") {
      const text = "The conversation is longer than the model's context.";
      return { kind: "context", text: `${text} ${sentence(message)}` };
    }
    if (status === 401) return { kind: "key", text: "The server wants a valid API key." };
    if (status === 503) return { kind: "busy", text: sentence(message) };
    if (this.settings.has(param)) {
      this.settings.showError(param, message);
      return { kind: "field", text: message };
    }
    if (kind === "network" && answer.content) return { kind: "lost", text: `${sentence(message)} What had come so far is kept.` };
    return { kind: kind === "network" ? "lost" : "other", text: sentence(message) };
  }

  /** How much of the context the last answer left in use. @returns {number | null} tokens */
  get contextUsed() {
    const figures = this.conversation.last?.figures;
    return figures && figures.promptTokens !== null ? figures.promptTokens + (figures.tokens ?? 0) : null;
  }

  /** @param {number} context tokens the model can hold @returns {string} */
  contextText(context) {
    const used = this.contextUsed;
    return used === null || !context ? "" : `${number(used)} of ${number(context)} tokens of context used`;
  }
}
