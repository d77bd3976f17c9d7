// The engine's figures and the settings: beside the chat where there is room, else a fold and a drawer.

import { byId } from "./dom.js";
import { lasting } from "./storage.js";

const WIDE = window.matchMedia("(min-width: 900px)");

export class SidePanel {
  constructor() {
    this.toggle = byId("side-toggle");
    this.settings = byId("settings");
    this.backdrop = byId("backdrop");
    this.drawerOpen = false;
    this.toggle.addEventListener("click", () => this.#toggled());
    byId("settings-close").addEventListener("click", () => this.closeDrawer());
    this.backdrop.addEventListener("click", () => this.closeDrawer());
    WIDE.addEventListener("change", () => this.#arrange());
    byId("engine").querySelector("summary").addEventListener("click", () => {
      // The fold opens or closes after this event.
      lasting.write(this.#foldName, !byId("engine").open);
    });
    this.#arrange();
  }

  get #foldName() {
    return WIDE.matches ? "engine-open-wide" : "engine-open-narrow";
  }

  get #shown() {
    return WIDE.matches ? lasting.read("side-hidden") !== true : this.drawerOpen;
  }

  #arrange() {
    if (WIDE.matches) this.drawerOpen = false;
    byId("engine").open = lasting.read(this.#foldName) ?? WIDE.matches;
    this.#show();
  }

  #show() {
    const drawer = !WIDE.matches;
    document.body.classList.toggle("side-hidden", !drawer && !this.#shown);
    document.body.classList.toggle("drawer-open", drawer && this.drawerOpen);
    this.settings.inert = !this.#shown;
    this.backdrop.hidden = !(drawer && this.drawerOpen);
    for (const id of ["chat", "engine"]) byId(id).inert = drawer && this.drawerOpen;
    document.querySelector("header").inert = drawer && this.drawerOpen;
    this.toggle.setAttribute("aria-expanded", String(this.#shown));
  }

  #toggled() {
    if (!WIDE.matches) {
      this.open();
      byId("settings-close").focus();
      return;
    }
    lasting.write("side-hidden", this.#shown);
    this.#show();
  }

  open() {
    if (WIDE.matches) lasting.write("side-hidden", false);
    else this.drawerOpen = true;
    this.#show();
  }

  closeDrawer() {
    if (!this.drawerOpen) return;
    this.drawerOpen = false;
    this.#show();
    this.toggle.focus();
  }
}
