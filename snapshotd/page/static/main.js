// The page: a session, then the views.
import { html, line, render, signal, view } from "./dom.js";
import { at, get, openSession } from "./api.js";
import { approvals, away, filter, find, go, nameOf, current, notice, place, refresh, say, waiting, watch } from "./state.js";
import { Ledger, Trajectories, log, step } from "./ledger.js";
import { Inspector, TABS } from "./inspector.js";
import { Dialog, dialog, press } from "./acts.js";
import { Approvals } from "./approvals.js";
import { Compare } from "./compare.js";
import { Experiments } from "./experiments.js";
import { Machine } from "./machine.js";

const help = signal(false);
const KEYS = [["j k", "next, previous call"], ["g G", "first, newest call"], ["1–5", "patch, output, arguments, files, conversation"], ["f", "fork from here"],
  ["r", "rewind to here"], ["c", "compare"], ["t", "tag"], ["s", "stop or resume"], ["u", "undo a rewind"], ["a", "approvals"], ["/", "filter"], ["Esc", "close, or back to the trajectory"], ["?", "these keys"]];

const Page = view(() => () => {
  if (place.value[0] === "s") find(place.value[1]) || get(at`/snapshots/${place.value[1]}`).then((one) => go(["t", one.trajectory, one.id], true)).catch(say);
  const where = place.value[0], asks = waiting.value.length;
  return html`<header class="top"><a href="#/"><b>snapshotd</b></a>
      ${current.value ? html`<span class="faint">/</span><span>${line(nameOf(current.value.trajectory), 60)}</span>` : null}
      <input id="filter" type="search" placeholder="Filter trajectories   /" aria-label="Filter trajectories" value=${filter.value} onInput=${(/** @type {any} */ event) => (filter.value = event.target.value)}/>
      <span class="push"></span>
      <a class="pill" href="#/experiments">Experiments</a><a class="pill" href="#/machine">Machine</a>
      <a class="pill ${asks ? "ask" : ""}" href="#/approvals">${asks ? `${asks} wait${asks === 1 ? "s" : ""} for you` : "Approvals"}</a>
      <button class="plain" aria-label="Keys" onClick=${() => (help.value = true)}><kbd>?</kbd></button></header>
    ${away.value ? html`<p class="away" role="alert">${away.value}</p>` : null}
    <div class="panes ${where ?? "list"} ${place.value[2] ? "chosen" : ""}">
      <${Trajectories} filter=${filter.value}/>
      ${where === "approvals" ? html`<${Approvals}/>` : where === "compare" ? html`<${Compare}/>` : where === "experiments" ? html`<${Experiments}/>` : where === "machine" ? html`<${Machine}/>` : html`<${Ledger}/><${Inspector}/>`}
    </div>
    <${Dialog}/>
    ${help.value ? html`<dialog ref=${(/** @type {any} */ box) => box && !box.open && box.showModal()} onClose=${() => (help.value = false)}><h2>Keys</h2>
      <dl>${KEYS.map(([key, text]) => html`<dt>${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${text}</dd>`)}</dl>
      <form method="dialog"><button class="main">Close</button></form></dialog>` : null}
    ${notice.value ? html`<p class="notice ${notice.value.bad ? "bad" : ""}" role="status">${line(notice.value.text, 1000)}</p>` : null}`;
});

addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.value || help.value) return;
  if (target.matches("input, textarea, select")) return event.key === "Escape" ? target.blur() : undefined;
  const shown = log.value;
  if (event.key === "?") help.value = true;
  else if (event.key === "/") document.getElementById("filter")?.focus();
  else if (event.key === "a") go(["approvals"]);
  else if (place.value[0] !== "t") return;
  else if (event.key === "j" || event.key === "ArrowDown") step(1);
  else if (event.key === "k" || event.key === "ArrowUp") step(-1);
  else if (event.key === "g") step(-(shown?.count.value ?? 0));
  else if (event.key === "G") step(shown?.count.value ?? 0);
  else if (event.key === "Escape") go(["t", place.value[1]]);
  else if (TABS[Number(event.key) - 1] && place.value[2]) go(["t", place.value[1], place.value[2], TABS[Number(event.key) - 1]], true);
  else if (!press(event.key)) return;
  event.preventDefault();
});

async function begin() {
  const given = /^#token=([\w-]+)(.*)$/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", given[2] ? `#${given[2]}` : "#/");
    place.value = given[2].split("/").filter(Boolean).map(decodeURIComponent);
    await openSession(given[1]).catch(say);
  }
  document.body.replaceChildren();
  render(html`<${Page}/>`, document.body);
  await refresh();
  await watch();
}

begin();
