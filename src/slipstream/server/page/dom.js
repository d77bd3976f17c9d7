// Small helpers for building the page out of DOM nodes.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an element. `on...` attributes are listeners, `class` is the class name; null and false leave an attribute out.
 * Children that are strings become text nodes, never markup.
 *
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {...(Node | string | null)} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 */
export function svg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/** An icon of the sprite in index.html. @param {string} name */
export function icon(name) {
  const picture = svg("svg", { class: "icon", "aria-hidden": "true" });
  picture.append(svg("use", { href: `#i-${name}` }));
  return picture;
}

/** @param {HTMLElement} button @param {string} name */
export function setIcon(button, name) {
  button.querySelector("use").setAttribute("href", `#i-${name}`);
}

/** The element of that id, which index.html holds. @param {string} id @returns {any} */
export function byId(id) {
  return document.getElementById(id);
}

/** Put text on the clipboard, also where the page came over plain HTTP. @param {string} text */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const focused = document.activeElement;
  const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  if (!copied) throw new Error("The browser did not allow copying.");
}

/**
 * A button that copies and shows for two seconds that it did.
 *
 * @param {() => string} text
 * @param {string} label
 * @param {string} className
 */
export function copyButton(text, label, className) {
  const button = h("button", { type: "button", class: className, "aria-label": label, title: label }, icon("copy"));
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await copyText(text());
    } catch {
      done = false;
    }
    setIcon(button, done ? "check" : "warn");
    announce(done ? "Copied." : "Copying failed.");
    setTimeout(() => setIcon(button, "copy"), 2000);
  });
  return button;
}

/** Let a screen reader say something. @param {string} text */
export function announce(text) {
  byId("announcer").append(h("p", {}, text));
}

/** Forget what was said, so that it is not found when the page is read line by line. */
export function clearAnnouncements() {
  byId("announcer").replaceChildren();
}

/**
 * A short message at the foot of the page, with an action if there is one.
 *
 * @param {string} text
 * @param {{label: string, run: () => void}} [action]
 */
export function toast(text, action) {
  const place = byId("toast");
  clearTimeout(Number(place.dataset.timer));
  place.replaceChildren(h("span", {}, text));
  if (action) {
    const run = () => {
      hideToast();
      action.run();
    };
    place.append(h("button", { type: "button", class: "button small", onclick: run }, action.label));
  }
  place.hidden = false;
  place.dataset.timer = String(setTimeout(hideToast, action ? 8000 : 3000));
}

/** Take the short message away. */
export function hideToast() {
  byId("toast").hidden = true;
}

/** Server messages begin small and end without a stop. @param {string} text */
export function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** 1234.5 -> "1,234.5" in the reader's language. @param {number} value @param {number} [digits] */
export function number(value, digits = 0) {
  return value.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
