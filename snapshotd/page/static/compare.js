// Branches side by side, call by call, aligned at the first difference.
import { count, html, line, short, signal, view } from "./dom.js";
import { send } from "./api.js";
import { find, link, nameOf, place } from "./state.js";
import { brief, failed } from "./ledger.js";
import { Rows } from "./rows.js";
import { Patch, loaded } from "./text.js";

/** @typedef {Api.CompareInfo} Found */
/** @typedef {{left: Api.SnapshotInfo | null, cells: (Api.AlignedCall | undefined)[]}} Aligned one call of each branch */

const PAIR = 28;

export const Compare = view(() => {
  const tab = signal(0);
  return () => {
    const refs = place.value.slice(1);
    if (refs.length < 2) return html`<main class="wide"><h1>Compare</h1><p>Choose two trajectories or more: <kbd>c</kbd> on one of them.</p></main>`;
    return html`<main class="comparison" style=${{ "--columns": refs.length }}>${loaded({ what: refs.join(), load: () => /** @type {Promise<Found>} */ (send("POST", "/compare", { refs })), show: (found) => html`
        <div class="sides" style=${columns(found)}>${found.branches.map((one) => html`<${Side} one=${one}/>`)}</div>
        <div class="tabs" role="tablist"><button role="tab" aria-selected=${tab.value === 0} onClick=${() => (tab.value = 0)}>calls</button>
          ${found.pairs.map((pair, i) => html`<button role="tab" aria-selected=${tab.value === i + 1} onClick=${() => (tab.value = i + 1)}>
            files of ${title(found.branches[i + 1])} (${pair.changes.length})</button>`)}</div>
        <div class="body">${tab.value === 0 ? html`<${Calls} found=${found}/>`
          : html`<${Patch} key=${tab.value} a=${found.branches[0].head.id} b=${found.branches[tab.value]?.head.id}/>`}</div>` })}</main>`;
  };
});

const columns = (/** @type {Found} */ { branches }) => ({ gridTemplateColumns: `repeat(${branches.length}, minmax(0, 1fr))` });
const title = (/** @type {Api.BranchInfo} */ one) => line(one.name ?? one.ref.slice(0, 12), 60);

function Side(/** @type {{one: Api.BranchInfo}} */ { one }) {
  const [read, written] = one.tokens;
  return html`<section><h1><a href=${link("t", one.name ?? one.head.trajectory, one.head.id)}>${title(one)}</a></h1>
    <p><i class="dot ${one.status}"></i> ${one.status}${one.exit_code === null ? "" : `, exit code ${one.exit_code}`}</p>
    <p class="faint">${one.call_count} calls${one.failed ? html`, <span class="bad">${one.failed} failed</span>` : null} · ${one.seconds.toFixed(1)} s${
      read + written ? ` · ${read} + ${written} tokens` : ""} · <span class="plus">+${one.added}</span> <span class="edit">~${one.changed}</span> <span class="minus">−${one.deleted}</span></p>
    ${one.forked_with ? html`<p>forked with ${line(one.forked_with, 300)}</p>` : null}</section>`;
}

/** Rows of one call a branch: the calls of the first, and between them those that only another one has. */
function aligned(/** @type {Found} */ { pairs }) {
  const rows = /** @type {Aligned[]} */ ([]), byLeft = new Map(/** @type {[string, number][]} */ ([]));
  for (const { left } of pairs[0].calls) if (left) byLeft.set(left.id, rows.push({ left, cells: [] }) - 1);
  const below = new Map(/** @type {[number, Aligned[]][]} */ ([]));
  pairs.forEach((pair, column) => {
    let after = -1;
    for (const call of pair.calls) {
      const same = call.left ? byLeft.get(call.left.id) : undefined;
      if (same !== undefined) rows[(after = same)].cells[column] = call;
      else below.set(after, [...(below.get(after) ?? []), { left: null, cells: Object.assign([], { [column]: call }) }]);
    }
  });
  return [...(below.get(-1) ?? []), ...rows.flatMap((row, i) => [row, ...(below.get(i) ?? [])])];
}

function Calls(/** @type {{found: Found}} */ { found }) {
  const rows = aligned(found);
  const differs = (/** @type {Aligned} */ { left, cells }) => !left || cells.some((one) => one && one.difference !== "same");
  const first = rows.findIndex(differs), point = found.fork_point, of = find(point?.trajectory ?? "");
  const cell = (/** @type {Api.SnapshotInfo | null | undefined} */ one, /** @type {string} */ kind) => one
    ? html`<a class="cell ${kind}" href=${link("t", one.trajectory, one.id)}><span class="number">${one.seq}</span> <b class=${failed(one.tool) ? "bad" : ""}>${line(one.tool.name, 60)}</b> <code>${brief(one.tool)}</code></a>`
    : html`<span class="cell none"></span>`;
  const row = (/** @type {number} */ i) => html`<div class="pair ${i === first ? "first" : ""}" style=${columns(found)}>
    ${cell(rows[i].left, differs(rows[i]) ? "other" : "")}${found.pairs.map((_, column) => {
      const one = rows[i].cells[column];
      return cell(one?.right, one && one.difference !== "same" ? one.difference : "");
    })}</div>`;
  return html`${first < 0 ? html`<p class="pad faint">The branches made the same calls with the same outcomes.</p>`
    : html`<p class="pad faint">They part ${point ? html`${first ? count(first, "call") : "right"} after <a href=${link("t", point.trajectory, point.id)}>call ${point.seq} of ${of ? line(nameOf(of.trajectory), 60) : short(point.trajectory)}</a>` : first ? `after ${count(first, "equal call")}` : "at the first call"}.</p>`}
    <${Rows} label="Aligned calls" count=${rows.length} height=${PAIR} row=${row} reveal=${first < 0 ? -1 : Math.min(rows.length - 1, first + 12)}/>`;
}
