// The conversation as data: what was said, what of it is sent, and how it is kept.

import { lasting, tab } from "./storage.js";

/**
 * @typedef {object} Figures how an answer came about; times in milliseconds
 * @property {number | null} firstMs from the request to the first text
 * @property {number | null} spanMs from the first text to the last
 * @property {number} chunks pieces of text received
 * @property {number | null} tokens as the server counted them; null if it never said
 * @property {number | null} promptTokens
 * @property {number | null} cachedTokens
 *
 * @typedef {object} Notice
 * @property {string} kind "context", "busy", "key", "field", "lost" or "other"
 * @property {string} text
 *
 * @typedef {object} Message
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {boolean} [dropped] not sent any more
 * @property {"stop" | "length" | "stopped" | null} [finish] null while it runs or if it broke
 * @property {number | null} [limit] the max_tokens it ran under
 * @property {Figures | null} [figures]
 * @property {Notice | null} [notice]
 */

/** Questions and answers take turns: each question has its answer behind it, an empty one until text comes. */
export class Conversation {
  constructor() {
    /** @type {Message[]} */
    this.messages = [];
  }

  /** The conversation of this tab, or the latest one of any tab. */
  static restore() {
    const conversation = new Conversation();
    const kept = tab.read("messages") ?? lasting.read("messages");
    if (!Array.isArray(kept) || kept.length % 2) return conversation;
    const sound = kept.every((message, at) =>
      message?.role === (at % 2 ? "assistant" : "user") && typeof message.content === "string");
    if (sound) conversation.messages = kept;
    const answer = conversation.last;
    if (answer && !answer.finish && !answer.notice) {
      answer.notice = { kind: "lost", text: "The page was left while this answer was written." };
    }
    return conversation;
  }

  /** @returns {Message} */
  static answer() {
    return { role: "assistant", content: "", finish: null, limit: null, figures: null, notice: null };
  }

  save() {
    tab.write("messages", this.messages);
    lasting.write("messages", this.messages);
  }

  get last() {
    return this.messages.at(-1);
  }

  /** @returns {number} of the last message of the user, -1 if there is none */
  get lastQuestion() {
    return this.messages.findLastIndex((message) => message.role === "user");
  }

  /** Add a question and an empty answer to it. @param {string} text */
  ask(text) {
    this.messages.push({ role: "user", content: text }, Conversation.answer());
    this.save();
  }

  /** Take back the answer to the last question, and change the question if a text is given. @param {string} [text] */
  askAgain(text) {
    const at = this.lastQuestion;
    const question = { ...this.messages[at], content: text ?? this.messages[at].content };
    this.messages.splice(at, Infinity, question, Conversation.answer());
    this.save();
  }

  /** @returns {Message[]} what was there */
  clear() {
    const before = this.messages;
    this.messages = [];
    this.save();
    return before;
  }

  /** The questions before the last one that are still sent, each with its answer. */
  #sentPairs() {
    const pairs = [];
    for (let at = 0; at + 1 < this.lastQuestion; at += 2) {
      const [question, answer] = this.messages.slice(at, at + 2);
      if (!question.dropped && answer.content.trim()) pairs.push([question, answer]);
    }
    return pairs;
  }

  get canDrop() {
    return this.#sentPairs().length > 0;
  }

  /** Leave the older half of the earlier questions and answers out of what is sent. */
  dropOldest() {
    const pairs = this.#sentPairs();
    for (const pair of pairs.slice(0, Math.ceil(pairs.length / 2))) {
      for (const message of pair) message.dropped = true;
    }
    this.save();
  }

  /**
   * What is sent to answer the last question. A question that got no answer is left out together with it: chat
   * templates want the roles to alternate.
   *
   * @param {string} system
   * @returns {{role: string, content: string}[]}
   */
  toRequest(system) {
    const sent = this.#sentPairs().flat();
    sent.push(this.messages[this.lastQuestion]);
    const messages = sent.map(({ role, content }) => ({ role, content }));
    return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
  }
}
