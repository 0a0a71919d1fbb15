// The answers that a page which was exported as one file holds, in place of a daemon (snapshotd/page/export.py writes them).
import { parse } from "./json.js";

/**
 * @typedef {object} Saved
 * @property {string} made_at
 * @property {string[]} notes
 * @property {Api.OverviewInfo[]} overview
 * @property {Record<string, Api.SnapshotInfo[]>} logs by trajectory
 * @property {Record<string, {keep: string | null, add: Api.MessageInfo[]}>} messages by snapshot: those of another, and more
 * @property {Record<string, string>} outputs by SNAPSHOT/NAME, base64
 * @property {Record<string, {data_b64: string, outside: number, omitted: {path: string, bytes: number}[]}>} patches by snapshot
 * @property {Record<string, object[]>} journals
 * @property {Record<string, unknown>} answers by path
 */

const element = document.getElementById("saved");
const data = /** @type {Saved | null} */ (element ? parse(element.textContent ?? "") : null);
const decoded = (/** @type {string} */ text) => Uint8Array.from(atob(text), (one) => one.charCodeAt(0));

function conversation(/** @type {Saved} */ held, /** @type {string} */ id) {
  const parts = [];
  for (let at = /** @type {string | null} */ (id); at && held.messages[at]; at = held.messages[at].keep) parts.push(held.messages[at].add);
  return parts.reverse().flat();
}

/** `null` in a page that a server gives. */
export const saved = data && {
  made: data.made_at,
  notes: data.notes,

  answer(/** @type {string} */ path, /** @type {Record<string, unknown>} */ query = {}) {
    const [, kind, id, what] = path.split("/").map(decodeURIComponent);
    if (kind === "overview") return data.overview;
    if (kind === "trajectories" && what === "log") {
      const all = data.logs[id] ?? [], before = Number(query.before ?? Infinity);
      return all.filter(({ seq }) => seq < before).slice(-Number(query.last ?? Infinity));
    }
    if (kind === "snapshots" && what === "conversation") {
      const start = Number(query.start ?? 0);
      return conversation(data, id).slice(start, start + Number(query.count ?? Infinity));
    }
    if (kind === "snapshots" && !what) return Object.values(data.logs).flat().find((one) => one.id === id);
    if (path in data.answers) return data.answers[path];
    throw new Error("this file does not hold that; `snapshotd ui` shows it");
  },

  output(/** @type {string} */ path, /** @type {Record<string, unknown>} */ query = {}) {
    const [, , id, , which] = path.split("/").map(decodeURIComponent);
    return decoded(data.outputs[`${id}/${which}`] ?? "").subarray(0, Number(query.count ?? Infinity));
  },

  /** @returns {object[]} */
  lines(/** @type {string} */ path, /** @type {Record<string, unknown>} */ query = {}) {
    const [, , id, what] = path.split("/").map(decodeURIComponent);
    if (path === "/patch" && !query.b && data.patches[String(query.a)]) {
      const { data_b64, outside, omitted } = data.patches[String(query.a)];
      return [{ event: "data", data_b64 }, ...omitted.map((one) => ({ event: "omitted", ...one })), { event: "end", outside }];
    }
    if (what === "journal") return data.journals[id] ?? [];
    throw new Error("this file does not hold that; `snapshotd ui` shows it");
  },
};
