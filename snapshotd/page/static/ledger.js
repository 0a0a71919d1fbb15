// A trajectory's calls in order, one row each, with the lanes of the forks that leave it.
import { ago, duration, html, line, signal, size, view } from "./dom.js";
import { Log, current, find, follow, go, link, nameOf, overview, place } from "./state.js";
import { Rows } from "./rows.js";

export const ROW = 42;
const LANE = 14, LANES_MAX = 5;

/** The log of the trajectory that is looked at. */
export const log = signal(/** @type {Log | null} */ (null));

/** The arguments of a call in one line: the command, the path, or all of them. */
export function brief(/** @type {any} */ tool) {
  const given = tool.arguments;
  if (typeof given === "string") return line(given);
  if (Array.isArray(given)) return line(given.map((one) => (typeof one === "string" ? one : JSON.stringify(one))).join(" "));
  if (given && typeof given === "object") {
    const argv = given.argv ?? given.command ?? given.cmd ?? given.path ?? given.file ?? given.name;
    if (Array.isArray(argv)) return line(argv.join(" "));
    if (typeof argv === "string") return line(argv);
    const values = Object.values(given);
    return line(values.length === 1 && typeof values[0] === "string" ? values[0] : values.length ? JSON.stringify(given) : "");
  }
  return given === null || given === undefined ? "" : line(given);
}

/** Numbers of added, changed and deleted files. */
export function Changes(/** @type {{files: any}} */ { files }) {
  if (!files) return html`<span class="faint" title="not counted yet">…</span>`;
  const { added, changed, deleted } = files;
  if (!added && !changed && !deleted) return html`<span class="faint" title="no files changed">·</span>`;
  return html`<span class="changes" title="${added} added, ${changed} changed, ${deleted} deleted, ${size(files.bytes)}">
    ${added ? html`<span class="plus">+${added}</span>` : null}${changed ? html`<span class="edit">~${changed}</span>` : null}${
      deleted ? html`<span class="minus">−${deleted}</span>` : null}</span>`;
}

export const Ledger = view((self) => {
  const following = signal(true);
  self.mounted = () => {
    const unfollow = follow((event) => {
      const shown = log.value;
      if (event.event === "snapshot" && event.trajectory === shown?.id) shown?.add(event.snapshot);
    });
    return unfollow;
  };

  function open() {
    const shown = current.value;
    if (!shown?.newest) return null;
    if (log.peek()?.id !== shown.trajectory.id)
      log.value = new Log(shown.trajectory.id, shown.newest.seq - shown.snapshots + 1, shown.newest.seq);
    return log.value;
  }

  return () => {
    const shown = open();
    if (!shown) return html`<main class="ledger empty"><p class="faint">${place.value[1] ? "No such trajectory." : "Choose a trajectory."}</p></main>`;
    const lanes = forks(shown.id, shown.first);
    const selected = place.value[2] ? shown.rowOf(place.value[2]) : -1;
    const width = 26 + Math.min(LANES_MAX, lanes.length) * LANE;
    const row = (/** @type {number} */ i) => {
      const one = shown.at(i);
      const style = { height: `${ROW}px`, gridTemplateColumns: `${width}px 42px minmax(0,1fr) auto 58px` };
      if (!one) return html`<div class="row" style=${style} key=${i}></div>`;
      const { tool } = one, text = shown.said.get(one.id);
      const bad = tool.status !== "done" || (tool.exit_code ?? 0) !== 0;
      return html`<a class="row ${i === selected ? "on" : ""} ${bad ? "bad" : ""}" role="option" aria-selected=${i === selected} style=${style}
          key=${i} href=${link("t", place.value[1], one.id)}>
        <${Lane} row=${i} count=${shown.count.value} lanes=${lanes} width=${width} changed=${one.files && one.files.added + one.files.changed + one.files.deleted > 0}/>
        <span class="number">${one.seq}</span>
        <span class="what"><b>${line(tool.name, 80)}</b> <code>${brief(tool)}</code>${one.tags.map((tag) => html` <span class="tag">${line(tag, 40)}</span>`)}${
            lanes.filter((lane) => lane.row === i).slice(0, 3).map(({ one: fork }) => html` <span class="tag fork">⑂ ${line(nameOf(fork.trajectory), 24)}</span>`)}
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

/** Forks that leave a trajectory: the row that they leave at, and the lane that they have. */
function forks(/** @type {string} */ id, /** @type {number} */ first) {
  const leaving = overview.value.filter(({ origin }) => origin?.trajectory === id);
  leaving.sort((a, b) => (a.origin?.seq ?? 0) - (b.origin?.seq ?? 0));
  return leaving.map((one, i) => ({ row: (one.origin?.seq ?? 0) - first, lane: Math.min(i, LANES_MAX - 1) + 1, one }));
}

function Lane(/** @type {any} */ { row, count, lanes, width, changed }) {
  const x = 13, y = ROW / 2;
  const leaving = lanes.filter((/** @type {any} */ one) => one.row === row);
  const passing = new Set(lanes.filter((/** @type {any} */ one) => one.row < row && row <= one.row + Math.min(6, one.one.snapshots)).map((/** @type {any} */ one) => one.lane));
  return html`<svg class="lane" width=${width} height=${ROW} aria-hidden="true">
    <line x1=${x} x2=${x} y1=${row ? 0 : y} y2=${row === count - 1 ? y : ROW}/>
    ${[...passing].map((lane) => html`<line class="side" x1=${x + lane * LANE} x2=${x + lane * LANE} y1="0" y2=${ROW}/>`)}
    ${leaving.map((/** @type {any} */ { lane }) => html`<path class="side" d="M${x} ${y} C${x + lane * LANE} ${y} ${x + lane * LANE} ${y} ${x + lane * LANE} ${ROW}"/>`)}
    <circle class=${changed ? "full" : ""} cx=${x} cy=${y} r="4"/>
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

/** The trajectories on the left: forks below what they come from. */
export const Trajectories = view(() => (/** @type {{filter: string}} */ props) => {
  const wanted = props.filter.toLowerCase();
  const known = overview.value.filter(({ trajectory: { id, name, status, agent } }) =>
    `${name ?? ""} ${id} ${status} ${agent?.argv.join(" ") ?? ""}`.toLowerCase().includes(wanted));
  const shown = wanted ? known.map((one) => ({ one, depth: 0 })).reverse() : forest(known);
  const row = (/** @type {number} */ i) => {
    const { one, depth } = shown[i], { trajectory } = one;
    const mine = find(place.value[1] ?? "") === one && place.value[0] === "t";
    const children = overview.value.filter(({ origin }) => origin?.trajectory === trajectory.id).length;
    return html`<a key=${trajectory.id} class="trajectory ${mine ? "on" : ""}" href=${link("t", nameOf(trajectory))} aria-current=${mine ? "page" : null}
        style=${{ height: "46px", paddingLeft: `${14 + Math.min(depth, 6) * 12}px` }}>
      <i class="dot ${trajectory.status}" title=${trajectory.status}></i>
      <b>${line(nameOf(trajectory), 80)}</b><span class="faint">${one.newest ? ago(one.newest.created_at) : ""}</span>
      <small>${trajectory.status}${trajectory.exit_code ? ` (${trajectory.exit_code})` : ""} · ${one.snapshots} call${one.snapshots === 1 ? "" : "s"}${
        children ? ` · ${children} fork${children > 1 ? "s" : ""}` : ""}${trajectory.agent ? ` · ${line(trajectory.agent.argv.join(" "), 60)}` : ""}</small>
    </a>`;
  };
  return html`<nav aria-label="Trajectories">
    <${Rows} label="Trajectories" count=${shown.length} height=${46} row=${row} reveal=${-1}/>
    ${shown.length ? null : html`<p class="faint pad">${overview.value.length ? "None has this in its name." : html`No trajectories yet. <code>snapshotd run agent.py</code> makes one.`}</p>`}
  </nav>`;
});

/** @param {import("./state.js").Overview[]} known */
function forest(known) {
  const below = new Map(/** @type {[string, any[]][]} */ ([]));
  const ids = new Set(known.map(({ trajectory }) => trajectory.id));
  for (const one of known) {
    const parent = one.origin && ids.has(one.origin.trajectory) ? one.origin.trajectory : "";
    below.set(parent, [...(below.get(parent) ?? []), one]);
  }
  const found = /** @type {{one: any, depth: number}[]} */ ([]);
  const todo = (below.get("") ?? []).map((one) => ({ one, depth: 0 }));
  for (let next = todo.pop(); next; next = todo.pop()) {
    found.push(next);
    const { one, depth } = next;
    todo.push(...(below.get(one.trajectory.id) ?? []).map((child) => ({ one: child, depth: depth + 1 })).reverse());
  }
  return found;
}
