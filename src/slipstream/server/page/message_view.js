// One message on the page: its text, the figures under an answer, notices and what can be done with it.

import { announce, copyButton, h, icon, number } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** @typedef {import("./conversation.js").Message} Message */
/** @typedef {import("./conversation.js").Figures} Figures */
/** @typedef {{label: string, run: () => void, primary?: boolean}} Action */

/** @param {Figures} figures @returns {number | null} tokens per second between the first token and the last */
export function tokensPerSecond({ tokens, spanMs }) {
  return tokens !== null && tokens > 1 && spanMs !== null && spanMs > 0 ? (tokens - 1) / (spanMs / 1000) : null;
}

/** @param {number} ms */
function seconds(ms) {
  return ms < 9950 ? `${number(ms / 1000, 2)} s` : `${number(ms / 1000, 1)} s`;
}

/** @param {Message} message @returns {[string, string, string][]} name, shown text, explanation */
function figureTexts({ figures, finish, notice }) {
  if (!figures) return [];
  const shown = [];
  const rate = tokensPerSecond(figures);
  if (rate !== null) shown.push(["rate", `${number(rate, 1)} tokens/s`, "(tokens - 1) / time from the first token to the last, measured in this browser"]);
  if (figures.firstMs !== null) shown.push(["first", `first token ${seconds(figures.firstMs)}`, "Time from sending to the first text"]);
  if (figures.tokens !== null) {
    shown.push(["tokens", figures.tokens === 1 ? "1 token" : `${number(figures.tokens)} tokens`, "Tokens of the answer, as the server counted them"]);
  } else if (figures.chunks && (finish || notice)) {
    shown.push(["tokens", `about ${number(figures.chunks)} tokens`, "Pieces of text received: the server counts only answers that were not cut off"]);
  }
  if (figures.promptTokens !== null) {
    const cached = figures.cachedTokens ? `, ${number(figures.cachedTokens)} cached` : "";
    shown.push(["prompt", `prompt ${number(figures.promptTokens)}${cached}`, "Tokens of the prompt, and how many of them were in the prefix cache"]);
  }
  if (finish) shown.push(["finish", { stop: "complete", length: "cut off", stopped: "stopped by you" }[finish] ?? finish, "Why the answer ended"]);
  return shown;
}

/** @param {Message} message @returns {string | null} */
function lengthText({ finish, limit, figures }) {
  if (finish !== "length") return null;
  const reached = limit !== null && limit !== undefined && (figures?.tokens ?? limit) >= limit;
  return reached
    ? `The answer was cut off at ${number(limit)} tokens, the limit set in Max tokens.`
    : "The answer was cut off because the model's context is full.";
}

/** A message of the user. */
export class QuestionView {
  /** @param {Message} message @param {() => void} onEdit */
  constructor(message, onEdit) {
    this.message = message;
    this.edit = h("button", { type: "button", class: "tool", "aria-label": "Edit message", title: "Edit", onclick: onEdit, hidden: true }, icon("edit"));
    this.body = h("div", { class: "bubble" }, message.content);
    this.element = h("article", { class: "message question" },
      h("h3", { class: "visually-hidden" }, "You"), this.body,
      h("div", { class: "tools" }, this.edit, copyButton(() => message.content, "Copy message", "tool")));
  }

  /** @param {boolean} editable */
  update(editable) {
    this.edit.hidden = !editable;
    this.element.classList.toggle("dropped", Boolean(this.message.dropped));
  }

  /** Put a field in place of the text. @param {(text: string) => void} onSave */
  openEditor(onSave) {
    const area = h("textarea", { "aria-label": "Edit message", rows: Math.min(this.message.content.split("\n").length + 1, 12) });
    area.value = this.message.content;
    const close = () => {
      editor.replaceWith(this.body);
      this.element.classList.remove("editing");
      this.edit.focus();
    };
    const save = () => area.value.trim() && onSave(area.value.trim());
    const editor = h("form", { class: "editor" }, area,
      h("div", { class: "dialog-actions" },
        h("button", { type: "button", class: "button small", onclick: close }, "Cancel"),
        h("button", { type: "submit", class: "button small primary" }, "Send again")));
    editor.addEventListener("submit", (event) => {
      event.preventDefault();
      save();
    });
    editor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        save();
      }
    });
    this.body.replaceWith(editor);
    this.element.classList.add("editing");
    area.focus();
  }
}

/** An answer, or what stands in its place. */
export class AnswerView {
  /** @param {Message} message @param {() => void} onRedo */
  constructor(message, onRedo) {
    this.message = message;
    this.text = h("div", { class: "text" });
    this.markdown = new MarkdownView(this.text);
    this.wait = h("p", { class: "wait", hidden: true }, h("span", { class: "wait-dots", "aria-hidden": "true" }, h("i"), h("i"), h("i")), h("span", {}, "Waiting for the first token"));
    this.notice = h("div", { class: "notice", hidden: true });
    this.figures = h("p", { class: "answer-figures" });
    this.redo = h("button", { type: "button", class: "tool", "aria-label": "Regenerate answer", title: "Regenerate", onclick: onRedo, hidden: true }, icon("redo"));
    this.copy = copyButton(() => message.content, "Copy answer", "tool");
    this.foot = h("div", { class: "answer-foot" }, h("div", { class: "tools" }, this.copy, this.redo), this.figures);
    this.element = h("article", { class: "message answer" },
      h("h3", { class: "visually-hidden" }, "Answer"), this.text, this.wait, this.notice, this.foot);
    this.spoken = 0;
    this.markdown.update(message.content);
  }

  /** @param {{running: boolean, last: boolean}} state @param {Action[]} [actions] under the notice */
  update({ running, last }, actions = []) {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(running));
    this.element.classList.toggle("running", running);
    this.element.classList.toggle("dropped", Boolean(message.dropped));
    this.wait.hidden = !running || message.content !== "" || message.notice !== null;
    this.copy.hidden = message.content === "" || running;
    this.redo.hidden = !last || running;
    this.#showFigures();
    const length = lengthText(message);
    const empty = !running && message.content === "" && message.finish === "stop" ? "The model ended its answer at once." : null;
    this.showNotice(message.notice?.text ?? length ?? empty, message.notice ? "error" : "hint", actions);
  }

  #showFigures() {
    this.figures.replaceChildren(...figureTexts(this.message).map(([name, text, why]) => h("span", { "data-figure": name, title: why }, text)));
  }

  /** @param {string | null} text @param {"error" | "hint"} kind @param {Action[]} actions */
  showNotice(text, kind, actions = []) {
    this.notice.hidden = text === null;
    this.notice.className = `notice ${kind}`;
    if (text === null) return;
    const buttons = actions.map(({ label, run, primary }) =>
      h("button", { type: "button", class: primary ? "button small primary" : "button small", onclick: run }, label));
    this.notice.replaceChildren(icon("warn"), h("div", { class: "notice-body" }, h("p", {}, text),
      buttons.length ? h("div", { class: "notice-actions" }, ...buttons) : null));
  }

  /** Draw the text as far as it has come, and read finished paragraphs out. */
  draw() {
    this.wait.hidden = true;
    this.#speak(this.markdown.update(this.message.content) - 1);
  }

  /** @param {number} upTo blocks */
  #speak(upTo) {
    for (; this.spoken < upTo; this.spoken += 1) announce(this.text.children[this.spoken].textContent);
  }

  /** The last paragraph is complete. */
  finish() {
    this.#speak(this.markdown.update(this.message.content));
  }
}
