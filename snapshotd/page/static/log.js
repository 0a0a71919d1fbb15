// The calls of one trajectory, read in pieces where they are looked at.
import { batch, signal } from "./dom.js";
import { at, get } from "./api.js";
import { say } from "./state.js";

/** @typedef {Api.SnapshotInfo} Snapshot */

const PAGE = 100;

const newest = (/** @type {string} */ ref) => /** @type {Promise<Snapshot[]>} */ (get(at`/trajectories/${ref}/log`, { last: PAGE }));
let early = /** @type {{ref: string, found: Snapshot[]} | null} */ (null);

/** Read the newest calls of the trajectory that the page is opened at, before anything else of it is known. */
export const readEarly = (/** @type {string} */ ref) => newest(ref).then((found) => void (early = { ref, found }), () => {});

/** The snapshots of one trajectory, read in pieces where they are looked at. */
export class Log {
  /** `ref`: the name by which it was asked for early. */
  constructor(/** @type {string} */ id, /** @type {number} */ first, /** @type {number} */ last, ref = id) {
    this.id = id;
    this.first = first;
    /** Rows from here on are on their way. */
    this.coming = last - first + 1 - PAGE;
    this.count = signal(last - first + 1);
    this.changed = signal(0);
    this.renewing = 0;
    /** @type {Map<number, Snapshot>} */
    this.rows = new Map();
    /** @type {Map<string, number>} */
    this.seqs = new Map();
    /** What was said before each call. @type {Map<string, string>} */
    this.said = new Map();
    /** @type {Set<number>} */
    this.asked = new Set();
    if (early?.ref === ref) this.open(early.found);
    else newest(id).catch((error) => (say(error), [])).then((found) => this.open(found));
    early = null;
  }

  /** The snapshot in a row; undefined until it is there. */
  at(/** @type {number} */ row) {
    this.changed.value;
    const found = this.rows.get(row + this.first);
    if (!found) this.want(row);
    return found;
  }

  /** See to it that a row will be there. */
  want(/** @type {number} */ row) {
    if (row >= 0 && row < this.count.peek() && row < this.coming && !this.rows.has(row + this.first)) this.ask(Math.floor(row / PAGE));
  }

  /** The row of a snapshot that has been read. */
  rowOf(/** @type {string} */ id) {
    this.changed.value;
    return (this.seqs.get(id) ?? this.first - 1) - this.first;
  }

  /** Show a snapshot at once; what the event does not tell (the model's calls, what was said) follows a little later. */
  add(/** @type {Snapshot} */ snapshot) {
    this.put(snapshot);
    batch(() => {
      this.count.value = Math.max(this.count.value, snapshot.seq - this.first + 1);
      this.changed.value = this.changed.peek() + 1;
    });
    clearTimeout(this.renewing);
    this.renewing = setTimeout(() => this.renew().catch(say), 700);
  }

  /** The newest have come; what is still missing is asked for where it is looked at. */
  open(/** @type {Snapshot[]} */ found) {
    this.coming = Infinity;
    this.keep(found);
  }

  async ask(/** @type {number} */ page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    try {
      const before = this.first + (page + 1) * PAGE;
      this.keep(/** @type {Snapshot[]} */ (await get(at`/trajectories/${this.id}/log`, { last: PAGE, before })));
    } catch (error) {
      this.asked.delete(page);
      say(error);
    }
  }

  /** Events were missed up to a call: what came meanwhile is read where it is looked at, and what could not be read is asked for again. */
  catchUp(/** @type {number} */ last) {
    const count = last - this.first + 1;
    if (count <= this.count.peek()) return void this.changed.value++;
    this.asked.clear();
    this.count.value = count;
    this.renew().catch(say);
  }

  /** Read the newest anew: their files are counted and stored by and by. */
  async renew() {
    this.keep(await newest(this.id));
  }

  put(/** @type {Snapshot} */ one) {
    this.rows.set(one.seq, one);
    this.seqs.set(one.id, one.seq);
  }

  /** What was said before the calls of these snapshots, too. They may be newer than what the list of trajectories knew. */
  keep(/** @type {Snapshot[]} */ found) {
    for (const one of found) this.put(one);
    const last = found.at(-1), start = this.rows.get((found[0]?.seq ?? 0) - 1)?.messages ?? found[0]?.messages ?? 0;
    if (last && last.messages > start) this.hear(found, last, start).catch(say);
    if (last) this.count.value = Math.max(this.count.peek(), last.seq - this.first + 1);
    this.changed.value = this.changed.peek() + 1;
  }

  async hear(/** @type {Snapshot[]} */ found, /** @type {Snapshot} */ newest, /** @type {number} */ start) {
    const messages = /** @type {Api.MessageInfo[]} */ (await get(at`/snapshots/${newest.id}/conversation`, { start, count: newest.messages - start }));
    let from = start;
    for (const one of found) {
      const text = messages.slice(Math.max(0, from - start), one.messages - start).map(spoken).filter(Boolean).join(" ");
      if (text) this.said.set(one.id, text);
      from = Math.max(from, one.messages);
    }
    this.changed.value = this.changed.peek() + 1;
  }
}

/** What a message of the model or a person says, without calls and their results. */
export function spoken(/** @type {Api.MessageInfo} */ { role, content }) {
  if (role !== "assistant" && role !== "user") return "";
  const inner = Array.isArray(content) ? content : content && typeof content === "object" && "content" in content ? content.content : content;
  const parts = /** @type {unknown[]} */ (Array.isArray(inner) ? inner : [inner]);
  const textOf = (/** @type {unknown} */ part) => {
    if (part && typeof part === "object" && "text" in part) part = part.text;
    return typeof part === "string" ? part : "";
  };
  return parts.map(textOf).join(" ").trim();
}
