// The machine: what takes space, what is not stored yet, what runs.
import { html, size, view } from "./dom.js";
import { get } from "./api.js";
import { link, nameOf, overview } from "./state.js";
import { loaded } from "./text.js";

export const Machine = view(() => () => html`<main class="wide"><h1>This machine</h1>
  ${loaded({ what: String(overview.value.length), load: async () => ({
    usage: /** @type {Api.UsageInfo} */ (await get("/usage")), status: /** @type {Record<string, string>} */ (await get("/status")), sandboxes: /** @type {Api.SandboxInfo[]} */ (await get("/sandboxes")) }), show: ({ usage, status, sandboxes }) => html`
    <h3>Disk</h3><${Bar} used=${usage.layer_bytes} whole=${usage.layer_budget_bytes}/>
    <dl><dt>layers</dt><dd>${size(usage.layer_bytes)} of ${size(usage.layer_budget_bytes)}</dd><dt>repository</dt><dd>${size(usage.repository_bytes)}</dd>
      <dt>captured, not stored yet</dt><dd>${usage.unarchived} snapshots, ${size(usage.spool_bytes)} of outputs</dd>
      ${Object.entries(usage.states).map(([name, count]) => html`<dt>${name}</dt><dd>${count} snapshots</dd>`)}</dl>
    <h3>Sandboxes</h3>${sandboxes.length ? html`<table class="grid"><thead><tr><th>trajectory</th><th>runtime</th><th>agent</th><th>memory</th><th>processors</th></tr></thead><tbody>
      ${sandboxes.map((one) => html`<tr key=${one.trajectory.id}><td><a href=${link("t", nameOf(one.trajectory))}>${nameOf(one.trajectory)}</a></td><td>${one.trajectory.runtime}</td>
        <td>${one.agent_running ? "runs" : ""}</td><td class="number">${size(one.trajectory.limits.memory_bytes)}</td><td class="number">${one.trajectory.limits.cpus}</td></tr>`)}</tbody></table>` : html`<p class="faint">None runs.</p>`}
    <h3>Daemon</h3><dl><dt>version</dt><dd>${status.daemon_version}</dd><dt>state directory</dt><dd><code>${status.state_dir}</code></dd><dt>process</dt><dd>${status.pid}</dd></dl>` })}</main>`);

function Bar(/** @type {{used: number, whole: number}} */ { used, whole }) {
  const share = whole ? Math.min(1, used / whole) : 0;
  return html`<svg class="bar" viewBox="0 0 400 8" preserveAspectRatio="none" role="img" aria-label="${Math.round(share * 100)} % used"><rect class="whole" width="400" height="8" rx="4"/><rect width=${400 * share} height="8" rx="4"/></svg>`;
}
