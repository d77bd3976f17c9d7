// Text within a paragraph: code, emphasis, links. Only nodes and text are made, so markup in the text stays text.

import { h } from "./dom.js";

const CODE = /(`+)(?!`)([\s\S]*?[^`])\1(?!`)/y;
const STRONG = /\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)|__(?=\S)([\s\S]*?\S)__(?!_)/y;
const EMPHASIS = /\*(?=[^\s*])((?:\*\*[^*]+\*\*|[^*])*?[^\s*])\*(?!\*)/y;
const UNDERLINE = /_(?=[^\s_])([^_]*?[^\s_])_(?![\p{L}\p{N}_])/uy;
const STRUCK = /~~(?=\S)([\s\S]*?\S)~~/y;
const LINK = /!?\[([^\][]*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/y;
const ESCAPE = /\\([\\`*_{}[\]()#+\-.!|~>])/y;
const WORD = /[\p{L}\p{N}]/u;

/** @param {RegExp} pattern @param {string} text @param {number} at */
function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** The address if it may be followed, null if not: a model must not be able to offer `javascript:`. @param {string} raw */
export function safeAddress(raw) {
  try {
    const address = new URL(raw);
    return ["http:", "https:", "mailto:"].includes(address.protocol) ? address.href : null;
  } catch {
    return null;
  }
}

/** @param {string} address @param {(Node | string)[]} children */
function link(address, children) {
  const href = safeAddress(address);
  if (!href) return null;
  return h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/**
 * What stands at `at`, with its length, or null for plain text.
 *
 * @param {string} text
 * @param {number} at
 * @returns {[number, Node | string] | null}
 */
function piece(text, at) {
  let found;
  switch (text[at]) {
    case "\\":
      found = match(ESCAPE, text, at);
      return found && [2, found[1]];
    case "`":
      found = match(CODE, text, at);
      return found && [found[0].length, h("code", {}, found[2].replace(/^ (.*\S.*) $/s, "$1"))];
    case "*":
    case "_": {
      if (text[at] === "_" && at > 0 && WORD.test(text[at - 1])) return null;
      found = match(STRONG, text, at);
      if (found) return [found[0].length, h("strong", {}, ...inline(found[1] ?? found[2]))];
      found = match(text[at] === "*" ? EMPHASIS : UNDERLINE, text, at);
      return found && [found[0].length, h("em", {}, ...inline(found[1]))];
    }
    case "~":
      found = match(STRUCK, text, at);
      return found && [found[0].length, h("s", {}, ...inline(found[1]))];
    case "!":
    case "[": {
      // A picture becomes a link: the page loads nothing from elsewhere.
      found = match(LINK, text, at);
      const node = found && link(found[2], inline(found[1] || found[2]));
      return node && [found[0].length, node];
    }
    case "h": {
      if (at > 0 && WORD.test(text[at - 1])) return null;
      found = match(BARE, text, at);
      const node = found && link(found[0], [found[0]]);
      return node && [found[0].length, node];
    }
    default:
      return null;
  }
}

/**
 * @param {string} text
 * @returns {(Node | string)[]}
 */
export function inline(text) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  for (let at = 0; at < text.length; ) {
    const special = piece(text, at);
    if (special) {
      flush();
      nodes.push(special[1]);
      at += special[0];
    } else if (text[at] === "\n") {
      flush();
      plain = "";
      nodes.push(h("br"));
      at += 1;
    } else {
      // A run of one marker is taken whole, so that "****" is not tried at each of its stars.
      const run = /^([*_`~])\1*/.exec(text.slice(at, at + 64));
      const length = run ? run[0].length : 1;
      plain += text.slice(at, at + length);
      at += length;
    }
  }
  flush();
  return nodes;
}
