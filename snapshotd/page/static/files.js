// The files of a snapshot as they were: browse, view, download.
import { html, line, signal, size, view } from "./dom.js";
import { at, bytes, lines, path64, stored, tree } from "./api.js";
import { saved } from "./saved.js";
import { Text, loaded } from "./text.js";

/** @typedef {Api.FileInfo & {event: string}} Listed */

const VIEW_MAX = 8 << 20, TEXT_MAX = 1 << 20, SHOWN_MAX = 2000;
const inBytes = (/** @type {Uint8Array} */ data) => Array.from(data, (one) => String.fromCharCode(one)).join("");
/** The path of something that was listed, with a character for each byte. */
const pathOf = (/** @type {Listed} */ { path, path_b64: given }) => `/${given ? atob(given.replaceAll("-", "+").replaceAll("_", "/")) : inBytes(new TextEncoder().encode(path))}`;
/** The last name of a path, for people. */
const nameIn = (/** @type {string} */ path) => line(new TextDecoder().decode(Uint8Array.from(path.split("/").at(-1) ?? "", (one) => one.charCodeAt(0))), 200);

async function list(/** @type {string} */ id, /** @type {string} */ path, /** @type {AbortSignal} */ ended) {
  const found = [];
  for await (const event of /** @type {AsyncGenerator<Listed>} */ (lines(at`/files/${id}/list`, { path_b64: path64(path) }, ended))) if (event.event !== "end") found.push(event);
  return found.sort((a, b) => Number(b.kind === "directory") - Number(a.kind === "directory") || (a.path < b.path ? -1 : 1));
}

/** Let the browser store a file, of any size; it is never shown as a page. */
const download = (/** @type {string} */ id, /** @type {string} */ path) =>
  Object.assign(document.createElement("a"), { href: stored(at`/snapshots/${id}/file`, { path_b64: path64(path) }), download: nameIn(path) }).click();

export const Files = view(() => {
  const path = signal("/workspace"), file = signal(/** @type {string | null} */ (null));
  const open = (/** @type {string} */ folder) => ((file.value = null), (path.value = folder));
  return (/** @type {{id: string}} */ { id }) => {
    if (saved) return html`<p class="pad faint">Files are in the store, and not in this file: <code>snapshotd restore</code> writes them into a folder.</p>`;
    const parts = path.value.split("/").filter(Boolean), shown = file.value;
    const crumbs = html`<div class="crumbs"><button aria-label="root" onClick=${() => open("/")}>/</button>${parts.map((part, i) => html`
      <button onClick=${() => open(`/${parts.slice(0, i + 1).join("/")}`)}>${nameIn(part)}</button>`)}<span class="push"></span>${
      shown !== null ? html`<b>${nameIn(shown)}</b> <button onClick=${() => download(id, shown)}>Download</button>`
      : html`<a class="button" href=${tree(id, path.value)} download=${`${nameIn(path.value) || "root"}.tar`}>Folder as tar</a>`}</div>`;
    if (shown !== null) return html`${crumbs}${loaded({
      what: `${id} ${shown}`,
      load: (ended) => bytes(at`/snapshots/${id}/file`, { path_b64: path64(shown) }, ended),
      show: (data) => data.subarray(0, 8000).includes(0) ? html`<p class="pad faint">${size(data.length)} that are no text.</p>`
        : html`<${Text} text=${new TextDecoder().decode(data.subarray(0, TEXT_MAX))} label=${nameIn(shown)}/>`,
    })}`;
    return html`${crumbs}${loaded({
      what: `${id} ${path.value}`,
      load: (ended) => list(id, path.value, ended),
      show: (found) => html`<table class="files"><tbody>${found.slice(0, SHOWN_MAX).map((one) => {
        const whole = pathOf(one);
        return html`<tr key=${whole}><td><button disabled=${one.kind !== "directory" && one.kind !== "file"} onClick=${() => one.kind === "directory" ? open(whole)
          : one.size > VIEW_MAX ? download(id, whole) : (file.value = whole)}>${nameIn(whole)}${one.kind === "directory" ? "/" : ""}</button></td>
          <td class="number">${one.kind === "file" ? size(one.size) : one.kind}</td><td class="number">${one.mode}</td></tr>`;
      })}</tbody></table>${found.length > SHOWN_MAX ? html`<p class="pad faint">and ${found.length - SHOWN_MAX} more</p>` : null}`,
    })}`;
  };
});
