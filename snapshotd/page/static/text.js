// Long texts: only the visible lines are on the page. Patches and outputs of terminals.
import { count, html, plain, signal, size, view } from "./dom.js";
import { at, bytes, lines } from "./api.js";
import { pieces } from "./ansi.js";
import { parse } from "./json.js";
import { Rows } from "./rows.js";

const LINE = 18, LINE_MAX = 2000;
const PART_BYTES = 256 << 10;
const PATCH_MAX = 4 << 20, FILE_MAX = PATCH_MAX / 2;

/** @typedef {[string, string][]} Pieces each with the class of its style */
/** @typedef {[string, Pieces]} Line its class, and its pieces */
/**
 * @template T
 * @typedef {{what: string, load: (ended: AbortSignal) => Promise<T>, show: (found: T) => import("./dom.js").Drawn}} Loading
 */

/** Something that is being read; `load` gives it, and is begun anew when `what` changes. */
export const Loaded = view((/** @type {import("./dom.js").Self<Loading<unknown>>} */ self) => {
  const found = signal(/** @type {{value: unknown, of: Loading<unknown>} | undefined} */ (undefined)), failed = signal("");
  let key = /** @type {string | null} */ (null), stop = new AbortController();
  async function begin(/** @type {Loading<unknown>} */ props) {
    if (props.what === key) return;
    key = props.what;
    stop.abort();
    stop = new AbortController();
    const { signal: ended } = stop;
    const late = setTimeout(() => !ended.aborted && (found.value = undefined), 150);
    try {
      const value = await props.load(ended);
      if (!ended.aborted) (failed.value = ""), (found.value = { value, of: props });
    } catch (error) {
      if (!ended.aborted) failed.value = /** @type {Error} */ (error).message;
    } finally {
      clearTimeout(late);
    }
  }
  self.mounted = () => (begin(self.props), () => stop.abort());
  self.componentDidUpdate = () => void begin(self.props);
  return (props) =>
    failed.value ? html`<p class="pad bad">${plain(failed.value)}</p>`
    : found.value === undefined ? html`<p class="pad faint" role="status">…</p>`
    : (found.value.of.what === props.what ? props : found.value.of).show(found.value.value);
});

/** Loaded, with the type of what is loaded. @template T @param {Loading<T>} props */
export const loaded = (props) => html`<${Loaded} ...${props}/>`;

function Lines(/** @type {{all: Line[], label: string}} */ { all, label }) {
  const row = (/** @type {number} */ i) => {
    const [kind, parts] = all[i];
    return html`<div class=${kind}>${parts.map(([style, text]) => (style ? html`<span class=${style}>${text}</span>` : text))}</div>`;
  };
  return html`<${Rows} className="lines" role="group" label=${label} count=${all.length} height=${LINE} row=${row}/>`;
}

const KINDS = /** @type {Record<string, string>} */ ({ "+": "plus", "-": "minus", "@": "hunk" });

/** The beginning of a long line, and how much is missing. */
function cut(/** @type {string} */ text, /** @type {(shown: string) => Pieces} */ draw = (shown) => [["", plain(shown, LINE_MAX)]]) {
  const more = text.length - LINE_MAX, found = draw(text.slice(0, LINE_MAX));
  return more > 0 ? /** @type {Pieces} */ ([...found, ["faint", `… ${count(more, "more character")}`]]) : found;
}

/** The lines of a patch: each file under its name, with the numbers of its lines. */
function patchLines(/** @type {string} */ text) {
  const found = /** @type {Line[]} */ ([]);
  let inHunk = false, plus = 0, minus = 0, name = /** @type {Pieces} */ ([]);
  const close = () => name.push(...(plus ? [/** @type {[string, string]} */ (["plus-text", `  +${plus}`])] : []), ...(minus ? [/** @type {[string, string]} */ (["minus-text", `  −${minus}`])] : []));
  for (const one of text.split("\n").slice(0, -1)) {
    if (one.startsWith("diff --git ")) {
      close();
      name = [["", plain(one.slice(11).replace(/^a\/(.*) b\/\1$/, "$1"), LINE_MAX)]];
      [inHunk, plus, minus] = [false, 0, 0];
      found.push(["file", name]);
    } else if (one.startsWith("@@")) (inHunk = true), found.push(["hunk", cut(one)]);
    else if (inHunk) {
      if (one[0] === "+") plus++;
      else if (one[0] === "-") minus++;
      found.push([KINDS[one[0]] ?? "", cut(one)]);
    } else if (!/^(index|---|\+\+\+) /.test(one)) found.push(["head", cut(one)]);
  }
  close();
  return found;
}

/** The patch of a snapshot against its parent, or between two. A file that is too large to show is named in its place. */
async function readPatch(/** @type {string} */ a, /** @type {string | undefined} */ b, /** @type {AbortSignal} */ ended) {
  let text = "", outside = 0, length = 0;
  const decoder = new TextDecoder(), all = /** @type {Line[]} */ ([]);
  const close = () => (all.push(...patchLines(text)), (text = ""));
  for await (const event of /** @type {AsyncGenerator<{event: string, outside: number, data_b64: string, path: string, bytes: number}>} */ (lines("/patch", { a, b, max_file_bytes: FILE_MAX }, ended))) {
    if (event.event === "end") outside = event.outside;
    else if (event.event === "omitted") close(), all.push(["file", [["", plain(event.path, LINE_MAX)], ["faint", `  ${size(event.bytes)}, too large to show`]]]);
    else {
      const piece = decoder.decode(Uint8Array.from(atob(event.data_b64), (one) => one.charCodeAt(0)), { stream: true });
      (text += piece), (length += piece.length);
      if (length > PATCH_MAX) break;
    }
  }
  close();
  return { all, outside, cut: length > PATCH_MAX };
}

export function Patch(/** @type {{a: string, b?: string}} */ { a, b }) {
  return loaded({ what: `${a} ${b}`, load: (ended) => readPatch(a, b, ended), show: ({ all, outside, cut }) => html`
      ${all.length ? html`<${Lines} all=${all} label="Patch"/>` : html`<p class="pad faint">No changes below /workspace.</p>`}
      ${cut ? html`<p class="pad faint">The patch is longer; <code>snapshotd diff --patch</code> has it all.</p>` : null}
      ${outside ? html`<p class="pad faint">${count(outside, "more change")} outside of /workspace; see Files.</p>` : null}` });
}

/** The outputs of a call: its end first, more on demand. */
export function Output(/** @type {{snapshot: Api.SnapshotInfo}} */ { snapshot }) {
  const { outputs, damaged } = snapshot.tool;
  if (!outputs.length && !damaged.length) return html`<p class="pad faint">The call left no output.</p>`;
  return html`${damaged.map((one) => html`<p class="pad bad">${one.output} was damaged on disk and is gone.</p>`)}
    ${outputs.map((which) => html`<${Stream} key=${snapshot.id + which} id=${snapshot.id} which=${which} only=${outputs.length === 1}/>`)}`;
}

const Stream = view(() => {
  const parts = signal(1);
  return (/** @type {{id: string, which: string, only: boolean}} */ { id, which, only }) => loaded({
    what: `${id} ${which} ${parts.value}`,
    load: (ended) => bytes(at`/snapshots/${id}/output/${which}`, { count: parts.value * PART_BYTES + 1 }, ended),
    show: (data) => {
      const limit = parts.value * PART_BYTES, more = data.length > limit;
      return html`<section class=${only ? "fill" : "half"}>
        <h3>${which} <span class="faint">${more ? `the first ${size(limit)}` : size(data.length)}</span>
          ${more ? html`<button onClick=${() => (parts.value *= 4)}>Show more</button>` : null}</h3>
        <${Lines} all=${terminal(shown(which, data.subarray(0, limit), more))} label=${which}/></section>`;
    },
  });
});

/** The text of an output. What a function returned is JSON: a text is shown as such, anything else in lines. */
function shown(/** @type {string} */ which, /** @type {Uint8Array} */ data, /** @type {boolean} */ cut) {
  const text = new TextDecoder().decode(data);
  if (which !== "output") return text;
  try {
    const value = parse(cut && text.startsWith('"') ? `${text.replace(/\\[^\\]{0,5}$/, "")}"` : text);
    return typeof value === "string" ? value : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

/** @returns {Line[]} */
function terminal(/** @type {string} */ text) {
  const style = new Set(/** @type {string[]} */ ([]));
  const all = text.split(/\r*\n/);
  if (all.at(-1) === "") all.pop();
  return all.map((one) => {
    const seen = one.slice(one.lastIndexOf("\r") + 1);
    return ["", cut(seen, (shown) => pieces(shown, style).map(([kind, text]) => [kind, plain(text, LINE_MAX)]))];
  });
}

/** A text as it is. */
export const Text = (/** @type {{text: string, label: string}} */ { text, label }) =>
  html`<${Lines} all=${text.split("\n").map((one) => ["", cut(one)])} label=${label}/>`;
