// What can be done from the page. Each act says what it will do before it does it.
import { html, line, short, signal, view } from "./dom.js";
import { at, get, send } from "./api.js";
import { current, go, nameOf, overview, refresh, say } from "./state.js";
import { inspected } from "./inspector.js";

/** The dialog that is open. */
export const dialog = signal(/** @type {any} */ (null));

/**
 * The acts on a snapshot, or on the trajectory that is looked at.
 * @returns {{name: string, key: string, main?: boolean, run: () => void}[]}
 */
export function acts(/** @type {import("./state.js").Snapshot | null} */ one) {
  const of = current.value?.trajectory;
  const found = [];
  if (one) {
    found.push({ name: "Fork from here", key: "f", main: true, run: () => fork(one) });
    found.push({ name: "Rewind", key: "r", run: () => rewind(one) });
    found.push({ name: "Compare", key: "c", run: () => choose(one) });
    found.push({ name: "Tag", key: "t", run: () => tag(one) });
    return found;
  }
  if (of?.status === "running") found.push({ name: "Stop", key: "s", run: () => stop(of) });
  else if (of?.agent) found.push({ name: "Resume", key: "s", run: () => resume(of) });
  found.push({ name: "Undo a rewind", key: "u", run: () => undo(of) }, { name: "Compare", key: "c", run: () => choose(null) });
  return found;
}

/** Run the act that a key stands for. True if there is one. */
export function press(/** @type {string} */ key) {
  const act = acts(inspected.value).find((one) => one.key === key);
  act?.run();
  return act !== undefined;
}

async function attempt(/** @type {() => Promise<any>} */ doing, /** @type {string | ((found: any) => string)} */ done) {
  try {
    const found = await doing();
    dialog.value = null;
    await refresh();
    say(typeof done === "string" ? done : done(found));
    return found;
  } catch (error) {
    say(error);
  }
}

/** Ask for values, then act. */
function ask(/** @type {{title: string, text?: any, fields: any[], button: string, run: (values: Record<string, string>) => void}} */ asked) {
  dialog.value = asked;
}

function fork(/** @type {import("./state.js").Snapshot} */ one) {
  const program = current.value?.trajectory.agent;
  ask({
    title: `Fork from call ${one.seq}`,
    text: `New sandboxes begin with the files, the conversation and the state of ${short(one.id)}. This trajectory stays as it is.`,
    fields: [
      { name: "n", label: "Number of forks", value: "1", type: "number" },
      { name: "name", label: "Name", value: `${nameOf(current.value?.trajectory ?? { id: one.trajectory, name: null })}-fork` },
      { name: "message", label: "Say this to the agent first", area: true },
      { name: "env", label: "Environment, one NAME=VALUE a line", area: true },
      ...(program ? [{ name: "resume", label: "Let the agent go on at once", check: true, value: "yes" }] : []),
    ],
    button: "Fork",
    run: ({ n, name, message, env, resume }) => attempt(async () => {
      const values = Object.fromEntries(env.split("\n").filter((text) => text.includes("=")).map((text) => [text.slice(0, text.indexOf("=")).trim(), text.slice(text.indexOf("=") + 1)]));
      const edit = message ? { add_messages: [{ role: "user", content: message }] } : null;
      const variants = edit || Object.keys(values).length
        ? Array.from({ length: Number(n) }, (_, i) => ({ label: String(i), env: values, ...(edit ? { edit } : {}) })) : [];
      const body = { ...(variants.length ? { variants } : { n: Number(n) }), name: name || null, resume: resume === "yes" };
      return send("POST", at`/snapshots/${one.id}/fork`, body);
    }, ({ trajectories }) => `forked: ${trajectories.map(nameOf).join(", ")}`).then((made) => made && go(["t", nameOf(made.trajectories[0])])),
  });
}

async function rewind(/** @type {import("./state.js").Snapshot} */ one) {
  const of = current.value?.trajectory;
  if (!of) return;
  let preview;
  try {
    preview = await get(at`/trajectories/${of.id}/rewind`, { to: one.id });
  } catch (error) {
    return say(error);
  }
  ask({
    title: `Rewind ${nameOf(of)} to call ${one.seq}`,
    text: html`<p>Files, conversation and state go back to ${short(one.id)}. What came after it stays in the log, and “Undo a rewind” brings it back.</p>
      <p>${preview.change_count} file${preview.change_count === 1 ? "" : "s"} would change, ${preview.messages.length} message${preview.messages.length === 1 ? "" : "s"} would go.</p>
      ${preview.effects.length ? html`<p class="warn">${preview.effects.length} irreversible call${preview.effects.length === 1 ? " is" : "s are"} not taken back: ${line(preview.effects.map((/** @type {any} */ one) => one.name).join(", "))}</p>` : null}
      ${preview.untouched.map((/** @type {string} */ text) => html`<p class="warn">${line(text)}</p>`)}
      <pre class="preview">${preview.changes.slice(0, 200).map((/** @type {any} */ one) => `${({ added: "+", changed: "~", deleted: "−" })[/** @type {"added"} */ (one.change)]} /${line(one.path)}`).join("\n")}</pre>`,
    fields: [],
    button: "Rewind",
    run: () => attempt(() => send("POST", at`/trajectories/${of.id}/rewind`, { to: one.id }), `${nameOf(of)} is back at call ${one.seq}`),
  });
}

function tag(/** @type {import("./state.js").Snapshot} */ one) {
  ask({
    title: `Tag call ${one.seq}`, text: "A tag is a name for this snapshot, and keeps its files.", button: "Tag",
    fields: [{ name: "name", label: "Name", value: "" }, { name: "move", label: "Take it away from the snapshot that has it", check: true }],
    run: ({ name, move }) => attempt(() => send("PUT", at`/tags/${name}`, { ref: one.id, move: move === "yes" }), `${short(one.id)} is ${name}`),
  });
}

const stop = (/** @type {any} */ of) => ask({
  title: `Stop ${nameOf(of)}`, text: "Its sandbox ends after a last snapshot. It can be resumed.", fields: [], button: "Stop",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/stop`), `${nameOf(of)} has stopped`),
});

const resume = (/** @type {any} */ of) => ask({
  title: `Resume ${nameOf(of)}`, text: "Its agent goes on where it stopped.", fields: [], button: "Resume",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/resume`, {}), `${nameOf(of)} goes on`),
});

const undo = (/** @type {any} */ of) => ask({
  title: "Undo", text: `Take the last rewind, promotion or merge of ${nameOf(of)} back.`, fields: [], button: "Undo",
  run: () => attempt(() => send("POST", at`/trajectories/${of.id}/undo`), `${nameOf(of)} is as it was before`),
});

function choose(/** @type {import("./state.js").Snapshot | null} */ one) {
  const of = current.value?.trajectory;
  if (!of) return;
  const family = overview.value.filter(({ trajectory, origin }) => trajectory.id !== of.id && (origin?.trajectory === of.id || trajectory.id === current.value?.origin?.trajectory));
  const others = family.length ? family : overview.value.filter(({ trajectory }) => trajectory.id !== of.id);
  ask({
    title: `Compare ${nameOf(of)} with`, fields: others.slice(-30).map(({ trajectory }, i) => ({ name: trajectory.id, label: nameOf(trajectory), check: true, value: i === 0 && family.length ? "yes" : "" })),
    text: others.length ? "Call by call, up to where they part and on from there." : "There is no other trajectory.", button: "Compare",
    run: (values) => {
      const chosen = Object.keys(values).filter((id) => values[id] === "yes");
      if (!chosen.length) return say(new Error("choose at least one"));
      dialog.value = null;
      go(["compare", of.id, ...chosen]);
    },
  });
}

export const Dialog = view(() => {
  const shown = (/** @type {HTMLDialogElement | null} */ box) => box && !box.open && box.showModal();
  return () => {
    const asked = dialog.value;
    if (!asked) return null;
    const done = (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      const form = /** @type {HTMLFormElement} */ (event.target), data = new FormData(form);
      asked.run(Object.fromEntries(asked.fields.map((/** @type {any} */ field) => [field.name, String(data.get(field.name) ?? "")])));
    };
    return html`<dialog ref=${shown} onClose=${() => (dialog.value = null)} aria-labelledby="asked">
      <form onSubmit=${done}><h2 id="asked">${line(asked.title, 200)}</h2>${typeof asked.text === "string" ? html`<p>${asked.text}</p>` : asked.text}
      ${asked.fields.map((/** @type {any} */ field) => field.check
        ? html`<label class="check"><input type="checkbox" name=${field.name} value="yes" defaultChecked=${field.value === "yes"}/> ${line(field.label, 100)}</label>`
        : html`<label>${field.label}${field.area ? html`<textarea name=${field.name} rows="3" defaultValue=${field.value ?? ""}></textarea>` : html`<input name=${field.name} type=${field.type ?? "text"} min="1" defaultValue=${field.value}/>`}</label>`)}
      <footer><button type="button" onClick=${() => (dialog.value = null)}>Cancel</button><button class="main" type="submit">${asked.button}</button></footer></form></dialog>`;
  };
});
