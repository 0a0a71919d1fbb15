// Experiments: the live table of their branches, and scores against what they cost.
import { count, html, line, plain, signal, since, view } from "./dom.js";
import { at, get, send, stream } from "./api.js";
import { go, link, place, say } from "./state.js";
import { NewExperiment } from "./experiment_form.js";
import { loaded } from "./text.js";

/** @typedef {Api.ExperimentState} Experiment */
/** @typedef {Api.ExperimentBranchInfo} Branch */

const readExperiment = (/** @type {string} */ name, /** @type {AbortSignal=} */ ended) => /** @type {Promise<Experiment>} */ (get(at`/experiments/${name}`, {}, ended));

export const Experiments = view((/** @type {import("./dom.js").Self<{}>} */ self) => {
  const shown = signal(/** @type {Experiment | null} */ (null)), failed = signal("");
  let name = "", stop = new AbortController();
  async function follow(/** @type {string} */ wanted) {
    if (wanted === name) return;
    [name, shown.value, failed.value] = [wanted, null, ""];
    stop.abort();
    stop = new AbortController();
    const { signal: ended } = stop;
    if (!wanted || wanted === "new") return;
    try {
      shown.value = await readExperiment(wanted, ended);
      for await (const _ of stream(at`/experiments/${wanted}/events`, ended)) shown.value = await readExperiment(wanted, ended);
    } catch (error) {
      if (ended.aborted) return;
      if (shown.value) say(error);
      else failed.value = /** @type {Error} */ (error).message;
    }
  }
  self.mounted = () => (follow(place.value[1] ?? ""), () => stop.abort());
  self.componentDidUpdate = () => void follow(place.value[1] ?? "");
  return () => {
    if (place.value[1] === "new") return html`<${NewExperiment} key=${place.value[2]} snapshot=${place.value[2]} name=${place.value[3] ?? ""}/>`;
    if (!place.value[1]) return html`<main class="wide"><h1>Experiments</h1>${loaded({
      what: "all",
      load: () => /** @type {Promise<Experiment[]>} */ (get("/experiments")),
      show: (all) => all.length ? html`<div class="scroll"><table class="grid"><thead><tr><th>name</th><th>branches</th><th>best</th><th>state</th><th>began</th></tr></thead><tbody>
        ${all.map((one) => html`<tr key=${one.name}><td><a href=${link("experiments", one.name)}>${line(one.name, 100)}</a></td><td class="number">${one.branches.length}</td><td>${one.best ?? ""}</td>
          <td>${one.ended_because ?? "running"}</td><td class="number">${since(one.started_at)}</td></tr>`)}</tbody></table></div>`
        : html`<p class="faint">No experiments yet. Choose the call that all branches begin at, and press <kbd>e</kbd>.</p>`,
    })}</main>`;
    const one = shown.value;
    if (!one) return html`<main class="wide">${failed.value ? html`<p class="bad">${plain(failed.value)}</p>` : html`<p class="faint">…</p>`}</main>`;
    const best = one.variants.map(({ label }) => one.branches.filter((each) => each.label === label && each.trajectory).sort((a, b) => (b.score ?? 0) - (a.score ?? 0))[0]?.trajectory ?? "").filter(Boolean);
    return html`<main class="wide"><h1>${line(one.name, 200)}</h1>
      <p class="faint">${count(one.branches.length, "branch", "branches")} from <a href=${link("s", one.snapshot)}><code>${one.snapshot.slice(0, 12)}</code></a> · ${one.ended_because ?? "running"}</p>
      <div class="acts">${one.ended_because ? null : html`<button onClick=${() => send("POST", at`/experiments/${one.name}/stop`).catch(say)}>Stop</button>`}
        ${best.length > 1 ? html`<button onClick=${() => go(["compare", ...best])}>Compare the best of each variant</button>` : null}</div>
      <${Plot} branches=${one.branches}/>
      <div class="scroll"><table class="grid"><thead><tr><th>variant</th><th>rank</th><th>score</th><th>passes</th></tr></thead><tbody>
        ${one.variants.map((each) => html`<tr key=${each.label}><td>${line(each.label, 80)}</td><td class="number">${each.rank ?? ""}</td>
          <td class="number">${each.score === null ? "" : `${each.score.toFixed(3)}${each.standard_error === null ? "" : ` ± ${each.standard_error.toFixed(3)}`}`}</td><td class="number">${each.passes}</td></tr>`)}</tbody></table></div>
      <div class="scroll"><table class="grid"><thead><tr><th>branch</th><th>state</th><th>score</th><th>calls</th><th>time</th><th>tokens</th><th>cost</th><th>files</th></tr></thead><tbody>
        ${one.branches.map((each) => html`<tr key=${`${each.label}.${each.run}`} class=${each.passed ? "passed" : ""}>
          <td>${each.trajectory ? html`<a href=${link("t", each.trajectory)}>${line(`${each.label}.${each.run}`, 80)}</a>` : line(`${each.label}.${each.run}`, 80)}</td>
          <td title=${plain(each.error ?? "")}>${each.status}${each.error ? html` <span class="bad">${line(each.error, 120)}</span>` : null}</td>
          <td class="number">${each.score === null ? "" : each.score.toFixed(3)}</td><td class="number">${each.call_count}</td><td class="number">${each.seconds.toFixed(1)} s</td>
          <td class="number">${each.tokens[0] + each.tokens[1] || ""}</td><td class="number">${each.cost ? each.cost.toFixed(4) : ""}</td><td class="number">${each.file_count}</td></tr>`)}</tbody></table></div></main>`;
  };
});

/** Score against cost; against time where nothing has a cost. */
function Plot(/** @type {{branches: Branch[]}} */ { branches }) {
  const scored = branches.flatMap((one) => (one.score === null ? [] : [{ ...one, score: one.score }]));
  if (scored.length < 2) return null;
  const costs = scored.some(({ cost }) => cost > 0);
  const of = (/** @type {Branch} */ one) => (costs ? one.cost : one.seconds);
  const right = Math.max(...scored.map(of)) || 1, scores = scored.map(({ score }) => score);
  const low = Math.min(0, ...scores), high = Math.max(1, ...scores);
  const x = (/** @type {number} */ value) => 44 + (value / right) * 400, y = (/** @type {number} */ value) => 150 - ((value - low) / (high - low)) * 130;
  const labels = [...new Set(branches.map(({ label }) => label))];
  return html`<svg class="plot" viewBox="0 0 560 180" role="img" aria-label="Score against ${costs ? "cost" : "time"}">
    ${[low, (low + high) / 2, high].map((value) => html`<line x1="44" x2="444" y1=${y(value)} y2=${y(value)}/><text x="38" y=${y(value) + 4} text-anchor="end">${+value.toFixed(2)}</text>`)}
    ${[0, right / 2, right].map((value) => html`<text x=${x(value)} y="168" text-anchor="middle">${+value.toPrecision(2)}${costs ? "" : " s"}</text>`)}
    ${scored.map((one) => html`<circle class="c${labels.indexOf(one.label) % 6} ${one.passed ? "full" : ""}" cx=${x(of(one))} cy=${y(one.score)} r="5"><title>${line(`${one.label}.${one.run}: ${one.score}`, 100)}</title></circle>`)}
    ${labels.slice(0, 9).map((label, i) => html`<circle class="c${i % 6} full" cx="462" cy=${20 + i * 17} r="4"/><text x="472" y=${24 + i * 17}>${line(label, 14)}</text>`)}</svg>`;
}
