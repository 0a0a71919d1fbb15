// The inbox: calls that wait for a person. A decision has two steps, and the second shows exactly what is decided.
import { ago, count, html, line, once, plain, short, signal, since, typed, view } from "./dom.js";
import { at, get, send } from "./api.js";
import { parse } from "./json.js";
import { approvals, askToNotify, find, isRead, link, nameOf, notifies, refresh, say, waiting } from "./state.js";
import { Patch, loaded } from "./text.js";

/** @typedef {Api.ApprovalInfo} Approval */

const GIVEN_MAX = 100_000;

/** The call that is looked at, and what was typed for it: it waits while the person looks at something else. */
const looked = signal(""), edited = signal(/** @type {string | null} */ (null)), reason = signal("");

export const Approvals = view(() => {
  const step = signal(/** @type {"" | "approve" | "deny"} */ ("")), whole = signal(false);

  /** Nothing of what was typed for another call is left. */
  const forget = () => ([step.value, edited.value, reason.value, whole.value] = ["", null, "", false]);

  /** From now on it is this one, whatever is asked, decided or removed meanwhile. */
  const choose = (/** @type {Approval} */ one) => void (looked.value === one.id || (forget(), (looked.value = one.id)));

  function begin(/** @type {Approval} */ one, /** @type {"approve" | "deny"} */ kind) {
    choose(one);
    try {
      if (edited.value !== null) parse(edited.value);
      step.value = kind;
    } catch (error) {
      say(error);
    }
  }

  const decide = once(async (/** @type {Approval} */ one) => {
    try {
      const body = { reason: reason.value || null, ...(step.value === "approve" && edited.value !== null ? { arguments: parse(edited.value) } : {}) };
      await send("POST", at`/approvals/${one.id}/${step.value}`, body);
      say(step.value === "approve" ? `${one.name} runs` : `${one.name} is refused`);
      forget(), (looked.value = "");
    } catch (error) {
      say(error);
    }
    await refresh();
    if (looked.value !== one.id) return;  // by now the person may decide about another one
    step.value = "";
    if (!waiting.value.some(({ id }) => id === one.id)) forget();
  });

  /** The keyboard was at a button that is gone. */
  const focus = (/** @type {HTMLElement | null} */ box) => box?.focus();

  return () => {
    const all = [...waiting.value, ...approvals.value.filter(({ status }) => status !== "pending").slice(-50).reverse()];
    const one = all.find(({ id }) => id === looked.value) ?? all[0];
    const tell = notifies.value === "default" ? html`<p class="pad"><button onClick=${askToNotify}>Notify me in this browser</button></p>` : null;
    if (!one && !isRead.approvals.value) return html`<main class="wide"><h1>Approvals</h1><p class="faint" role="status">…</p></main>`;
    if (!one) return html`<main class="wide"><h1>Approvals</h1>${tell}<p class="faint">Nothing waits. A policy says which calls need a person: <code>snapshotd approvals --help</code>.</p></main>`;
    const of = find(one.trajectory), mine = one.id === looked.value, now = mine ? step.value : "", text = mine ? edited.value : null;
    const given = JSON.stringify(one.arguments, null, 2) ?? "null", shown = mine && whole.value ? Infinity : GIVEN_MAX;
    return html`<main class="inbox"><div class="list">${tell}<div role="listbox" aria-label="Approvals">${all.map((each) => html`
        <button role="option" key=${each.id} aria-selected=${each === one} class=${each === one ? "on" : ""} onClick=${() => choose(each)}>
          <i class="dot ${each.status === "pending" ? "interrupted" : each.status === "approved" ? "finished" : "failed"}"></i><b>${line(each.name, 80)}</b>
          <span class="faint">${ago(each.created_at)}</span><small>${each.status}${each.by ? ` by ${line(each.by, 60)}` : ""}</small></button>`)}</div></div>
      <section><h1>${line(one.name, 200)}</h1>
        <p>${one.question ? plain(one.question, 2000) : "The policy asks a person about this call."}</p>
        <p class="faint">asked by <a href=${link("t", of ? nameOf(of.trajectory) : one.trajectory)}>${of ? nameOf(of.trajectory) : short(one.trajectory)}</a> ·
          files of <code>${short(one.snapshot)}</code> · ${one.side_effect} · asked ${since(one.created_at)}</p>
        <h3>Arguments</h3>
        ${text === null ? html`<pre class="given">${plain(given, shown)}</pre>${given.length > shown ? html`<p class="warn">${count(given.length - shown, "more character")} <button onClick=${() => (choose(one), (whole.value = true))}>Show all</button></p>` : null}`
          : html`<textarea aria-label="Arguments" rows="8" value=${text} onInput=${(/** @type {Event} */ event) => (edited.value = typed(event))}></textarea>`}
        ${one.status !== "pending" ? html`<p>${one.status}${one.reason ? `: ${plain(one.reason, 2000)}` : ""}</p>` : now === "" ? html`<div class="acts">
          <button class="main" onClick=${() => begin(one, "approve")}>Approve…</button><button onClick=${() => begin(one, "deny")}>Deny…</button>
          ${text === null ? html`<button onClick=${() => (choose(one), (edited.value = JSON.stringify(one.arguments, null, 2)))}>Edit</button>` : html`<button onClick=${() => (edited.value = null)}>As asked</button>`}</div>`
        : html`<div class="confirm" role="alertdialog" aria-label="Confirm" tabindex="-1" ref=${focus}><p>${now === "approve" ? "This call will run" : "This call will be refused"}${text !== null && now === "approve" ? " with the arguments above" : ""}.
            Digest${text !== null && now === "approve" ? " of the call as asked" : ""} <code class="digest">${one.digest}</code></p>
          <label>Reason <input value=${reason.value} onInput=${(/** @type {Event} */ event) => (reason.value = typed(event))}/></label>
          <div class="acts"><button class=${now === "approve" ? "main" : "danger"} disabled=${decide.running.value} onClick=${() => decide(one)}>${now === "approve" ? "Approve" : "Deny"}</button><button onClick=${() => (step.value = "")}>Back</button></div></div>`}
        <h3>Changes so far</h3>
        ${loaded({
          what: one.id,
          load: (ended) => /** @type {Promise<Api.ApprovalView>} */ (get(at`/approvals/${one.id}`, { max_files: 200 }, ended)),
          show: ({ since, changes }) => since && changes.length ? html`<div class="body"><${Patch} a=${since} b=${one.snapshot}/></div>` : html`<p class="faint">No files changed since the last decision.</p>`,
        })}
      </section></main>`;
  };
});
