// Long texts: only the visible lines are on the page. Patches and outputs of terminals.
import { html, plain, signal, size, view } from "./dom.js";
import { at, bytes, lines } from "./api.js";
import { pieces } from "./ansi.js";
import { Rows } from "./rows.js";

const LINE = 18, LINE_MAX = 2000;
export const PART_BYTES = 256 << 10;
const PATCH_MAX = 4 << 20;

/** Something that is being read; `load` gives it, and is begun anew when `key` changes. */
export const Loaded = view((self) => {
  const found = signal(/** @type {any} */ (undefined)), failed = signal("");
  let key = /** @type {string | null} */ (null), stop = new AbortController();
  async function begin(/** @type {any} */ props) {
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
      if (!ended.aborted) (failed.value = /** @type {Error} */ (error).message), (found.value = null);
    } finally {
      clearTimeout(late);
    }
  }
  self.mounted = () => (begin(self.props), () => stop.abort());
  self.componentDidUpdate = () => begin(self.props);
  return (/** @type {any} */ props) =>
    failed.value ? html`<p class="pad bad">${failed.value}</p>`
    : found.value === undefined ? html`<p class="pad faint" role="status">…</p>`
    : (found.value.of.what === props.what ? props : found.value.of).show(found.value.value);
});

/** Lines of which each has a class and pieces of text. */
function Lines(/** @type {{all: [string, [string, string][]][], label: string}} */ { all, label }) {
  const row = (/** @type {number} */ i) => {
    const [kind, parts] = all[i];
    return html`<div key=${i} class=${kind} style=${{ height: `${LINE}px` }}>${parts.map(([style, text]) => (style ? html`<span class=${style}>${text}</span>` : text))}</div>`;
  };
  return html`<${Rows} className="lines" label=${label} count=${all.length} height=${LINE} row=${row} reveal=${-1}/>`;
}

const KINDS = /** @type {Record<string, string>} */ ({ "+": "plus", "-": "minus", "@": "hunk", d: "file" });

/** The patch of a snapshot against its parent, or between two. */
export async function readPatch(/** @type {string} */ a, /** @type {string | undefined} */ b, /** @type {AbortSignal} */ ended) {
  let text = "", outside = 0, cut = false;
  const decoder = new TextDecoder();
  for await (const event of lines("/patch", { a, b }, ended)) {
    if (event.event === "end") outside = event.outside;
    else text += decoder.decode(Uint8Array.from(atob(event.data_b64), (one) => one.charCodeAt(0)), { stream: true });
    if (text.length > PATCH_MAX && (cut = true)) break;
  }
  const all = /** @type {[string, [string, string][]][]} */ (text.split("\n").slice(0, -1).map((one) => [
    one.startsWith("+++") || one.startsWith("---") || one.startsWith("index ") ? "head" : KINDS[one[0]] ?? "", [["", plain(one, LINE_MAX)]]]));
  return { all, outside, cut };
}

export function Patch(/** @type {{a: string, b?: string}} */ { a, b }) {
  return html`<${Loaded} what=${`${a} ${b}`} load=${(/** @type {AbortSignal} */ ended) => readPatch(a, b, ended)}
    show=${(/** @type {any} */ { all, outside, cut }) => html`
      ${all.length ? html`<${Lines} all=${all} label="Patch"/>` : html`<p class="pad faint">No changes below /workspace.</p>`}
      ${cut ? html`<p class="pad faint">The patch is longer; <code>snapshotd diff --patch</code> has it all.</p>` : null}
      ${outside ? html`<p class="pad faint">${outside} more change${outside > 1 ? "s" : ""} outside of /workspace; see Files.</p>` : null}`}/>`;
}

/** The outputs of a call: its end first, more on demand. */
export const Output = view(() => {
  return ({ snapshot }) => {
    const { outputs, damaged } = snapshot.tool;
    if (!outputs.length && !damaged.length) return html`<p class="pad faint">The call left no output.</p>`;
    return html`${damaged.map((/** @type {any} */ one) => html`<p class="pad bad">${one.output} was damaged on disk and is gone.</p>`)}
      ${outputs.map((/** @type {string} */ which) => html`<${Stream} key=${snapshot.id + which} id=${snapshot.id} which=${which} only=${outputs.length === 1}/>`)}`;
  };
});

const Stream = view(() => {
  const parts = signal(1);
  return ({ id, which, only }) => html`<${Loaded} what=${`${id} ${which} ${parts.value}`}
    load=${(/** @type {AbortSignal} */ ended) => bytes(at`/snapshots/${id}/output/${which}`, { count: parts.value * PART_BYTES + 1 }, ended)}
    show=${(/** @type {Uint8Array} */ data) => {
      const limit = parts.value * PART_BYTES, more = data.length > limit;
      return html`<section class=${only ? "fill" : "half"}>
        <h3>${which} <span class="faint">${more ? `the first ${size(limit)}` : size(data.length)}</span>
          ${more ? html`<button onClick=${() => (parts.value *= 4)}>Show more</button>` : null}</h3>
        <${Lines} all=${terminal(shown(which, data.subarray(0, limit), more))} label=${which}/></section>`;
    }}/>`;
});

/** The text of an output. What a function returned is JSON: a text is shown as such, anything else in lines. */
function shown(/** @type {string} */ which, /** @type {Uint8Array} */ data, /** @type {boolean} */ cut) {
  const text = new TextDecoder().decode(data);
  if (which !== "output") return text;
  try {
    const value = JSON.parse(cut && text.startsWith('"') ? `${text.replace(/\\[^\\]{0,5}$/, "")}"` : text);
    return typeof value === "string" ? value : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

/** @returns {[string, [string, string][]][]} */
function terminal(/** @type {string} */ text) {
  const style = new Set(/** @type {string[]} */ ([]));
  const all = text.split(/\r*\n/);
  if (all.at(-1) === "") all.pop();
  return all.map((one) => ["", pieces(one.slice(one.lastIndexOf("\r") + 1, LINE_MAX + one.lastIndexOf("\r") + 1), style).map(([kind, text]) => [kind, plain(text, LINE_MAX)])]);
}

/** A text as it is. */
export const Text = (/** @type {{text: string, label: string}} */ { text, label }) =>
  html`<${Lines} all=${text.split("\n").map((one) => ["", [["", plain(one, LINE_MAX)]]])} label=${label}/>`;
