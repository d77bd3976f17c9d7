// Puts the parts of the page together.

import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h, setIcon } from "./dom.js";
import { askKey } from "./key_dialog.js";
import { Settings } from "./settings.js";
import { SidePanel } from "./side_panel.js";
import { StatsPanel } from "./stats.js";
import { tab } from "./storage.js";

const EXAMPLES = [
  "Explain in three sentences why the sky is blue.",
  "Write a Python function that finds the longest word in a text.",
  "Give me five names for a small bakery by the sea.",
  "What is the difference between a list and a tuple in Python?",
];

const prompt = byId("prompt");
const settings = new Settings();
const side = new SidePanel();
let model = "";
let context = 0;

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

/** Not on a phone, where it would open the keyboard over the page. */
function focusPrompt() {
  if (window.matchMedia("(hover: hover)").matches) prompt.focus();
}

/** @param {string} text */
function putIntoPrompt(text) {
  prompt.value = text;
  tab.write("draft", text || null);
  fitPrompt();
}

async function modelName() {
  if (!model) {
    const { data } = await getJson("v1/models");
    showModel(data[0].id, data[0].max_model_len ?? 0);
  }
  return model;
}

/** @param {string} name @param {number} length of the context */
function showModel(name, length) {
  if (name === model && length === context) return;
  [model, context] = [name, length];
  byId("model-name").textContent = name;
  byId("empty-text").textContent = `${name} answers. What you write goes to this server only.`;
  document.title = `${name} · Slipstream`;
}

function onChange() {
  const running = Boolean(chat?.running);
  const send = byId("send");
  send.setAttribute("aria-label", running ? "Stop" : "Send");
  send.title = running ? "Stop (Esc)" : "Send (Enter)";
  send.classList.toggle("stop", running);
  setIcon(send, running ? "stop" : "send");
  if (chat) byId("context-use").textContent = chat.contextText(context);
}

/** @type {Chat | undefined} */
let chat;
chat = new Chat({ settings, modelName, askKey, openSettings, putBack: putIntoPrompt, focus: focusPrompt, onChange });
onChange();

function openSettings() {
  side.open();
  if (settings.form.querySelector("[aria-invalid]")) settings.focusError();
  else settings.inputs.get("max_tokens").focus();
}

function submit() {
  if (chat.running) return;
  if (chat.send(prompt.value)) putIntoPrompt("");
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) chat.stop();
  else submit();
});

prompt.addEventListener("input", () => {
  tab.write("draft", prompt.value || null);
  fitPrompt();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || byId("key-dialog").open) return;
  if (chat.running) chat.stop();
  else side.closeDrawer();
});

byId("new-chat").addEventListener("click", () => {
  chat.clear();
  focusPrompt();
});

for (const text of EXAMPLES) {
  byId("examples").append(h("li", {}, h("button", { type: "button", class: "example", onclick: () => chat.send(text) }, text)));
}

new StatsPanel({
  askKey,
  onStats: (stats) => {
    showModel(stats.model, stats.context ?? 0);
    settings.showDefaults(stats.defaults ?? {});
    onChange();
  },
}).start();

prompt.value = tab.read("draft") ?? "";
fitPrompt();
focusPrompt();
