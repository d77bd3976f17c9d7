// Asks for the server's API key; everybody who needs it at the same time waits for the same dialog.

import { hasKey, setKey } from "./api.js";
import { byId } from "./dom.js";

/** @type {Promise<boolean> | null} */
let open = null;

function show() {
  const dialog = byId("key-dialog");
  const input = byId("key");
  input.value = "";
  byId("key-title").textContent = hasKey() ? "The key was not accepted" : "This server asks for a key";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      open = null;
      const given = dialog.returnValue === "ok" && input.value.trim() !== "";
      if (given) setKey(input.value.trim());
      resolve(given);
    }, { once: true });
  });
}

/** @returns {Promise<boolean>} whether a key was given */
export function askKey() {
  open ??= show();
  return open;
}

byId("key-cancel").addEventListener("click", () => byId("key-dialog").close(""));
