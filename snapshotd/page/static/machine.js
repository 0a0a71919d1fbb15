// The machine: what takes space, what is not stored yet, what runs, and how long sandboxes stood still.
import { count, duration, grouped, html, line, signal, size, view } from "./dom.js";
import { get } from "./api.js";
import { link, say } from "./state.js";

/** @typedef {Api.StatsInfo} Stats */

const EVERY_MS = 2000, HOUR = 60;
const titleOf = (/** @type {{name: string | null, trajectory: string}} */ { name, trajectory }) => line(name ?? trajectory.slice(0, 12), 60);

export const Machine = view((/** @type {import("./dom.js").Self<{}>} */ self) => {
  const now = signal(/** @type {Stats | null} */ (null));
  let before = /** @type {Stats | null} */ (null), timer = 0;
  async function read() {
    try {
      const found = /** @type {Stats} */ (await get("/stats", { trajectories: 20 }));
      before = now.peek();
      now.value = found;
    } catch (error) {
      say(error);
    }
    if (timer >= 0) timer = setTimeout(read, EVERY_MS);
  }
  self.mounted = () => {
    read();
    return () => {
      clearTimeout(timer);
      timer = -1;
    };
  };

  /** Processors that a sandbox used since the look before; unknown at the first. */
  function load(/** @type {Api.SandboxStats} */ { trajectory, started_at, cpu_ms }) {
    const last = before?.sandboxes.find((one) => one.trajectory === trajectory && one.started_at === started_at);
    return last && before && now.value ? Math.max(0, (cpu_ms - last.cpu_ms) / (Date.parse(now.value.measured_at) - Date.parse(before.measured_at))) : null;
  }

  return () => {
    const stats = now.value;
    if (!stats) return html`<main class="wide"><h1>This machine</h1><p class="faint" role="status">…</p></main>`;
    const { usage, sandboxes, disk, pauses } = stats, most = Math.max(1, ...disk.map(({ layer_bytes }) => layer_bytes));
    const minutes = pauses.minutes.length, number = pauses.minutes.reduce((sum, { counts }) => sum + counts.reduce((a, b) => a + b, 0), 0);
    return html`<main class="wide machine"><h1>This machine</h1>
      <section><h3>Disk</h3><${Bar} used=${usage.layer_bytes} whole=${usage.layer_budget_bytes}/>
        <dl><dt>layers</dt><dd>${size(usage.layer_bytes)} of ${size(usage.layer_budget_bytes)}</dd><dt>repository</dt><dd>${size(usage.repository_bytes)}</dd>
          <dt>captured, not stored yet</dt><dd>${count(usage.unarchived, "snapshot")}, ${size(usage.spool_bytes)} of outputs</dd>
          ${Object.entries(usage.states).filter(([name, number]) => number && name !== "captured").map(([name, number]) => html`<dt>${name}</dt><dd>${count(number, "snapshot")}</dd>`)}</dl></section>
      <section><h3>Pauses of the last hour</h3>${minutes ? html`<p class="faint">${count(number, "pause")}, ${duration(pauses.minutes.reduce((sum, { sum_ms }) => sum + sum_ms, 0) / Math.max(1, number))} on average, the longest ${duration(Math.max(...pauses.minutes.map(({ longest_ms }) => longest_ms)))}</p><${Pauses} stats=${stats}/>`
        : html`<p class="faint">No sandbox stood still for a snapshot.</p>`}</section>
      ${stats.nodes.length ? html`<${Fleet} nodes=${stats.nodes}/>` : null}
      <section class="all"><h3>Sandboxes</h3>${sandboxes.length ? html`<div class="scroll"><table class="grid"><thead><tr><th>trajectory</th><th>runtime</th><th>agent</th><th>processors</th><th>memory</th><th>processes</th></tr></thead><tbody>
        ${sandboxes.map((one) => {
          const used = load(one);
          return html`<tr key=${one.trajectory}><td><a href=${link("t", one.trajectory)}>${titleOf(one)}</a></td><td>${one.runtime}</td><td>${one.agent_running ? "runs" : ""}</td>
            <td class="number">${used === null ? "…" : used.toFixed(2)} of ${one.cpus}</td><td class="number">${size(one.used_memory_bytes)} of ${size(one.memory_bytes)}</td><td class="number">${one.process_count}</td></tr>`;
        })}</tbody></table></div>` : html`<p class="faint">None runs.</p>`}</section>
      <section class="all"><h3>Disk by trajectory</h3>${disk.length ? html`<div class="scroll"><table class="grid"><thead><tr><th>trajectory</th><th>layers on disk</th><th></th><th>files written</th></tr></thead><tbody>
        ${disk.map((one) => html`<tr key=${one.trajectory}><td><a href=${link("t", one.trajectory)}>${titleOf(one)}</a></td><td class="number">${size(one.layer_bytes)}</td>
          <td><svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width=${(100 * one.layer_bytes) / most} height="8" rx="1"/></svg></td><td class="number">${size(one.file_bytes)}</td></tr>`)}</tbody></table></div>` : html`<p class="faint">No trajectory has layers on disk.</p>`}</section></main>`;
  };
});

/** The nodes of the fleet: what each owns, its room, and how far it lags behind with publishing. */
function Fleet(/** @type {{nodes: Api.NodeStats[]}} */ { nodes }) {
  return html`<section class="all"><h3>Fleet</h3><div class="scroll"><table class="grid"><thead><tr><th>node</th><th>state</th><th>lease</th><th>trajectories</th><th>free memory</th><th>starting</th><th>not published</th></tr></thead><tbody>
    ${nodes.map((one) => html`<tr key=${one.node}><td>${line(one.node, 63)}</td><td class=${one.state === "lost" ? "bad" : one.state === "draining" ? "warn" : ""}>${one.state}</td><td class="number">${one.lease_s ? `${Math.round(one.lease_s)} s` : "over"}</td>
      <td class="number">${grouped(one.trajectory_count)}</td><td class="number">${size(one.free_memory_bytes)}</td><td class="number">${one.starting_count} of ${one.starting_max}</td><td class="number">${count(one.unpublished_count, "snapshot")}</td></tr>`)}</tbody></table></div></section>`;
}

/** One bar a minute: the longest pause in it, on a scale by powers of ten. */
function Pauses(/** @type {{stats: Stats}} */ { stats }) {
  const end = Date.parse(stats.measured_at), high = 100, top = Math.max(100, ...stats.pauses.minutes.map(({ longest_ms }) => longest_ms));
  const y = (/** @type {number} */ ms) => high - (Math.log10(1 + ms) / Math.log10(1 + top)) * (high - 8);
  const marks = [1, 10, 100, 1000, 10_000].filter((one) => one <= top);
  return html`<svg class="pauses" viewBox="0 0 520 122" role="img" aria-label="Pauses by minute">
    ${marks.map((ms) => html`<line x1="52" x2="512" y1=${y(ms)} y2=${y(ms)}/><text x="46" y=${y(ms) + 4} text-anchor="end">${duration(ms)}</text>`)}
    ${stats.pauses.minutes.map((one) => {
      const x = 512 - ((end - Date.parse(one.began_at)) / 60_000) * (460 / HOUR), total = one.counts.reduce((a, b) => a + b, 0);
      return html`<g><title>${new Date(one.began_at).toLocaleTimeString()}: ${count(total, "pause")}, ${duration(one.sum_ms / Math.max(1, total))} on average, longest ${duration(one.longest_ms)}</title>
        <rect class="longest" x=${x} y=${y(one.longest_ms)} width="6" height=${high - y(one.longest_ms)} rx="1"/><rect class="mean" x=${x} y=${y(one.sum_ms / Math.max(1, total))} width="6" height=${high - y(one.sum_ms / Math.max(1, total))} rx="1"/></g>`;
    })}
    <text x="52" y="118">an hour ago</text><text x="512" y="118" text-anchor="end">now</text></svg>`;
}

function Bar(/** @type {{used: number, whole: number}} */ { used, whole }) {
  const share = whole ? Math.min(1, used / whole) : 0;
  return html`<svg class="bar" viewBox="0 0 400 8" preserveAspectRatio="none" role="img" aria-label="${Math.round(share * 100)} % used"><rect class="whole" width="400" height="8" rx="4"/><rect width=${400 * share} height="8" rx="4"/></svg>`;
}
