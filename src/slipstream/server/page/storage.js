// JSON in the browser's storage. A full or forbidden storage costs the memory of the page, never its function.

const PREFIX = "slipstream.";

/** @param {Storage} storage @param {string} name @returns {any} */
function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(PREFIX + name) ?? "null");
  } catch {
    return null;
  }
}

/** @param {Storage} storage @param {string} name @param {unknown} value */
function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(PREFIX + name);
    else storage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Nothing depends on it.
  }
}

/** What all tabs share and what outlives them. */
export const lasting = {
  read: (/** @type {string} */ name) => read(localStorage, name),
  write: (/** @type {string} */ name, /** @type {unknown} */ value) => write(localStorage, name, value),
};

/** What belongs to this tab and survives a reload. */
export const tab = {
  read: (/** @type {string} */ name) => read(sessionStorage, name),
  write: (/** @type {string} */ name, /** @type {unknown} */ value) => write(sessionStorage, name, value),
};
