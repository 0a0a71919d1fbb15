// One call: what it was, what it changed, the files and the conversation as they were.
import { duration, grouped, html, line, plain, short, signal, since, size, view } from "./dom.js";
import { at, get } from "./api.js";
import { away, current, go, link, nameOf, place } from "./state.js";
import { spoken } from "./log.js";
import { Changes, brief, changed, failed, log, sub } from "./ledger.js";
import { Acts } from "./acts.js";
import { Files } from "./files.js";
import { Output, Patch, Text, loaded } from "./text.js";
import { use } from "./timing.js";

/** @typedef {Api.SnapshotInfo} Snapshot */

export const TABS = ["patch", "output", "arguments", "files", "conversation", "effects", "tasks"];
const SAID_MAX = 100;

/** The snapshot that is looked at. */
export const inspected = signal(/** @type {Snapshot | null} */ (null));

export const Inspector = view((/** @type {import("./dom.js").Self<{}>} */ self) => {
  const missing = signal("");
  /** The call that was asked for last; anew when the daemon is back. */
  let asked = "";
  async function load() {
    const id = place.value[0] === "t" ? place.value[2] : undefined;
    if (!id) return void ((asked = ""), (missing.value = ""), (inspected.value = null));
    const shown = log.value, row = shown?.rowOf(id) ?? -1;
    const known = row >= 0 ? shown?.at(row) : undefined;
    if (known) return void ((asked = ""), (missing.value = ""), (inspected.value = known));
    const key = `${id} ${away.value ?? ""}`;
    if (asked === key) return;
    asked = key;
    try {
      const found = await /** @type {Promise<Snapshot>} */ (get(at`/snapshots/${id}`));
      if (asked === key) (missing.value = ""), (inspected.value = found);
    } catch (error) {
      if (asked === key) (inspected.value = null), (missing.value = /** @type {Error} */ (error).message);
    }
  }
  self.mounted = () => void load();
  self.componentDidUpdate = () => void load();
  return () => {
    place.value, log.value?.changed.value;
    load();
    const one = inspected.value;
    if (missing.value) return html`<aside class="inspector"><header><a class="back" href=${link("t", place.value[1])}>‹ all calls</a><p class="bad">${plain(missing.value)}</p></header></aside>`;
    if (!one) return html`<aside class="inspector"><${Facts}/></aside>`;
    const tab = TABS.includes(place.value[3]) ? place.value[3] : one.files && !changed(one) && one.tool.outputs.length ? "output" : "patch";
    const { tool } = one, said = log.value?.said.get(one.id);
    const label = (/** @type {string} */ name) =>
      name === "patch" && one.files ? html`patch <${Changes} files=${one.files}/>` : name === "conversation" ? `conversation ${one.messages}`
      : name === "effects" && one.side_effect === "irreversible" ? html`effects <span class="warn">!</span>` : name;
    return html`<aside class="inspector" aria-label="Call ${one.seq}">
      <header><a class="back" href=${link("t", place.value[1])}>‹ all calls</a>
        <h1>${line(tool.name, 200)} <code>${brief(tool)}</code></h1>
        <p>snapshot <a class="tag" href=${link("t", place.value[1], one.id)} title=${one.id}>${short(one.id)}</a> · call ${one.seq}${one.sub_agent ? ` of ${sub(one)}` : ""} · ${""}
          <span class=${failed(tool) ? "bad" : ""}>${tool.status}${tool.exit_code === null ? "" : ` (${tool.exit_code})`}</span>${" "}
          in ${duration(tool.duration_ms)} · pause ${duration(one.pause_ms)} · ${one.state} · ${since(one.created_at)}</p>
        ${one.model_use?.call_count ? html`<p>before it ${use(one.model_use)} in ${duration(one.model_use.duration_ms)}${one.model_use.cached_tokens ? `, ${one.model_use.cached_tokens} tokens from the provider's cache` : ""}</p>` : null}
        ${tool.error ? html`<p class="bad">${plain(tool.error, 1000)}</p>` : null}
        ${one.warnings.map((text) => html`<p class="warn">${line(text)}</p>`)}
        ${said ? html`<p class="said">${plain(said, 600)}</p>` : null}
        <${Acts} of=${one}/>
      </header>
      <div class="tabs" role="tablist">${TABS.map((name) => html`<button role="tab" aria-selected=${name === tab} onClick=${() => go(["t", place.value[1], one.id, name], true)}>${label(name)}</button>`)}</div>
      <div class="body" role="tabpanel" aria-label=${tab}>${
        tab === "patch" ? html`<${Patch} key=${one.id} a=${one.id}/>`
        : tab === "output" ? html`<${Output} key=${one.id} snapshot=${one}/>`
        : tab === "arguments" ? html`<${Text} key=${one.id} text=${JSON.stringify(tool.arguments, null, 2) ?? "null"} label="Arguments"/>`
        : tab === "files" ? html`<${Files} key=${one.id} id=${one.id}/>`
        : tab === "effects" ? html`<${Effects} key=${one.id} snapshot=${one}/>`
        : tab === "tasks" ? html`<${Tasks} key=${one.id} snapshot=${one}/>`
        : html`<${Conversation} key=${one.id} snapshot=${one}/>`}</div>
    </aside>`;
  };
});

/** What the trajectory is, when no call is chosen. */
const Facts = view(() => () => {
  const one = current.value;
  if (!one) return null;
  const { trajectory: it, snapshots, origin } = one;
  const facts = [["id", it.id], ["status", `${it.status}${it.exit_code === null ? "" : `, exit code ${it.exit_code}`}`],
    ["program", it.agent?.argv.join(" ") ?? "none"], ["image", it.image], ["network", it.network], ["snapshots", grouped(snapshots)], ["model", use(one.model_use)],
    ["files", one.file_bytes ? `${size(one.file_bytes)} written, ${size(one.layer_bytes)} of layers on disk` : ""], ["made", since(it.created_at)]];
  return html`<header><h1>${line(nameOf(it), 200)}</h1><${Acts} of=${null}/></header>
    <dl>${facts.filter(([, text]) => text).map(([name, text]) => html`<dt>${name}</dt><dd>${line(text)}</dd>`)}
    ${origin ? html`<dt>forked from</dt><dd><a href=${link("t", origin.trajectory, origin.id)}>call ${origin.seq} of ${short(origin.trajectory)}</a></dd>` : null}</dl>`;
});

const MEANING = {
  local: "It changes this sandbox alone: a rewind takes it back.",
  idempotent: "A second run under its key has no further effect.",
  irreversible: "It reaches outside, and no rewind takes it back. A resume does not run it again without a decision.",
};

/** What the call did to the world, and what rewinds of its trajectory left behind there. */
function Effects(/** @type {{snapshot: Snapshot}} */ { snapshot }) {
  const { side_effect: kind } = snapshot;
  return html`<div class="wide">${kind ? html`<p><b>${kind}</b> ${MEANING[kind]}</p>` : html`<p class="faint">No journal has this call: the daemon does not know its effect outside.</p>`}
    <h3>Left behind by rewinds</h3>
    ${loaded({
      what: snapshot.id,
      load: (ended) => /** @type {Promise<Api.EffectInfo[]>} */ (get(at`/trajectories/${snapshot.trajectory}/effects`, {}, ended)),
      show: (all) => all.length ? html`<table class="grid"><thead><tr><th>call</th><th>arguments</th><th>ended</th><th>compensation</th></tr></thead><tbody>${all.map((one) => html`<tr key=${one.call}>
          <td>${line(one.name, 80)}</td><td><code>${line(JSON.stringify(one.arguments) ?? "", 200)}</code></td><td>${one.status ?? "cut off"}</td>
          <td>${one.compensation ? html`<code>${line(one.compensation.join(" "), 200)}</code> ${one.compensated ?? "not run"}` : html`<span class="faint">none</span>`}</td></tr>`)}</tbody></table>`
        : html`<p class="faint">No irreversible call of this trajectory was left behind.</p>`,
    })}</div>`;
}

/** The agent's subtasks as they were. */
function Tasks(/** @type {{snapshot: Snapshot}} */ { snapshot }) {
  const to = (/** @type {string | null} */ id) => (id ? html`<a href=${link("s", id)}><code>${short(id)}</code></a>` : "");
  return loaded({
    what: snapshot.id,
    load: (ended) => /** @type {Promise<Api.TaskInfo[]>} */ (get(at`/snapshots/${snapshot.id}/tasks`, {}, ended)),
    show: (all) => html`<div class="wide">${all.length ? html`<table class="grid"><thead><tr><th>task</th><th>status</th><th>depends on</th><th>began</th><th>ended</th><th>note</th></tr></thead><tbody>
      ${all.map((one) => html`<tr key=${one.name}><td>${line(one.name, 200)}</td><td class=${one.status === "failed" ? "bad" : ""}>${one.status}</td><td>${line(one.depends.join(", "), 200)}</td>
        <td>${to(one.started_in)}</td><td>${to(one.ended_in)}</td><td>${one.note ? line(one.note, 400) : ""}</td></tr>`)}</tbody></table>`
      : html`<p class="faint">The agent has declared no tasks up to this call.</p>`}</div>`,
  });
}

/** The messages up to a call, the newest ones first on the page. */
const Conversation = view(() => {
  const most = signal(SAID_MAX);
  return (/** @type {{snapshot: Snapshot}} */ { snapshot }) => {
    const start = Math.max(0, snapshot.messages - most.value);
    return loaded({
      what: `${snapshot.id} ${start}`,
      load: (ended) => /** @type {Promise<Api.MessageInfo[]>} */ (get(at`/snapshots/${snapshot.id}/conversation`, { start, count: most.value }, ended)),
      show: (found) => html`<div class="conversation">
        ${start ? html`<button onClick=${() => (most.value *= 4)}>${start} earlier messages</button>` : null}
        ${found.length ? null : html`<p class="faint">Nothing has been said.</p>`}
        ${found.map((message, i) => html`<article key=${start + i} class=${message.role === "tool" ? "tool" : ""}><h4>${line(message.role, 40)}</h4>
          <pre>${spoken(message) ? plain(spoken(message), 20_000) : plain(JSON.stringify(message.content, null, 1), 4000)}</pre></article>`)}
      </div>`,
    });
  };
});
