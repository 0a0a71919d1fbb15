// Text in all that was recorded: arguments, outputs and messages, of all trajectories or of one.
import { ago, count, html, line, plain, signal, typed, view } from "./dom.js";
import { get } from "./api.js";
import { find, go, link, nameOf, place, say } from "./state.js";
import { Rows } from "./rows.js";

/** @typedef {Api.HitInfo} Hit */

const HIT = 58, PART = 100, PAUSE_MS = 180;
/** In the address, in place of a trajectory. */
export const ALL = "*";
/** The tab of a call that shows a kind of record. */
const TAB = { argument: "arguments", output: "output", message: "conversation" };

/** The row that the keys are at. */
const picked = signal(0);
const hits = signal(/** @type {Hit[]} */ ([]));

/** Where a hit leads: to its call, at the part that has the text. */
const placeOf = (/** @type {Hit} */ { trajectory, snapshot, kind }) => ["t", trajectory, snapshot, TAB[kind]];

/** Act on a key. True if it is one of this view. */
export function pressInFind(/** @type {string} */ key) {
  const last = hits.value.length - 1;
  if (key === "j" || key === "ArrowDown") picked.value = Math.min(last, picked.value + 1);
  else if (key === "k" || key === "ArrowUp") picked.value = Math.max(0, picked.value - 1);
  else if (key === "Enter" && hits.value[picked.value]) go(placeOf(hits.value[picked.value]));
  else if (key === "Escape") history.back();
  else return false;
  return true;
}

/** The excerpt, its matches marked. */
function excerpt(/** @type {Hit} */ { excerpt: text, matches }) {
  const one = (/** @type {string} */ part) => plain(part).replace(/\s+/g, " ");
  const letters = Array.from(text), parts = [];
  let done = 0;
  for (const [from, to] of matches) {
    parts.push(one(letters.slice(done, from).join("")), html`<mark>${one(letters.slice(from, to).join(""))}</mark>`);
    done = to;
  }
  return [...parts, one(letters.slice(done).join(""))];
}

export const Find = view((/** @type {import("./dom.js").Self<{id?: string}>} */ self) => {
  const text = signal(place.value[2] ?? ""), next = signal(/** @type {number | null} */ (null)), told = signal("");
  let stop = new AbortController(), later = 0, asked = /** @type {string | null} */ (null), /** @type {HTMLInputElement} */ box;

  async function look(more = false) {
    const [, only = ALL, q = ""] = place.value;
    const key = `${only} ${q}`;
    if (!more && key === asked) return;
    asked = key;
    stop.abort();
    stop = new AbortController();
    const { signal: ended } = stop;
    if (!q.trim()) return void ((hits.value = []), (next.value = null), (told.value = ""));
    try {
      const found = /** @type {Api.FindInfo} */ (await get("/find", { q, trajectory: only === ALL ? null : only, limit: PART, before: more ? next.value : null }, ended));
      hits.value = more ? [...hits.value, ...found.hits] : found.hits;
      if (!more) picked.value = 0;
      next.value = found.next;
      const waiting = found.waiting ? `; ${count(found.waiting, "newest call")} not searched yet` : "";
      told.value = `${found.next === null ? "" : "the newest "}${count(hits.value.length, "hit")}${waiting}`;
    } catch (error) {
      if (!ended.aborted) (told.value = /** @type {Error} */ (error).message), (hits.value = []);
    }
  }

  const wanted = (/** @type {Event} */ event) => {
    text.value = typed(event);
    clearTimeout(later);
    later = setTimeout(() => go(["find", place.value[1] ?? ALL, text.value], true), PAUSE_MS);
  };
  self.mounted = () => {
    look();
    box.focus();
    return () => (clearTimeout(later), stop.abort());
  };
  self.componentDidUpdate = () => void look();

  return () => {
    const only = place.value[1] ?? ALL, of = only === ALL ? undefined : find(only), all = hits.value;
    const row = (/** @type {number} */ i, /** @type {import("./rows.js").Position} */ at) => {
      const hit = all[i];
      return html`<a class="hit ${i === picked.value ? "on" : ""}" href=${link(...placeOf(hit))} role="option" ...${at} aria-selected=${i === picked.value}>
        <span><b>${line(hit.name ?? hit.trajectory.slice(0, 12), 60)}</b> <span class="faint">call ${hit.seq} · ${hit.kind} ${line(hit.part, 60)}${hit.cut ? " · its beginning" : ""}</span></span><span class="number">${ago(hit.created_at)}</span>
        <code>${excerpt(hit)}</code></a>`;
    };
    return html`<main class="found" aria-label="Search"><header><input id="find" type="search" aria-label="Find" placeholder='All of these words; "in a row"; begin*' value=${text.value} onInput=${wanted}
          onKeyDown=${(/** @type {KeyboardEvent} */ event) => (event.key === "Enter" || event.key === "ArrowDown") && all.length && (event.preventDefault(), box.blur(), event.key === "Enter" && pressInFind("Enter"))}
          ref=${(/** @type {HTMLInputElement | null} */ found) => found && (box = found)}/>
        ${of ? html`<label class="check"><input type="checkbox" checked onChange=${() => go(["find", ALL, text.value], true)}/> only ${line(nameOf(of.trajectory), 40)}</label>` : null}
        <span class="push"></span><span class="faint" role="status">${told.value}</span></header>
      <${Rows} label="Hits" role="listbox" count=${all.length} height=${HIT} row=${row} reveal=${picked.value}/>
      ${next.value === null ? null : html`<button class="tail" onClick=${() => look(true).catch(say)}>More</button>`}</main>`;
  };
});
