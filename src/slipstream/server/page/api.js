// The server's HTTP interface: JSON, streamed chat completions, and errors as one class.

import { tab } from "./storage.js";

export const KEY_CHANGED = "slipstream-key";

/** What went wrong with a request. `kind` says who failed. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{kind: "http" | "network" | "stream", status?: number, param?: string | null, code?: string | null,
   *   retryAfter?: number | null}} about
   */
  constructor(message, about) {
    super(message);
    this.kind = about.kind;
    this.status = about.status ?? 0;
    this.param = about.param ?? null;
    this.code = about.code ?? null;
    this.retryAfter = about.retryAfter ?? null;
  }
}

function headers() {
  const key = tab.read("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** @returns {boolean} whether a key is sent along */
export function hasKey() {
  return Boolean(tab.read("key"));
}

/** Send this key along from now on; `KEY_CHANGED` on the window tells. @param {string} key */
export function setKey(key) {
  tab.write("key", key);
  window.dispatchEvent(new Event(KEY_CHANGED));
}

/** @param {Response} response */
async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy in between may answer with something else than JSON.
  }
  const after = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(error.message ?? `The server answered with status ${response.status}.`, {
    kind: "http",
    status: response.status,
    param: error.param,
    code: error.code,
    retryAfter: Number.isFinite(after) ? after : null,
  });
}

/** @param {string} path @param {RequestInit} options */
async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", { kind: "network" });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** @param {string} path @param {AbortSignal} [signal] @returns {Promise<any>} */
export async function getJson(path, signal) {
  const response = await request(path, { headers: headers(), cache: "no-store", signal });
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.", { kind: "network" });
  }
}

/**
 * The data of each server-sent event.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string>}
 */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split(/\r?\n\r?\n/);
      rest = events.pop() ?? "";
      for (const event of events) {
        const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * One chat completion as it comes: parsed chunks, in order. Aborting the signal ends the generation on the server.
 *
 * @param {string} body JSON
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 * @throws {ApiError} also for an error within the stream and for a stream that ends too early
 */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body,
    signal,
  });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        const { message, param, code } = chunk.error;
        throw new ApiError(message ?? "The server gave up on this answer.", { kind: "stream", param, code });
      }
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection was lost.", { kind: "network" });
  }
  if (signal.aborted) throw new DOMException("stopped", "AbortError");
  throw new ApiError("The connection was closed before the answer was complete.", { kind: "network" });
}
