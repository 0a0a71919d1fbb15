// The page: a session, then the views.
import { effect, html, line, render, signal, view } from "./dom.js";
import { at, get, openSession } from "./api.js";
import { away, current, go, link, nameOf, partsOf, place, readTrajectories, say, waiting, watch } from "./state.js";
import { saved } from "./saved.js";
import { Ledger, log, step } from "./ledger.js";
import { readEarly } from "./log.js";
import { Trajectories } from "./trajectories.js";
import { Timing } from "./timing.js";
import { Inspector, TABS } from "./inspector.js";
import { press } from "./acts.js";
import { Dialog, Notice, dialog } from "./dialog.js";
import { Approvals } from "./approvals.js";
import { Compare } from "./compare.js";
import { Experiments } from "./experiments.js";
import { ALL, Find, pressInFind } from "./find.js";
import { Machine } from "./machine.js";
import { Terminal } from "./terminal.js";
import { Tree, pressInTree } from "./tree.js";

/** The page is drawn once, with its first rows, unless they take longer than this. */
const EMPTY_MS = 200;
const help = signal(false);
const KEYS = [["j k", "next, previous call"], ["g G", "first, newest call"], ["1–7", "patch, output, arguments, files, conversation, effects, tasks"], ["f", "fork from here"],
  ["r", "rewind to here"], ["c", "compare"], ["x", "terminal on a throw-away fork"], ["t", "tag"], ["d", "restore: download the files"], ["p", "preview of an apply"], ["e", "experiment from here"], ["m", "promote a fork"],
  ["s", "stop or resume"], ["u", "undo a rewind"], ["v", "tree of forks; space chooses, c compares"], ["a", "approvals"], ["/", "find text; in a trajectory: only there"], ["l", "filter the list"], ["Esc", "close, or back to the trajectory"], ["?", "these keys"]];

/** A snapshot's own address leads to its place in its trajectory. */
effect(() => {
  const [kind, id] = place.value;
  if (kind === "s" && id) get(at`/snapshots/${id}`).then((found) => {
    const one = /** @type {Api.SnapshotInfo} */ (found);
    go(["t", one.trajectory, one.id], true);
  }).catch(say);
});

const Top = view(() => () => {
  const where = place.value[0], asks = waiting.value.length;
  const to = (/** @type {string} */ name, /** @type {import("./dom.js").Drawn} */ text, kind = "") => html`<a class="pill ${kind}" href=${link(name)} aria-current=${where === name ? "page" : null}>${text}</a>`;
  return html`<header class="top"><a href="#/"><b>snapshotd</b></a>
    ${current.value ? html`<span class="faint">/</span><span class="here">${line(nameOf(current.value.trajectory), 60)}</span>` : null}
    <span class="push"></span>${to("tree", "Tree")}
    ${saved ? null : to("find", "Find /")}
    ${saved ? html`<span class="faint">saved ${saved.made}</span>` : html`${to("experiments", "Experiments")}${to("machine", "Machine")}
      ${to("approvals", asks ? html`${asks} wait${asks === 1 ? "s" : ""}<span class="wide-only"> for you</span>` : "Approvals", asks ? "ask" : "")}`}
    <button class="plain" aria-label="Keys" onClick=${() => (help.value = true)}><kbd>?</kbd></button></header>`;
});

const VIEWS = /** @type {Record<string, unknown>} */ ({ approvals: Approvals, compare: Compare, experiments: Experiments, find: Find, machine: Machine, terminal: Terminal, tree: Tree });

const Page = view(() => () => {
  const where = place.value[0], shown = VIEWS[where];
  return html`<${Top}/>
    ${away.value ? html`<p class="away" role="alert">${away.value}</p>` : null}
    ${saved ? saved.notes.map((text) => html`<p class="away">${text}</p>`) : null}
    <div class="panes ${shown ? "whole" : where ? "" : "list"} ${!shown && place.value[2] ? "chosen" : ""}">
      <${Trajectories}/>
      ${shown ? html`<${shown} key=${where === "terminal" ? place.value[1] : where} id=${place.value[1]}/>` : html`<${Ledger}/><${Inspector}/>${log.value && current.value ? html`<${Timing} log=${log.value}/>` : null}`}
    </div>
    <${Dialog}/>
    ${help.value ? html`<dialog ref=${(/** @type {HTMLDialogElement | null} */ box) => box && !box.open && box.showModal()} onClose=${() => (help.value = false)}><h2>Keys</h2>
      <dl>${KEYS.map(([key, text]) => html`<dt>${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${text}</dd>`)}</dl>
      <form method="dialog"><footer><button class="main">Close</button></footer></form></dialog>` : null}
    ${dialog.value ? null : html`<${Notice}/>`}`;
});

addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target), { key } = event, [where, name, id] = place.value;
  if (event.ctrlKey || event.metaKey || event.altKey || dialog.value || help.value || where === "terminal") return;
  if (target.matches("input:not([type=checkbox]), textarea, select")) return key === "Escape" ? target.blur() : undefined;
  const last = log.value?.count.value ?? 0;
  if (key === "?") help.value = true;
  else if (key === "l") document.getElementById("filter")?.focus();
  else if (key === "a" && !saved) go(["approvals"]);
  else if (key === "/" && !saved) {
    if (where === "find") document.getElementById("find")?.focus();
    else go(["find", where === "t" && current.value ? current.value.trajectory.id : ALL]);
  } else if (where === "tree" || where === "find") {
    if (!(where === "tree" ? pressInTree : pressInFind)(key)) return;
  } else if (where !== "t") return;
  else if (key === "j" || key === "ArrowDown") step(1);
  else if (key === "k" || key === "ArrowUp") step(-1);
  else if (key === "g") step(-last);
  else if (key === "G") step(last);
  else if (key === "Escape") go(["t", name]);
  else if (TABS[Number(key) - 1] && id) go(["t", name, id, TABS[Number(key) - 1]], true);
  else if (!press(key)) return;
  event.preventDefault();
});

async function begin() {
  const given = /^#token=([\w-]+)(.*)$/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", given[2] ? `#${given[2]}` : "#/");
    place.value = partsOf(given[2]);
    await openSession(given[1]).catch(say);
  }
  const [kind, name] = place.value, early = !saved && kind === "t" && name ? readEarly(name) : null;
  await Promise.race([Promise.all([readTrajectories(), early]), new Promise((done) => setTimeout(done, EMPTY_MS))]);
  document.body.replaceChildren();
  render(html`<${Page}/>`, document.body);
  if (!saved) await watch();
}

begin();
