// The one dialog: it asks for values, then acts.
import { html, line, once, signal, view } from "./dom.js";
import { notice, refresh, say } from "./state.js";

/** @typedef {import("./dom.js").Drawn} Drawn */
/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} label
 * @property {"text" | "area" | "number" | "check"} [kind]
 * @property {string} [value]
 * @property {string} [hint] what stands in an empty field
 */
/**
 * @typedef {object} Asked
 * @property {string} title
 * @property {Drawn} [text]
 * @property {Field[]} [fields]
 * @property {string} [button] what acts; without it the dialog only shows
 * @property {(values: Record<string, string>) => unknown} [run] a promise, if it takes a while
 * @property {boolean} [wide]
 */

const never = once((/** @type {Record<string, string>} */ _) => /** @type {unknown} */ (undefined));

/** What is asked just now. */
export const dialog = signal(/** @type {(Asked & {act: typeof never}) | null} */ (null));

/** Ask. What was said before is not about this. */
export function ask(/** @type {Asked} */ asked) {
  notice.value = null;
  dialog.value = { ...asked, act: asked.run ? once(asked.run) : never };
}

/**
 * Act, close the dialog that asked for it, and say what was done; or say why it was not.
 * @template T
 * @param {() => Promise<T>} act @param {string | ((made: T) => string)} done
 * @returns {Promise<T | undefined>}
 */
export async function attempt(act, done) {
  const asked = dialog.value;
  try {
    const made = await act();
    if (dialog.value === asked) dialog.value = null;  // else the person has closed it, and may be at another one
    await refresh();
    say(typeof done === "string" ? done : done(made));
    return made;
  } catch (error) {
    say(error);
  }
}

/** A command of the shell, and a button that copies it. */
export const Command = view(() => {
  const copied = signal(false);
  return (/** @type {{text: string}} */ { text }) => html`<p class="command"><code>${text}</code>
    <button type="button" onClick=${async () => (await navigator.clipboard.writeText(text).catch(say), (copied.value = true))}>${copied.value ? "Copied" : "Copy"}</button></p>`;
});

/** A word as a shell takes it. */
export const quoted = (/** @type {string} */ word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** The lines NAME=VALUE of a field. Error: one has no name. */
export function environment(/** @type {string} */ text) {
  const found = /** @type {Record<string, string>} */ ({});
  for (const each of text.split("\n").filter((one) => one.trim())) {
    const sign = each.indexOf("=");
    if (sign < 1) throw new Error(`“${line(each, 60)}” is no NAME=VALUE`);
    found[each.slice(0, sign).trim()] = each.slice(sign + 1);
  }
  return found;
}

function Input(/** @type {Field} */ { name, label, kind = "text", value = "", hint = "" }) {
  if (kind === "check") return html`<label class="check"><input type="checkbox" name=${name} value="yes" defaultChecked=${value === "yes"}/> ${line(label, 100)}</label>`;
  return html`<label>${label}${kind === "area" ? html`<textarea name=${name} rows="1" placeholder=${hint} defaultValue=${value}></textarea>`
    : html`<input name=${name} type=${kind} min="1" placeholder=${hint} defaultValue=${value}/>`}</label>`;
}

/** What the person is told. While a dialog is open it stands there: all else is behind it. */
export const Notice = view(() => () => notice.value ? html`<p class="notice ${notice.value.bad ? "bad" : ""}" role="status">${line(notice.value.text, 1000)}</p>` : null);

export const Dialog = view(() => {
  const shown = (/** @type {HTMLDialogElement | null} */ box) => box && !box.open && box.showModal();
  const leave = () => void (dialog.value = notice.value = null);
  return () => {
    const asked = dialog.value;
    if (!asked) return null;
    const { fields = [], act: { running } } = asked;
    const done = (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      const data = new FormData(/** @type {HTMLFormElement} */ (event.target));
      asked.act(Object.fromEntries(fields.map(({ name }) => [name, String(data.get(name) ?? "")]))).catch(say);
    };
    return html`<dialog class=${asked.wide ? "wide" : ""} ref=${shown} onClose=${leave} aria-labelledby="asked">
      <form onSubmit=${done}><h2 id="asked">${line(asked.title, 200)}</h2>${typeof asked.text === "string" ? html`<p>${asked.text}</p>` : asked.text}
      ${fields.map((field) => html`<${Input} ...${field}/>`)}
      <footer><${Notice}/><button type="button" onClick=${leave}>${asked.button ? "Cancel" : "Close"}</button>
        ${asked.button ? html`<button class="main" type="submit" disabled=${running.value}>${asked.button}${running.value ? "…" : ""}</button>` : null}</footer></form></dialog>`;
  };
});
