// What the page knows: where it is, the trajectories, what waits for a decision; kept up to date by the stream of events.
import { batch, computed, signal } from "./dom.js";
import { Refused, at, get, lines } from "./api.js";

/** @typedef {{id: string, name: string | null, status: string, head: string, image: string, agent: {argv: string[]} | null, created_at: string, forked_from: string | null, experiment: string | null, exit_code: number | null}} Trajectory */
/** @typedef {{id: string, parent: string | null, trajectory: string, seq: number, tool: any, files: any, state: string, pause_ms: number, created_at: string, tags: string[], messages: number, warnings: string[], follows: string | null}} Snapshot */
/** @typedef {{trajectory: Trajectory, snapshots: number, newest: Snapshot | null, origin: Snapshot | null}} Overview */

/** The place, from the address behind `#`: what is looked at, and the parts of its name. */
export const place = signal(read());
export const overview = signal(/** @type {Overview[]} */ ([]));
export const approvals = signal(/** @type {any[]} */ ([]));
/** `null` while the daemon answers, else the sentence that says why it does not. */
export const away = signal(/** @type {string | null} */ (null));
/** What the person is told at the bottom, for a while. */
export const notice = signal(/** @type {{text: string, bad: boolean} | null} */ (null));
/** The text by which the trajectories are filtered. */
export const filter = signal("");
export const waiting = computed(() => approvals.value.filter((one) => one.status === "pending"));
export const current = computed(() => find(place.value[0] === "t" ? place.value[1] : ""));

const followers = new Set(/** @type {((event: any) => void)[]} */ ([]));
let reading = /** @type {Promise<void> | null} */ (null), readAgain = false;

function read() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

addEventListener("hashchange", () => (place.value = read()));

/** The address of a place. */
export const link = (/** @type {string[]} */ ...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** Go to a place; `instead`: without a step in the browser's history. */
export function go(/** @type {string[]} */ parts, instead = false) {
  if (instead) history.replaceState(null, "", link(...parts)), (place.value = parts);
  else location.hash = link(...parts);
}

/** The trajectory of a name or an id. */
export const find = (/** @type {string} */ ref) =>
  overview.value.find(({ trajectory: { id, name } }) => id === ref || name === ref) ??
  (ref.length >= 4 ? overview.value.find(({ trajectory }) => trajectory.id.startsWith(ref)) : undefined);

/** The name of a trajectory, or the short form of its id. */
export const nameOf = (/** @type {{id: string, name: string | null}} */ { id, name }) => name ?? id.slice(0, 12);

/** Say something at the bottom of the page. */
export function say(/** @type {unknown} */ told) {
  const bad = told instanceof Error;
  notice.value = { text: bad ? told.message : String(told), bad };
  const said = notice.value;
  setTimeout(() => notice.value === said && (notice.value = null), bad ? 12_000 : 5000);
}

/** Call `told` with every event from now on. Returns what ends that. */
export function follow(/** @type {(event: any) => void} */ told) {
  followers.add(told);
  return () => followers.delete(told);
}

/** Read the trajectories and approvals anew; once more after that, if it is asked for meanwhile. */
export function refresh() {
  readAgain = reading !== null;
  reading ??= load().finally(() => {
    reading = null;
    if (readAgain) refresh();
  });
  return reading;
}

async function load() {
  try {
    const [all, asked] = await Promise.all([get("/overview"), get("/approvals")]);
    batch(() => {
      overview.value = all;
      approvals.value = asked;
      away.value = null;
    });
  } catch (error) {
    away.value = /** @type {Error} */ (error).message;
  }
}

/** Follow the daemon's events for as long as the page is open. */
export async function watch() {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      for await (const event of lines("/watch")) {
        if (event.event === "alive") continue;
        pause = 500;
        await heard(event);
      }
    } catch (error) {
      away.value = /** @type {Error} */ (error).message;
      if (error instanceof Refused && error.code === "not_permitted") return;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function heard(/** @type {any} */ event) {
  if (event.event === "approval" && event.status === "pending") notify(event);
  if (event.event !== "snapshot") await refresh();
  else if (!advance(event)) await refresh();
  for (const told of followers) told(event);
}

/** Count a snapshot without asking. False if its trajectory is not known yet. */
function advance(/** @type {any} */ event) {
  const known = overview.value.find(({ trajectory }) => trajectory.id === event.trajectory);
  if (!known) return false;
  const seq = known.newest?.seq ?? -1, { snapshot } = event;
  if (snapshot.seq < seq) return true;
  const trajectory = { ...known.trajectory, head: snapshot.id };
  const next = { ...known, trajectory, snapshots: known.snapshots + (snapshot.seq > seq ? 1 : 0), newest: snapshot };
  overview.value = overview.value.map((one) => (one === known ? next : one));
  return true;
}

function notify(/** @type {any} */ event) {
  if (!("Notification" in window) || Notification.permission !== "granted") return;
  const shown = new Notification("snapshotd: a call waits for you", { body: event.name ?? "", tag: event.approval });
  shown.onclick = () => (window.focus(), go(["approvals"]));
}

const PAGE = 100;

/** The snapshots of one trajectory, read in pieces where they are looked at. */
export class Log {
  constructor(/** @type {string} */ id, /** @type {number} */ first, /** @type {number} */ last) {
    this.id = id;
    this.first = first;
    this.count = signal(last - first + 1);
    this.changed = signal(0);
    /** @type {Map<number, Snapshot>} */
    this.rows = new Map();
    /** @type {Map<string, any>} */
    this.said = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
  }

  /** The snapshot in a row; undefined until it is there. */
  at(/** @type {number} */ row) {
    this.changed.value;
    const found = this.rows.get(row + this.first);
    if (!found) this.ask(Math.floor(row / PAGE));
    return found;
  }

  /** The row of a snapshot that has been read. */
  rowOf(/** @type {string} */ id) {
    this.changed.value;
    for (const one of this.rows.values()) if (one.id === id) return one.seq - this.first;
    return -1;
  }

  add(/** @type {Snapshot} */ snapshot) {
    this.rows.set(snapshot.seq, snapshot);
    batch(() => {
      this.count.value = Math.max(this.count.value, snapshot.seq - this.first + 1);
      this.changed.value++;
    });
  }

  async ask(/** @type {number} */ page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    try {
      const before = this.first + (page + 1) * PAGE;
      this.keep(await get(at`/trajectories/${this.id}/log`, { last: PAGE, before }));
    } catch (error) {
      say(error);
    }
  }

  /** Read the newest anew: their files are counted and stored by and by. */
  async renew() {
    this.keep(await get(at`/trajectories/${this.id}/log`, { last: PAGE }));
  }

  /** What was said before the calls of these snapshots, too. */
  keep(/** @type {Snapshot[]} */ found) {
    for (const one of found) this.rows.set(one.seq, one);
    const newest = found.at(-1), start = this.rows.get((found[0]?.seq ?? 0) - 1)?.messages ?? found[0]?.messages ?? 0;
    if (newest && newest.messages > start) this.hear(found, newest, start);
    this.changed.value++;
  }

  async hear(/** @type {Snapshot[]} */ found, /** @type {Snapshot} */ newest, /** @type {number} */ start) {
    const messages = await get(at`/snapshots/${newest.id}/conversation`, { start, count: newest.messages - start });
    let from = start;
    for (const one of found) {
      const text = messages.slice(Math.max(0, from - start), one.messages - start).map(spoken).filter(Boolean).join(" ");
      if (text) this.said.set(one.id, text);
      from = Math.max(from, one.messages);
    }
    this.changed.value++;
  }
}

/** What a message of the model or a person says, without calls and their results. */
export function spoken(/** @type {{role: string, content: any}} */ { role, content }) {
  if (role !== "assistant" && role !== "user") return "";
  const parts = Array.isArray(content) ? content : Array.isArray(content?.content) ? content.content : [content?.content ?? content];
  return parts.map((part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : "")).join(" ").trim();
}
