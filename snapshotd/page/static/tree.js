// A family of trajectories as a graph: one row each, forks as lanes that leave their parent at the call they began at.
import { ago, computed, count, html, line, money, signal, size, tokens, view } from "./dom.js";
import { get } from "./api.js";
import { find, go, link, nameOf, overview, place, say } from "./state.js";
import { saved } from "./saved.js";
import { forest } from "./trajectories.js";
import { Rows } from "./rows.js";

/** @typedef {Api.OverviewInfo} Overview */
/** @typedef {{one: Overview, x: number, end: number, parent: number}} Lane from and to a call, counted from the family's first; the row of its parent */

const HIGH = 40, WIDE = 300, EDGE = 10, DOTS_MAX = 60;

/** Trajectories that are chosen to be compared. */
const chosen = signal(/** @type {ReadonlySet<string>} */ (new Set()));
/** The row that the keys are at. */
const cursor = signal(0);
const scores = signal(/** @type {ReadonlyMap<string, Api.ExperimentBranchInfo>} */ (new Map()));

/** The family of the trajectory in the address; all families where there is none. */
const lanes = computed(() => {
  const all = overview.value, start = place.value[0] === "tree" && place.value[1] ? find(place.value[1]) : undefined;
  const byId = new Map(all.map((one) => [one.trajectory.id, one]));
  const above = (/** @type {Overview} */ { origin }) => byId.get(origin?.trajectory ?? "");
  const rootOf = (/** @type {Overview} */ one) => {
    let at = one;
    for (let up = above(at); up; up = above(up)) at = up;
    return at.trajectory.id;
  };
  if (place.value[1] && !start) return [];
  const root = start && rootOf(start);
  const placed = forest(root ? all.filter((one) => rootOf(one) === root) : all);
  const rows = new Map(/** @type {[string, number][]} */ ([])), found = /** @type {Lane[]} */ ([]);
  placed.forEach(({ one }, i) => {
    const parent = rows.get(one.origin?.trajectory ?? "") ?? -1, of = found[parent];
    const first = (one.newest?.seq ?? 0) - one.snapshots + 1;
    const x = of && one.origin ? of.x + Math.max(0, one.origin.seq - ((of.one.newest?.seq ?? 0) - of.one.snapshots + 1)) : 0;
    rows.set(one.trajectory.id, i);
    found.push({ one, x, end: x + Math.max(one.newest ? one.newest.seq - first + (of ? 1 : 0) : 0, of ? 1 : 0), parent });
  });
  return found;
});

const shownLast = computed(() => Math.max(1, ...lanes.value.map(({ end }) => end)));
const xOf = (/** @type {number} */ call) => EDGE + (call / shownLast.value) * (WIDE - 2 * EDGE);

/** Where vertical lines pass: at a place, from a row to a row. */
const spans = computed(() => {
  const found = new Map(/** @type {[string, {x: number, from: number, to: number}][]} */ ([]));
  lanes.value.forEach(({ x, parent }, row) => {
    if (parent >= 0) found.set(`${parent} ${x}`, { x: xOf(x), from: parent, to: row });
  });
  return [...found.values()];
});

function toggle(/** @type {string} */ id) {
  const next = new Set(chosen.value);
  if (!next.delete(id)) next.add(id);
  chosen.value = next;
}

function compare() {
  const wanted = lanes.value.map(({ one }) => one.trajectory.id).filter((id) => chosen.value.has(id));
  if (wanted.length < 2) return say(new Error("choose two or more: space at each"));
  go(["compare", ...wanted]);
}

/** Act on a key. True if it is one of the tree's. */
export function pressInTree(/** @type {string} */ key) {
  const last = lanes.value.length - 1, here = lanes.value[cursor.value]?.one.trajectory;
  if (key === "j" || key === "ArrowDown") cursor.value = Math.min(last, cursor.value + 1);
  else if (key === "k" || key === "ArrowUp") cursor.value = Math.max(0, cursor.value - 1);
  else if (key === "g") cursor.value = 0;
  else if (key === "G") cursor.value = last;
  else if (key === " " && here) toggle(here.id);
  else if (key === "Enter" && here) go(["t", nameOf(here)]);
  else if (key === "c") compare();
  else if (key === "Escape") chosen.value.size ? (chosen.value = new Set()) : go(["t", ...place.value.slice(1, 2)]);
  else return false;
  return true;
}

function Graph(/** @type {{row: number, lane: Lane}} */ { row, lane }) {
  const y = HIGH / 2, { one, x, end, parent } = lane, from = xOf(x), to = xOf(end);
  const passing = spans.value.filter((span) => span.from < row && row < span.to).map((span) => span.x);
  const leaving = new Set(spans.value.filter((span) => span.from === row).map((span) => span.x));
  const dots = end - x <= DOTS_MAX ? Array.from({ length: Math.max(0, end - x - (parent < 0 ? -1 : 0)) }, (_, i) => xOf(x + i + (parent < 0 ? 0 : 1))) : [to];
  const on = spans.value.some((span) => span.from === parent && span.x === from && span.to > row);
  return html`<svg class="graph" width=${WIDE} height=${HIGH} aria-hidden="true">
    ${[...new Set(passing)].map((each) => html`<line class="side" x1=${each} x2=${each} y1="0" y2=${HIGH}/>`)}
    ${[...leaving].map((each) => html`<line class="side" x1=${each} x2=${each} y1=${y} y2=${HIGH}/>`)}
    ${on ? html`<line class="side" x1=${from} x2=${from} y1="0" y2=${HIGH}/>` : null}
    ${parent < 0 ? null : html`<path class="side" d="M${from} ${on ? y - 8 : 0} V${y - 8} Q${from} ${y} ${Math.min(from + 8, to)} ${y}"/>`}
    <line class=${one.trajectory.status} x1=${parent < 0 ? from : Math.min(from + 8, to)} x2=${to} y1=${y} y2=${y}/>
    ${dots.map((each) => html`<circle class=${one.trajectory.status} cx=${each} cy=${y} r="2.5"/>`)}
    <circle class="head ${one.trajectory.status}" cx=${to} cy=${y} r="4.5"/></svg>`;
}

export const Tree = view((/** @type {import("./dom.js").Self<{}>} */ self) => {
  self.mounted = () => {
    const name = place.value[1] ? find(place.value[1])?.trajectory.id : undefined;
    cursor.value = Math.max(0, lanes.value.findIndex(({ one }) => one.trajectory.id === name));
    if (!saved) /** @type {Promise<Api.ExperimentState[]>} */ (get("/experiments")).then((all) => {
      scores.value = new Map(all.flatMap(({ branches }) => branches).flatMap((each) => (each.trajectory ? [[each.trajectory, each]] : [])));
    }).catch(say);
  };
  return () => {
    const all = lanes.value, number = all.filter(({ one }) => chosen.value.has(one.trajectory.id)).length;
    const row = (/** @type {number} */ i, /** @type {import("./rows.js").Position} */ at) => {
      const { one } = all[i], { trajectory: it } = one, scored = scores.value.get(it.id), use = one.model_use;
      const spent = use ? use.input_tokens + use.output_tokens : 0;
      return html`<div class="branch ${i === cursor.value ? "on" : ""}" role="option" ...${at} aria-selected=${chosen.value.has(it.id)} onClick=${() => (cursor.value = i)}>
        <input type="checkbox" aria-label="Choose ${line(nameOf(it), 60)}" checked=${chosen.value.has(it.id)} tabindex="-1" onChange=${() => toggle(it.id)}/>
        <${Graph} row=${i} lane=${all[i]}/>
        <a class="name" href=${link("t", nameOf(it))} tabindex="-1"><i class="dot ${it.status}" title=${it.status}></i> <b>${line(nameOf(it), 80)}</b> <span class="faint">${it.status}${it.exit_code ? ` (${it.exit_code})` : ""}</span></a>
        <span class="number" title="score">${scored?.score === null || scored === undefined ? "" : html`<span class=${scored.passed ? "plus" : "minus"}>${+scored.score.toFixed(3)}</span>`}</span>
        <span class="number" title="cost">${use?.cost_usd ? `$${money(use.cost_usd)}` : scored?.cost ? money(scored.cost) : ""}</span>
        <span class="number wide-only" title="tokens">${spent ? tokens(spent) : ""}</span>
        <span class="number" title="snapshots">${one.snapshots}</span>
        <span class="number wide-only" title="content of files written">${one.file_bytes ? size(one.file_bytes) : ""}</span>
        <span class="number wide-only" title="newest call">${one.newest ? ago(one.newest.created_at) : ""}</span></div>`;
    };
    return html`<main class="tree" aria-label="Tree of forks"><header><h1>${place.value[1] ? `Family of ${line(place.value[1], 80)}` : "All trajectories"}</h1>
        <span class="faint">${count(all.length, "trajectory", "trajectories")}, ${count(all.filter(({ parent }) => parent >= 0).length, "fork")}</span><span class="push"></span>
        ${saved ? null : html`<button class=${number > 1 ? "main" : ""} disabled=${number < 2} onClick=${compare}>Compare ${number > 1 ? number : ""} <kbd>c</kbd></button>`}</header>
      <div class="branch heads" aria-hidden="true"><span></span><span class="graph">calls →</span><span>trajectory</span><span>score</span><span>cost</span><span class="wide-only">tokens</span><span>snapshots</span><span class="wide-only">files</span><span class="wide-only">age</span></div>
      <${Rows} label="Trajectories of the family" role="listbox" count=${all.length} height=${HIGH} row=${row} keyOf=${(/** @type {number} */ i) => all[i].one.trajectory.id} reveal=${cursor.value}/></main>`;
  };
});
