// The trajectories on the left: forks below what they come from.
import { ago, count, html, line, money, size, typed, view } from "./dom.js";
import { filter, find, isRead, link, nameOf, overview, place, waiting } from "./state.js";
import { Rows } from "./rows.js";

/** @typedef {Api.OverviewInfo} Overview */
/** @typedef {{one: Overview, depth: number}} Placed */

/** What a trajectory cost and how much it wrote, in few words. */
export const figures = (/** @type {Overview} */ { model_use: model, file_bytes }) =>
  [model.cost_usd ? `$${money(model.cost_usd)}` : "", file_bytes ? size(file_bytes) : ""].filter(Boolean);

export const Trajectories = view(() => () => {
  const wanted = filter.value.toLowerCase(), all = overview.value;
  const known = all.filter(({ trajectory: { id, name, status, agent } }) => `${name ?? ""} ${id} ${status} ${agent?.argv.join(" ") ?? ""}`.toLowerCase().includes(wanted));
  const shown = wanted ? known.map((one) => ({ one, depth: 0 })).reverse() : forest(known);
  const forks = new Map(/** @type {[string, number][]} */ ([]));
  for (const { origin } of all) if (origin) forks.set(origin.trajectory, (forks.get(origin.trajectory) ?? 0) + 1);
  const asks = new Set(waiting.value.map((one) => one.trajectory));
  const mine = place.value[0] === "t" ? find(place.value[1] ?? "") : undefined;
  const row = (/** @type {number} */ i) => {
    const { one, depth } = shown[i], { trajectory } = one, children = forks.get(trajectory.id);
    const facts = [asks.has(trajectory.id) ? "waits for you" : `${trajectory.status}${trajectory.exit_code ? ` (${trajectory.exit_code})` : ""}`, count(one.snapshots, "snapshot"), ...(children ? [count(children, "fork")] : []), ...figures(one),
      ...(trajectory.agent ? [line(trajectory.agent.argv.join(" "), 60)] : [])];
    return html`<a class="trajectory ${mine === one ? "on" : ""}" href=${link("t", nameOf(trajectory))} aria-current=${mine === one ? "page" : null}
        style=${{ paddingLeft: `${14 + Math.min(depth, 6) * 12}px` }}>
      <i class="dot ${asks.has(trajectory.id) ? "interrupted" : trajectory.status}" title=${trajectory.status}></i>
      <b>${line(nameOf(trajectory), 80)}</b><span class="faint">${one.newest ? ago(one.newest.created_at) : ""}</span>
      <small>${facts.join(" · ")}</small>
    </a>`;
  };
  return html`<nav aria-label="Trajectories">
    <input id="filter" type="search" placeholder="Filter trajectories" aria-label="Filter trajectories" value=${filter.value} onInput=${(/** @type {Event} */ event) => (filter.value = typed(event))}/>
    <${Rows} label="Trajectories" count=${shown.length} height=${46} row=${row} keyOf=${(/** @type {number} */ i) => shown[i].one.trajectory.id}/>
    ${shown.length ? null : html`<p class="faint pad">${all.length ? "None has this in its name." : !isRead.overview.value ? "…" : html`No trajectories yet. <code>snapshotd run agent.py</code> makes one.`}</p>`}
  </nav>`;
});

/** Each below the one that it was forked from; new families first. @returns {Placed[]} */
export function forest(/** @type {Overview[]} */ known) {
  const below = new Map(/** @type {[string, Overview[]][]} */ ([]));
  const ids = new Set(known.map(({ trajectory }) => trajectory.id));
  for (const one of known) {
    const parent = one.origin && ids.has(one.origin.trajectory) ? one.origin.trajectory : "";
    const all = below.get(parent);
    if (all) all.push(one);
    else below.set(parent, [one]);
  }
  const found = /** @type {Placed[]} */ ([]);
  const todo = (below.get("") ?? []).map((one) => ({ one, depth: 0 }));
  for (let next = todo.pop(); next; next = todo.pop()) {
    found.push(next);
    const { one, depth } = next;
    todo.push(...(below.get(one.trajectory.id) ?? []).map((child) => ({ one: child, depth: depth + 1 })).reverse());
  }
  return found;
}
