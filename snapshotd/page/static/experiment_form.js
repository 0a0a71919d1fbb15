// The form that begins an experiment from a snapshot.
import { html, once, short, signal, typed, view } from "./dom.js";
import { send } from "./api.js";
import { environment } from "./dialog.js";
import { go, link, say } from "./state.js";

/** @typedef {{label: string, env: string, message: string, args: string}} Variant */
/** @typedef {"command" | "number" | "junit"} Reading */

const READINGS = { command: "it exits with 0", number: "the last line that is a number", junit: "the share of passed tests in a JUnit report" };
const variant = (/** @type {string} */ label) => signal(/** @type {Variant} */ ({ label, env: "", message: "", args: "" }));

/** A number of a field, or nothing. */
const number = (/** @type {FormDataEntryValue | null} */ text) => (text ? Number(text) : null);

/** A variant as the API has it. Error: its environment is none. @returns {Api.VariantFields} */
function fields(/** @type {Variant} */ { label, env, message, args }) {
  if (!label) throw new Error("each variant needs a label");
  const words = args.split("\n").filter(Boolean);
  return { label, env: environment(env), ...(words.length ? { args: words } : {}), ...(message ? { edit: { add_messages: [{ role: "user", content: message }] } } : {}) };
}

export const NewExperiment = view(() => {
  const variants = signal([variant("as-it-is"), variant("other")]), reading = signal(/** @type {Reading} */ ("command"));

  const begin = once(async (/** @type {SubmitEvent} */ event, /** @type {string} */ snapshot) => {
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target)), text = (/** @type {string} */ name) => String(form.get(name) ?? "");
    const limits = { seconds: number(form.get("seconds")), calls: number(form.get("calls")), tokens: number(form.get("tokens")), cost: number(form.get("cost")) };
    const prices = { input: Number(text("input")), output: Number(text("output")) };
    try {
      const body = /** @type {Api.ExperimentRequest} */ ({
        name: text("name"), source: snapshot, variants: variants.value.map((one) => fields(one.value)), resume: form.get("resume") === "yes",
        score: { argv: ["/bin/sh", "-c", text("score")], ...(reading.value === "number" ? { number: true } : reading.value === "junit" ? { junit: text("report") } : {}) },
        repeat: Number(text("repeat") || 1), parallel: number(form.get("parallel")), first_pass: form.get("first") === "yes",
        protected: text("protected").split("\n").filter(Boolean),
        ...(Object.values(limits).some((one) => one !== null) ? { budget: limits } : {}), ...(prices.input || prices.output ? { prices } : {}),
      });
      const made = /** @type {Api.ExperimentState} */ (await send("POST", "/experiments", body));
      go(["experiments", made.name]);
    } catch (error) {
      say(error);
    }
  });

  const set = (/** @type {import("./dom.js").Signal<Variant>} */ one, /** @type {keyof Variant} */ name) => (/** @type {Event} */ event) => (one.value = { ...one.value, [name]: typed(event) });
  return (/** @type {{snapshot: string, name: string}} */ { snapshot, name }) => {
    return html`<main class="wide"><h1>New experiment</h1>
      <p class="faint">All branches begin at <a href=${link("s", snapshot)}><code>${short(snapshot)}</code></a>, run on their own, and are scored by one command in a throw-away fork.</p>
      <form class="form" onSubmit=${(/** @type {SubmitEvent} */ event) => (event.preventDefault(), begin(event, snapshot))}>
        <label>Name <input name="name" required pattern="[A-Za-z0-9][A-Za-z0-9_.\\-]*" defaultValue=${name ? `${name}-experiment` : ""}/></label>
        <label class="check"><input type="checkbox" name="resume" value="yes" defaultChecked=${true}/> The agent goes on from there (else its program begins anew, with the arguments below)</label>
        <h3>Variants</h3>
        ${variants.value.map((one, i) => html`<fieldset key=${i} class="variant"><legend class="faint">variant ${i + 1}</legend>
          <label>Label <input aria-label="Label of variant ${i + 1}" value=${one.value.label} onInput=${set(one, "label")}/></label>
          <label>Environment, NAME=VALUE<textarea rows="1" aria-label="Environment of variant ${i + 1}" value=${one.value.env} onInput=${set(one, "env")}></textarea></label>
          <label>Say this to the agent first<textarea rows="1" aria-label="Message of variant ${i + 1}" value=${one.value.message} onInput=${set(one, "message")}></textarea></label>
          <label>Arguments, one a line<textarea rows="1" aria-label="Arguments of variant ${i + 1}" value=${one.value.args} onInput=${set(one, "args")}></textarea></label>
          <button type="button" class="plain" aria-label="Remove variant ${i + 1}" disabled=${variants.value.length < 2} onClick=${() => (variants.value = variants.value.filter((each) => each !== one))}>×</button></fieldset>`)}
        <div><button type="button" onClick=${() => (variants.value = [...variants.value, variant("")])}>Another variant</button></div>
        <h3>Score</h3>
        <label>Command, run in a throw-away fork of each branch <input name="score" required class="mono" placeholder="python -m pytest -q"/></label>
        <div class="fields"><label>Its score is <select value=${reading.value} onChange=${(/** @type {Event} */ event) => (reading.value = /** @type {Reading} */ (typed(event)))}>${Object.entries(READINGS).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
          ${reading.value === "junit" ? html`<label>Report <input name="report" required placeholder="/workspace/report.xml"/></label>` : null}</div>
        <label>Paths that a branch must not change, one a line<textarea name="protected" rows="1" placeholder="/workspace/tests"></textarea></label>
        <h3>Runs</h3>
        <div class="fields"><label>Runs of each <input name="repeat" type="number" min="1" defaultValue="1"/></label><label>At once <input name="parallel" type="number" min="1" placeholder="as fit"/></label>
          <label class="check"><input type="checkbox" name="first" value="yes"/> End when one passed</label></div>
        <h3>Budget of each branch</h3>
        <div class="fields"><label>Seconds <input name="seconds" type="number" min="1"/></label><label>Calls <input name="calls" type="number" min="1"/></label><label>Tokens <input name="tokens" type="number" min="1"/></label><label>Cost <input name="cost" type="number" min="0" step="any"/></label></div>
        <h3>Prices of a million tokens</h3>
        <div class="fields"><label>Input <input name="input" type="number" min="0" step="any"/></label><label>Output <input name="output" type="number" min="0" step="any"/></label></div>
        <div class="acts"><button class="main" type="submit" disabled=${begin.running.value}>Begin</button></div>
      </form></main>`;
  };
});
