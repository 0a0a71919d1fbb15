// Branches side by side, aligned at the first difference.
import { html, line, short, view } from "./dom.js";
import { at, send } from "./api.js";
import { find, link, nameOf, place } from "./state.js";
import { brief } from "./ledger.js";
import { Loaded } from "./text.js";

export const Compare = view(() => () => {
  const refs = place.value.slice(1);
  return html`<main class="wide"><${Loaded} what=${refs.join()} load=${() => send("POST", "/compare", { refs })}
    show=${(/** @type {any} */ found) => html`<h1>${refs.length} branches</h1><pre class="given">${JSON.stringify(found, null, 1).slice(0, 20000)}</pre>`}/></main>`;
});
