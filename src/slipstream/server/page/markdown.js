// A subset of Markdown as DOM nodes: paragraphs, headings, lists, quotes, tables, rules and fenced code.
//
// The text is cut into blocks first. While an answer grows only its last blocks change, so `MarkdownView` draws those
// again and leaves the others alone: a selection in them stays and the cost of a token does not grow with the answer.

import { copyButton, h } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const TABLE_LINE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const BLANK = /^\s*$/;
const DEEPEST = 8;

/** @typedef {{kind: string, source: string, start?: number, level?: number, language?: string}} Block */

/** @param {string[]} lines @param {number} at */
function startsTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_LINE.test(lines[at + 1])
    && cells(lines[at]).length === cells(lines[at + 1]).length;
}

/** @param {string[]} lines @param {number} at */
function interruptsParagraph(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  return BLANK.test(line) || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || (item !== null && item[4] !== "") || startsTable(lines, at);
}

/** @param {string[]} lines @param {number} at @returns {number} the line after the fence's end */
function fenceEnd(lines, at) {
  const mark = FENCE.exec(lines[at])[1];
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  return Math.min(end + 1, lines.length);
}

/** @param {string[]} lines @param {number} at @returns {number} the line after the list */
function listEnd(lines, at) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  let end = at + 1;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (BLANK.test(lines[end])) {
      let next = end;
      while (next < lines.length && BLANK.test(lines[next])) next += 1;
      if (next === lines.length) return end;
      const after = ITEM.exec(lines[next]);
      const goesOn = /^ {2,}/.test(lines[next]) || (after !== null && /\d/.test(after[2]) === ordered);
      if (!goesOn) return end;
      end = next;
    } else if (item) {
      if (item[1].length <= first[1].length && /\d/.test(item[2]) !== ordered) return end;
      end += 1;
    } else if (FENCE.test(lines[end].trimStart()) && /^ {2,}/.test(lines[end])) {
      end = fenceEnd(lines.map((line) => line.trimStart()), end);
    } else if (!/^ {2,}/.test(lines[end]) && interruptsParagraph(lines, end)) {
      return end;
    } else {
      end += 1;
    }
  }
  return end;
}

/**
 * Cut text into blocks.
 *
 * @param {string} text
 * @returns {Block[]}
 */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const found = [];
  const take = (kind, from, to, more = {}) => found.push({ kind, source: lines.slice(from, to).join("\n"), ...more });
  for (let at = 0; at < lines.length; ) {
    let end = at + 1;
    const line = lines[at];
    if (BLANK.test(line)) {
      at = end;
      continue;
    }
    if (FENCE.test(line)) {
      end = fenceEnd(lines, at);
      take("code", at, end, { language: FENCE.exec(line)[2].trim().split(/\s/)[0] });
    } else if (HEADING.test(line)) {
      take("heading", at, end, { level: HEADING.exec(line)[1].length });
    } else if (RULE.test(line)) {
      take("rule", at, end);
    } else if (QUOTE.test(line)) {
      while (end < lines.length && (QUOTE.test(lines[end]) || !interruptsParagraph(lines, end))) end += 1;
      take("quote", at, end);
    } else if (ITEM.test(line)) {
      end = listEnd(lines, at);
      take("list", at, end);
    } else if (startsTable(lines, at)) {
      end = at + 2;
      while (end < lines.length && lines[end].includes("|") && !BLANK.test(lines[end])) end += 1;
      take("table", at, end);
    } else {
      while (end < lines.length && !interruptsParagraph(lines, end)) end += 1;
      take("paragraph", at, end);
    }
    at = end;
  }
  return found;
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {Block} block */
function drawCode(block) {
  const lines = block.source.split("\n");
  const mark = FENCE.exec(lines[0])[1];
  const last = lines[lines.length - 1].trim();
  const closed = lines.length > 1 && last.length >= mark.length && last === mark[0].repeat(last.length);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, block.language || "text"), copyButton(() => text, "Copy code", "code-copy")),
    h("pre", { tabindex: "0", "aria-label": "Code" }, h("code", {}, text)));
}

/** @param {Block} block @param {number} depth */
function drawList(block, depth) {
  const lines = block.source.split("\n");
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  /** @type {string[][]} */
  const items = [];
  let inside = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) {
      inside = item[1].length + item[2].length + Math.max(1, Math.min(item[3].length, 4));
      items.push([item[4]]);
    } else {
      const margin = Math.min(inside, line.length - line.trimStart().length);
      items[items.length - 1].push(line.slice(margin));
    }
  }
  const ordered = /\d/.test(first[2]);
  const loose = items.some((item) => item.slice(0, -1).some((line) => BLANK.test(line) && item[0] !== ""));
  const list = h(ordered ? "ol" : "ul", { start: ordered && Number.parseInt(first[2], 10) !== 1 ? Number.parseInt(first[2], 10) : null });
  for (const item of items) list.append(h("li", {}, ...drawItem(item.join("\n"), loose, depth)));
  return list;
}

/** @param {string} source @param {boolean} loose @param {number} depth */
function drawItem(source, loose, depth) {
  return blocks(source).flatMap((block) =>
    block.kind === "paragraph" && !loose ? inline(paragraphText(block.source)) : [draw(block, depth + 1)]);
}

/** @param {Block} block */
function drawTable(block) {
  const [head, marks, ...rows] = block.source.split("\n").map(cells);
  const align = marks.map((mark) => (/^:.*:$/.test(mark) ? "center" : mark.endsWith(":") ? "end" : null));
  const row = (tag, texts) =>
    h("tr", {}, ...align.map((side, index) => h(tag, { class: side && `align-${side}` }, ...inline(texts[index] ?? ""))));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", head)), h("tbody", {}, ...rows.map((texts) => row("td", texts)))));
}

/** Without the marks around it. @param {string} source */
function headingText(source) {
  return (HEADING.exec(source)[2] ?? "").trim().replace(/(^| )#+$/, "").trimEnd();
}

/** @param {string} source */
function paragraphText(source) {
  return source.split("\n").map((line) => line.trim()).join("\n");
}

/**
 * @param {Block} block
 * @param {number} depth how many lists and quotes it lies in
 * @returns {HTMLElement}
 */
function draw(block, depth = 0) {
  if (depth > DEEPEST) return h("p", {}, block.source);
  switch (block.kind) {
    case "code":
      return drawCode(block);
    case "heading":
      // The page's own headings are 1 to 3.
      return h(`h${Math.min(block.level + 3, 6)}`, { class: `level-${block.level}` }, ...inline(headingText(block.source)));
    case "rule":
      return h("hr");
    case "quote": {
      const inner = block.source.split("\n").map((line) => line.replace(QUOTE, "")).join("\n");
      return h("blockquote", {}, ...blocks(inner).map((part) => draw(part, depth + 1)));
    }
    case "list":
      return drawList(block, depth);
    case "table":
      return drawTable(block);
    default:
      return h("p", {}, ...inline(paragraphText(block.source)));
  }
}

/** Draws a growing text into an element. */
export class MarkdownView {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.place = place;
    /** @type {Block[]} */
    this.drawn = [];
  }

  /**
   * @param {string} text the whole text so far
   * @returns {number} how many blocks there are
   */
  update(text) {
    const now = blocks(text);
    let same = 0;
    while (same < now.length && same < this.drawn.length && this.drawn[same].kind === now[same].kind
      && this.drawn[same].source === now[same].source) same += 1;
    while (this.place.childElementCount > same) this.place.lastElementChild.remove();
    this.place.append(...now.slice(same).map((block) => draw(block)));
    this.drawn = now;
    return now.length;
  }
}
