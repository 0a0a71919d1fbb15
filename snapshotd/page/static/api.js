// The daemon's API, as every client has it (docs/openapi.json), and its stream of events. A page that was exported as a
// file answers from what it holds (saved.js).
import { parse } from "./json.js";
import { saved } from "./saved.js";

/** An answer that is an error: one sentence. */
export class Refused extends Error {
  constructor(/** @type {string} */ code, /** @type {string} */ message) {
    super(message);
    this.code = code;
  }
}

/** @typedef {Record<string, string | number | boolean | null | undefined>} Query */

function address(/** @type {string} */ path, /** @type {Query} */ query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `/v1${path}${text && `?${text}`}`;
}

/** The half of the session that a browser sends to no other port: see server.py. */
export const pageKey = () => localStorage.getItem("page") ?? "";

async function answer(/** @type {string} */ url, /** @type {RequestInit} */ options = {}) {
  let found;
  try {
    found = await fetch(url, { ...options, headers: { ...options.headers, "x-snapshotd-page": pageKey() } });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused("away", "the page's server does not answer; run `snapshotd ui` again");
  }
  if (found.ok) return found;
  const told = await found.json().catch(() => ({}));
  throw new Refused(told.error?.code ?? "error", told.error?.message ?? `the answer is ${found.status}`);
}

/** The path with names in its places. */
export const at = (/** @type {TemplateStringsArray} */ parts, /** @type {string[]} */ ...names) =>
  parts.reduce((path, part, i) => path + encodeURIComponent(names[i - 1]) + part);

/**
 * The JSON answer, of the type that its receiver names.
 * @template T
 * @param {string} path @param {Query} [query] @param {AbortSignal} [signal]
 * @returns {Promise<T>}
 */
export async function get(path, query, signal) {
  if (saved) return /** @type {T} */ (saved.answer(path, query));
  return parse(await (await answer(address(path, query), { signal })).text());
}

/**
 * The raw answer.
 * @param {string} path @param {Query} [query] @param {AbortSignal} [signal]
 */
export async function bytes(path, query, signal) {
  if (saved) return saved.output(path, query);
  return new Uint8Array(await (await answer(address(path, query), { signal })).arrayBuffer());
}

/**
 * Ask for something to be done, once, whatever happens to the answer.
 * @template T
 * @param {string} method @param {string} path @param {unknown} [body]
 * @returns {Promise<T>}
 */
export async function send(method, path, body) {
  const headers = { "content-type": "application/json", "idempotency-key": crypto.randomUUID() };
  const found = await answer(address(path), { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  return found.status === 204 ? /** @type {T} */ (null) : found.json();
}

/**
 * The lines of a streamed answer, each a JSON object with the member `event`.
 * @template {{event: string}} T
 * @param {string} path @param {Query} [query] @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<T>}
 */
export async function* lines(path, query, signal) {
  if (saved) return yield* /** @type {T[]} */ (saved.lines(path, query));
  const reader = /** @type {ReadableStream<Uint8Array>} */ ((await answer(address(path, query), { signal })).body).getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const found = (rest + decoder.decode(piece.value, { stream: true })).split("\n");
      rest = found.pop() ?? "";
      for (const text of found) {
        const event = parse(text);
        if (event.event === "error") throw new Refused(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/**
 * The lines of an answer that goes on until `signal` ends it, over a WebSocket: of connections for answers a browser has
 * six for all tabs of the page.
 * @template {{event: string}} T
 * @param {string} path @param {AbortSignal} [signal]
 * @returns {AsyncGenerator<T>}
 */
export async function* stream(path, signal) {
  if (saved) return yield* /** @type {T[]} */ (saved.lines(path));
  const socket = new WebSocket(`ws://${location.host}/events${path}?page=${pageKey()}`);
  const heard = /** @type {string[]} */ ([]);
  let ended = false, wake = () => {};
  const end = () => ((ended = true), wake());
  Object.assign(socket, { onclose: end, onmessage: (/** @type {MessageEvent} */ { data }) => (heard.push(data), wake()) });
  signal?.addEventListener("abort", end);
  try {
    while (!ended || heard.length) {
      if (!heard.length) await new Promise((done) => (wake = () => done(null)));
      for (const text of heard.splice(0)) {
        const event = parse(text);
        if (event.event === "error") throw new Refused(event.error.code, event.error.message);
        yield event;
      }
    }
  } finally {
    socket.close();
  }
}

/** A path in a sandbox as the API takes it. A path has a character for each byte, since a name need not be text. */
export const path64 = (/** @type {string} */ path) => btoa(path.replace(/^\/+/, "")).replaceAll("+", "-").replaceAll("/", "_");

/** The address of an answer that the browser stores, instead of the page. */
export const stored = (/** @type {string} */ path, /** @type {Query} */ query) => address(path, { ...query, page: pageKey() });

/** The address of a tar of a snapshot's files, or of those below a path. */
export const tree = (/** @type {string} */ id, below = "") =>
  at`tree/${id}.tar?page=${pageKey()}` + (below && `&path_b64=${path64(below)}`);

/** Exchange the token of the address for a session. */
export async function openSession(/** @type {string} */ token) {
  const headers = { "content-type": "application/json" };
  const { key } = await (await answer("/session", { method: "POST", headers, body: JSON.stringify({ token }) })).json();
  localStorage.setItem("page", key);
}
