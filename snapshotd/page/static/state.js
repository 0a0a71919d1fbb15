// What the page knows: where it is, the trajectories, what waits for a decision; kept up to date by the stream of events.
import { computed, effect, signal } from "./dom.js";
import { Refused, get, stream } from "./api.js";
import { saved } from "./saved.js";

/** @typedef {Api.TrajectoryInfo} Trajectory */
/** @typedef {Api.SnapshotInfo} Snapshot */
/** @typedef {Api.OverviewInfo} Overview */
/** An event of /watch. @typedef {{event: string, trajectory?: string, snapshot?: Snapshot, approval?: string, status?: string, name?: string, count?: number}} Heard */

/** The place, from the address behind `#`: what is looked at, and the parts of its name. */
export const place = signal(read());
export const overview = signal(/** @type {Overview[]} */ ([]));
export const approvals = signal(/** @type {Api.ApprovalInfo[]} */ ([]));
/** Which of them have been read: until then, that one is empty says nothing. */
export const isRead = { overview: signal(Boolean(saved)), approvals: signal(Boolean(saved)) };
/** `null` while the daemon answers, else the sentence that says why it does not. */
export const away = signal(/** @type {string | null} */ (null));
/** What the person is told at the bottom, for a while. */
export const notice = signal(/** @type {{text: string, bad: boolean} | null} */ (null));
/** The text by which the trajectories are filtered. */
export const filter = signal("");
export const waiting = computed(() => approvals.value.filter((one) => one.status === "pending"));
export const current = computed(() => find(place.value[0] === "t" ? place.value[1] : ""));

const followers = new Set(/** @type {((event: Heard) => void)[]} */ ([]));
/** Trajectories that are to be read anew; or all of them. */
const stale = new Set(/** @type {string[]} */ ([]));
let allStale = false;
/** With more of them, all are read. */
const STALE_MAX = 8;
/** What could not be read is read again after so long. */
const AGAIN_MS = 2000;

/** The parts of an address behind `#`. One that nobody could have written with `link` stays as it is. */
export function partsOf(/** @type {string} */ text) {
  return text.split("/").filter(Boolean).map((one) => {
    try {
      return decodeURIComponent(one);
    } catch {
      return one;
    }
  });
}

function read() {
  return partsOf(location.hash.slice(1));
}

for (const told of ["hashchange", "popstate"]) addEventListener(told, () => (place.value = read()));

/** The address of a place. */
export const link = (/** @type {string[]} */ ...parts) => `#/${parts.map((one) => encodeURIComponent(String(one).toWellFormed())).join("/")}`;

/** Go to a place; `instead`: without a step in the browser's history. */
export function go(/** @type {string[]} */ parts, instead = false) {
  if (instead) history.replaceState(null, "", link(...parts));
  else history.pushState(null, "", link(...parts));
  place.value = parts;
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
export function follow(/** @type {(event: Heard) => void} */ told) {
  followers.add(told);
  return () => void followers.delete(told);
}

/**
 * What reads something anew, one reading at a time: who asks during one waits for another that begins after it. One that
 * failed is done again, since no event may come that leads to it.
 */
function reader(/** @type {() => Promise<void>} */ read) {
  let running = /** @type {Promise<void> | null} */ (null), next = /** @type {Promise<void> | null} */ (null), again = 0;
  const failed = (/** @type {Error} */ error) => {
    away.value = error.message;
    clearTimeout(again);
    if (!isRefused(error)) again = setTimeout(ask, AGAIN_MS);
  };
  const begin = () => {
    next = null;
    running = read().then(() => void (away.value = null), failed).finally(() => (running = null));
    return running;
  };
  const ask = () => (running ? (next ??= running.then(begin)) : begin());
  return ask;
}

/** True if there is no session, which does not come back. */
const isRefused = (/** @type {unknown} */ error) => error instanceof Refused && error.code === "NotPermitted";

const readApprovals = reader(async () => {
  if (!saved) approvals.value = /** @type {Api.ApprovalInfo[]} */ (await get("/approvals"));
  isRead.approvals.value = true;
});
const readStale = reader(async () => {
  const ids = [...stale], all = allStale || ids.length > STALE_MAX;
  stale.clear();
  allStale = false;
  try {
    if (all) overview.value = /** @type {Overview[]} */ (await get("/overview"));
    else await Promise.all(ids.map(readOne));
  } catch (error) {
    allStale = true;
    throw error;
  }
  if (all) isRead.overview.value = true;
});

/** Read one trajectory: it may be new, or gone. */
async function readOne(/** @type {string} */ id) {
  const [found] = await get("/overview", { trajectory: id }).then((all) => /** @type {Overview[]} */ (all), (error) => {
    if (error.code !== "NotFound") throw error;
    return [];
  });
  const all = overview.value, at = all.findIndex(({ trajectory }) => trajectory.id === id);
  if (at >= 0) overview.value = found ? all.with(at, found) : all.toSpliced(at, 1);
  else if (found) overview.value = [...all, found];
}

/** Read all trajectories anew. */
export function readTrajectories() {
  allStale = true;
  return readStale();
}

/** Read the trajectories and approvals anew. */
export async function refresh() {
  await readTrajectories();
  await readApprovals();
}

/** Follow the daemon's events for as long as the page is open. */
export async function watch() {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      for await (const event of /** @type {AsyncGenerator<Heard>} */ (stream("/watch"))) {
        if (event.event === "alive") continue;
        pause = 500;
        hear(event);
      }
      await get("/version");  // says why it ended
    } catch (error) {
      away.value = /** @type {Error} */ (error).message;
      if (isRefused(error)) return;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function hear(/** @type {Heard} */ event) {
  if (event.event === "approval" && event.status === "pending") notify(event);
  if (event.event === "approval") await readApprovals();
  else if (event.event === "watching" || event.event === "lost") await refresh();
  else if (event.trajectory && !(event.event === "snapshot" && advance(event))) {
    stale.add(event.trajectory);
    await readStale();
  }
  for (const told of followers) told(event);
}

/** Count a snapshot, and those before it whose events came when its trajectory was not known yet, without asking. False if it is still not. */
function advance(/** @type {Heard} */ { trajectory: id, snapshot }) {
  const known = overview.value.find(({ trajectory }) => trajectory.id === id);
  if (!known?.newest || !snapshot) return false;
  const { seq } = known.newest;
  if (snapshot.seq < seq) return true;
  stale.add(known.trajectory.id);
  const trajectory = { ...known.trajectory, head: snapshot.id };
  const next = { ...known, trajectory, snapshots: known.snapshots + snapshot.seq - seq, newest: snapshot };
  overview.value = overview.value.map((one) => (one === known ? next : one));
  settle();
  return true;
}

let settling = 0;

/** Sums (cost, size) follow when no call has come for a moment. */
function settle() {
  clearTimeout(settling);
  settling = setTimeout(readStale, 1500);
}

/** Whether the browser tells of a call that waits: yes, no, or the person has not been asked. */
export const notifies = signal("Notification" in window && !saved ? Notification.permission : "denied");

/** Ask the person, who has just clicked for it. */
export async function askToNotify() {
  notifies.value = await Notification.requestPermission();
}

function notify(/** @type {Heard} */ event) {
  if (notifies.value !== "granted") return;
  const shown = new Notification("snapshotd: a call waits for you", { body: event.name ?? "", tag: event.approval });
  shown.onclick = () => (window.focus(), go(["approvals"]));
}

effect(() => {
  const asks = waiting.value.length, shown = current.value;
  document.title = `${asks ? `(${asks}) ` : ""}${shown ? `${nameOf(shown.trajectory)} · ` : ""}snapshotd`;
});
