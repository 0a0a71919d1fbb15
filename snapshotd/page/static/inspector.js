// One call: what it was, what it changed, the files and the conversation as they were.
import { ago, duration, html, line, plain, short, signal, size, view } from "./dom.js";
import { at, bytes, get, lines, path64 } from "./api.js";
import { current, go, link, place, spoken } from "./state.js";
import { Changes, brief, log } from "./ledger.js";
import { acts } from "./acts.js";
import { Loaded, Output, Patch, Text } from "./text.js";

export const TABS = ["patch", "output", "arguments", "files", "conversation"];
const VIEW_MAX = 1 << 20, SAID_MAX = 100;

/** The snapshot that is looked at. */
export const inspected = signal(/** @type {import("./state.js").Snapshot | null} */ (null));

export const Inspector = view((self) => {
  async function load() {
    const id = place.value[0] === "t" ? place.value[2] : undefined;
    if (!id) return void (inspected.value = null);
    const shown = log.value, row = shown?.rowOf(id) ?? -1;
    const known = row >= 0 ? shown?.at(row) : undefined;
    if (known) return void (inspected.value = known);
    if (inspected.peek()?.id === id) return;
    const found = await get(at`/snapshots/${id}`).catch(() => null);
    if (place.value[2] === id) inspected.value = found;
  }
  self.mounted = () => void load();
  self.componentDidUpdate = () => void load();
  return () => {
    place.value, log.value?.changed.value;
    load();
    const one = inspected.value;
    if (!one) return html`<aside class="inspector"><${Facts}/></aside>`;
    const tab = TABS.includes(place.value[3]) ? place.value[3] : one.files && !changes(one) && one.tool.outputs.length ? "output" : "patch";
    const { tool } = one, said = log.value?.said.get(one.id);
    return html`<aside class="inspector" aria-label="Call ${one.seq}">
      <header>
        <h1>${line(tool.name, 200)} <code>${brief(tool)}</code></h1>
        <p>snapshot <a class="tag" href=${link("t", place.value[1], one.id)} title=${one.id}>${short(one.id)}</a> · call ${one.seq} · ${""}
          <span class=${tool.status === "done" && !tool.exit_code ? "" : "bad"}>${tool.status}${tool.exit_code === null ? "" : ` (${tool.exit_code})`}</span>${" "}
          in ${duration(tool.duration_ms)} · pause ${duration(one.pause_ms)} · ${one.state} · ${ago(one.created_at)}</p>
        ${tool.error ? html`<p class="bad">${plain(tool.error, 1000)}</p>` : null}
        ${one.warnings.map((text) => html`<p class="warn">${line(text)}</p>`)}
        ${said ? html`<p class="said">${plain(said, 600)}</p>` : null}
        <div class="acts">${acts(one).map(({ name, key, main, run }) => html`<button class=${main ? "main" : ""} onClick=${run} title=${`${name} (${key})`}>${name} <kbd>${key}</kbd></button>`)}</div>
      </header>
      <div class="tabs" role="tablist">${TABS.map((name) => html`<button role="tab" aria-selected=${name === tab} onClick=${() => go(["t", place.value[1], one.id, name], true)}>
        ${name === "patch" && one.files ? html`patch <${Changes} files=${one.files}/>` : name === "conversation" ? `conversation ${one.messages}` : name}</button>`)}</div>
      <div class="body" role="tabpanel" aria-label=${tab}>${
        tab === "patch" ? html`<${Patch} key=${one.id} a=${one.id}/>`
        : tab === "output" ? html`<${Output} key=${one.id} snapshot=${one}/>`
        : tab === "arguments" ? html`<${Text} key=${one.id} text=${JSON.stringify(tool.arguments, null, 2) ?? "null"} label="Arguments"/>`
        : tab === "files" ? html`<${Files} key=${one.id} id=${one.id}/>`
        : html`<${Conversation} key=${one.id} snapshot=${one}/>`}</div>
    </aside>`;
  };
});

const changes = (/** @type {any} */ { files }) => files.added + files.changed + files.deleted;

/** What the trajectory is, when no call is chosen. */
function Facts() {
  const one = current.value;
  if (!one) return null;
  const { trajectory: it, snapshots, origin } = one;
  const facts = [["id", it.id], ["status", `${it.status}${it.exit_code === null ? "" : `, exit code ${it.exit_code}`}`],
    ["program", it.agent?.argv.join(" ") ?? "none"], ["image", it.image], ["calls", String(snapshots)], ["made", `${ago(it.created_at)} ago`]];
  return html`<header><h1>${line(it.name ?? short(it.id), 200)}</h1>
    <div class="acts">${acts(null).map(({ name, key, run }) => html`<button onClick=${run}>${name} <kbd>${key}</kbd></button>`)}</div></header>
    <dl>${facts.map(([name, text]) => html`<dt>${name}</dt><dd>${line(text)}</dd>`)}
    ${origin ? html`<dt>forked from</dt><dd><a href=${link("t", origin.trajectory, origin.id)}>call ${origin.seq} of ${short(origin.trajectory)}</a></dd>` : null}</dl>`;
}

const Files = view((self) => {
  const path = signal("/workspace"), file = signal(/** @type {any} */ (null));
  async function list(/** @type {string} */ id, /** @type {AbortSignal} */ ended) {
    const found = [];
    for await (const event of lines(at`/files/${id}/list`, { path_b64: path64(path.value) }, ended)) if (event.event !== "end") found.push(event);
    return found.sort((a, b) => Number(b.kind === "directory") - Number(a.kind === "directory") || (a.path < b.path ? -1 : 1));
  }
  return ({ id }) => {
    const parts = path.value.split("/").filter(Boolean);
    const crumbs = html`<div class="crumbs"><button onClick=${() => ((file.value = null), (path.value = "/"))}>/</button>${parts.map((part, i) => html`
      <button onClick=${() => ((file.value = null), (path.value = `/${parts.slice(0, i + 1).join("/")}`))}>${line(part, 80)}</button>`)}${
      file.value ? html` <b>${line(file.value.name, 200)}</b> <button onClick=${() => download(id, file.value)}>Download</button>` : null}</div>`;
    if (file.value) return html`${crumbs}<${Loaded} what=${`${id} ${file.value.path}`}
      load=${(/** @type {AbortSignal} */ ended) => bytes(at`/snapshots/${id}/file`, { path_b64: path64(file.value.path) }, ended)}
      show=${(/** @type {Uint8Array} */ data) => data.subarray(0, 8000).includes(0)
        ? html`<p class="pad faint">${size(data.length)} that are no text.</p>`
        : html`<${Text} text=${new TextDecoder().decode(data.subarray(0, VIEW_MAX))} label="File"/>`}/>`;
    return html`${crumbs}<${Loaded} what=${`${id} ${path.value}`} load=${(/** @type {AbortSignal} */ ended) => list(id, ended)}
      show=${(/** @type {any[]} */ found) => html`<table class="files"><tbody>${found.slice(0, 2000).map((one) => {
        const name = one.path.split("/").at(-1);
        return html`<tr key=${one.path}><td><button disabled=${one.kind !== "directory" && one.kind !== "file"} onClick=${() => one.kind === "directory" ? (path.value = `/${one.path.replace(/^\//, "")}`)
          : one.size > VIEW_MAX * 8 ? download(id, { ...one, name }) : (file.value = { ...one, name })}>${line(name, 200)}${one.kind === "directory" ? "/" : ""}</button></td>
          <td class="number">${one.kind === "file" ? size(one.size) : one.kind}</td><td class="number">${one.mode}</td></tr>`;
      })}</tbody></table>${found.length > 2000 ? html`<p class="pad faint">and ${found.length - 2000} more</p>` : null}`}/>`;
  };
});

/** Give the browser a file to store; it is never shown as a page. */
async function download(/** @type {string} */ id, /** @type {any} */ { path, name }) {
  const data = await bytes(at`/snapshots/${id}/file`, { path_b64: path64(path) });
  const made = URL.createObjectURL(new Blob([data], { type: "application/octet-stream" }));
  Object.assign(document.createElement("a"), { href: made, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(made), 10_000);
}

const Conversation = view(() => {
  const count = signal(SAID_MAX);
  return ({ snapshot }) => {
    const start = Math.max(0, snapshot.messages - count.value);
    return html`<${Loaded} what=${`${snapshot.id} ${start}`}
      load=${(/** @type {AbortSignal} */ ended) => get(at`/snapshots/${snapshot.id}/conversation`, { start, count: count.value }, ended)}
      show=${(/** @type {any[]} */ found) => html`<div class="conversation">
        ${start ? html`<button onClick=${() => (count.value *= 4)}>${start} earlier messages</button>` : null}
        ${found.length ? null : html`<p class="faint">Nothing has been said.</p>`}
        ${found.map((message, i) => html`<article key=${start + i} class=${message.role}><h4>${line(message.role, 40)}</h4>
          <pre>${spoken(message) ? plain(spoken(message), 20_000) : plain(JSON.stringify(message.content, null, 1), 4000)}</pre></article>`)}
      </div>`}/>`;
  };
});
