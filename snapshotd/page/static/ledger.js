// A trajectory's calls in order, one row each, with the lanes of the forks that leave it.
import { duration, html, line, signal, size, view } from "./dom.js";
import { current, follow, go, isRead, link, nameOf, overview, place } from "./state.js";
import { Log } from "./log.js";
import { Rows } from "./rows.js";

/** @typedef {Api.SnapshotInfo} Snapshot */
/** @typedef {{row: number, lane: number, one: Api.OverviewInfo}} Leaving a fork: the row that it leaves at, and its lane */

const ROW = 42, LANE = 14, LANES_MAX = 5;
/** Rows that are read before they are looked at. */
const AHEAD = 60;

/** The log of the trajectory that is looked at. */
export const log = signal(/** @type {Log | null} */ (null));

/** The arguments of a call in one line: the command, the path, or all of them. */
export function brief(/** @type {Api.Tool} */ { arguments: given }) {
  const words = (/** @type {unknown[]} */ all) => line(all.map((one) => (typeof one === "string" ? one : JSON.stringify(one))).join(" "));
  if (typeof given === "string") return line(given);
  if (Array.isArray(given)) return words(given);
  if (given && typeof given === "object") {
    const named = /** @type {Record<string, unknown>} */ (given);
    const main = named.argv ?? named.command ?? named.cmd ?? named.path ?? named.file ?? named.name;
    if (Array.isArray(main)) return words(main);
    if (typeof main === "string") return line(main);
    const values = Object.values(given);
    return line(values.length === 1 && typeof values[0] === "string" ? values[0] : values.length ? JSON.stringify(given) : "");
  }
  return given === null || given === undefined ? "" : line(given);
}

/** True if a call did not do what it was to do. */
export const failed = (/** @type {Api.Tool} */ { status, exit_code }) => status !== "done" || (exit_code ?? 0) !== 0;

/** What a call of a sub-agent is called by. */
export const sub = (/** @type {Snapshot} */ { sub_agent: name }) => `sub-agent ${line(name ?? "", 16)}`;

/** Number of files that a snapshot changed. */
export const changed = (/** @type {Snapshot} */ { files }) => (files ? files.added + files.changed + files.deleted : 0);

/** Numbers of added, changed and deleted files. */
export function Changes(/** @type {{files: Api.FileCounts | null}} */ { files }) {
  if (!files) return html`<span class="faint" title="not counted yet">…</span>`;
  const { added, changed, deleted } = files;
  if (!added && !changed && !deleted) return html`<span class="faint" title="no files changed">·</span>`;
  return html`<span class="changes" title="${added} added, ${changed} changed, ${deleted} deleted, ${size(files.bytes)}">
    ${added ? html`<span class="plus">+${added}</span>` : null}${changed ? html`<span class="edit">~${changed}</span>` : null}${
      deleted ? html`<span class="minus">−${deleted}</span>` : null}</span>`;
}

export const Ledger = view((/** @type {import("./dom.js").Self<{}>} */ self) => {
  const following = signal(true);
  self.mounted = () => follow(({ event, trajectory, snapshot }) => {
    const shown = log.value;
    if (event === "snapshot" && shown && snapshot && trajectory === shown.id) shown.add(snapshot);
    if (event === "watching" || event === "lost") shown?.catchUp(current.value?.newest?.seq ?? 0);
  });

  function open() {
    const shown = current.value;
    if (!shown?.newest) return null;
    if (log.peek()?.id !== shown.trajectory.id)
      log.value = new Log(shown.trajectory.id, shown.newest.seq - shown.snapshots + 1, shown.newest.seq, place.peek()[1]);
    return log.value;
  }

  return () => {
    const shown = open();
    if (!shown) return html`<main class="ledger empty"><p class="faint">${!isRead.overview.value ? "…" : place.value[1] ? "No such trajectory." : "Choose a trajectory."}</p></main>`;
    const lanes = forks(shown.id, shown.first);
    const selected = place.value[2] ? shown.rowOf(place.value[2]) : -1;
    const width = 26 + Math.min(LANES_MAX, lanes.length) * LANE;
    const row = (/** @type {number} */ i, /** @type {import("./rows.js").Position} */ at) => {
      const one = shown.at(i);
      shown.want(i - AHEAD), shown.want(i + AHEAD);
      const style = { gridTemplateColumns: `${width}px 42px minmax(0,1fr) auto 58px` };
      if (!one) return html`<div class="row" role="option" ...${at} aria-selected="false" aria-busy="true" style=${style}></div>`;
      const { tool } = one, text = shown.said.get(one.id);
      return html`<a class="row ${i === selected ? "on" : ""} ${failed(tool) ? "bad" : ""}" role="option" ...${at} aria-selected=${i === selected} style=${style}
          href=${link("t", place.value[1], one.id)}>
        <${Lane} row=${i} count=${shown.count.value} lanes=${lanes} width=${width} full=${changed(one) > 0}/>
        <span class="number">${one.seq}</span>
        <span class="what ${one.sub_agent ? "side" : ""}">${one.sub_agent ? html`<span class="tag" title="a sub-agent made this call">${sub(one)}</span> ` : null}<b>${line(tool.name, 80)}</b> <code>${brief(tool)}</code>${one.tags.map((tag) => html` <span class="tag">${line(tag, 40)}</span>`)}${
            lanes.filter((lane) => lane.row === i).slice(0, 3).map(({ one: fork }) => html` <span class="tag fork">↳ ${line(nameOf(fork.trajectory), 24)}</span>`)}
          ${text ? html`<small>${line(text)}</small>` : html`<small class="faint">${[tool.status === "done" ? "" : tool.status, tool.error ? line(tool.error) : tool.exit_code ? `exit code ${tool.exit_code}` : ""].filter(Boolean).join(": ")}</small>`}</span>
        <${Changes} files=${one.files}/>
        <span class="number" title="duration of the call">${duration(tool.duration_ms)}</span>
      </a>`;
    };
    return html`<main class="ledger" aria-label="Calls">
      <${Rows} className="calls" label="Calls" role="listbox" count=${shown.count.value} height=${ROW} row=${row} reveal=${selected}
        follow=${following.value && selected < 0} onEnd=${(/** @type {boolean} */ end) => (following.value = end)}/>
      ${following.value || current.value?.trajectory.status !== "running" ? null : html`<button class="tail" onClick=${() => {
        go(["t", place.value[1]]);
        following.value = true;
        self.forceUpdate();
      }}>Follow the newest</button>`}
    </main>`;
  };
});

/** Forks that leave a trajectory, by the call that they leave at. @returns {Leaving[]} */
function forks(/** @type {string} */ id, /** @type {number} */ first) {
  const leaving = overview.value.filter(({ origin }) => origin?.trajectory === id);
  leaving.sort((a, b) => (a.origin?.seq ?? 0) - (b.origin?.seq ?? 0));
  return leaving.map((one, i) => ({ row: (one.origin?.seq ?? 0) - first, lane: Math.min(i, LANES_MAX - 1) + 1, one }));
}

function Lane(/** @type {{row: number, count: number, lanes: Leaving[], width: number, full: boolean}} */ { row, count, lanes, width, full }) {
  const x = 13, y = 15;
  const leaving = lanes.filter((one) => one.row === row);
  const passing = new Set(lanes.filter((one) => one.row < row && row <= one.row + Math.min(6, one.one.snapshots)).map((one) => one.lane));
  return html`<svg class="lane" width=${width} height=${ROW} aria-hidden="true">
    <line x1=${x} x2=${x} y1=${row ? 0 : y} y2=${row === count - 1 ? y : ROW}/>
    ${[...passing].map((lane) => html`<line class="side" x1=${x + lane * LANE} x2=${x + lane * LANE} y1="0" y2=${ROW}/>`)}
    ${[...new Set(leaving.map(({ lane }) => lane))].map((lane) => html`<path class="side" d="M${x} ${y} C${x + lane * LANE} ${y} ${x + lane * LANE} ${y} ${x + lane * LANE} ${ROW}"/>`)}
    <circle class=${full ? "full" : ""} cx=${x} cy=${y} r="4"/>
  </svg>`;
}

/** Select the row so many below the selected one. */
export function step(/** @type {number} */ by) {
  const shown = log.value;
  if (!shown) return;
  const at = place.value[2] ? shown.rowOf(place.value[2]) : shown.count.value;
  const next = shown.at(Math.max(0, Math.min(shown.count.value - 1, at + by)));
  if (next) go(["t", place.value[1], next.id], true);
}
