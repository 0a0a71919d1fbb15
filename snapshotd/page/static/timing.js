// Where the time went: the model's calls above, the agent's own below, in their order. Time in which neither ran is left out.
import { count, duration, html, line, money, signal, tokens, view } from "./dom.js";
import { brief } from "./ledger.js";
import { current, link, place } from "./state.js";

const SHOWN = 100, WIDTH = 1000, LEAST = 1.5;

/** @typedef {import("./log.js").Log} Log */

/** What model calls took, in words. */
export function use(/** @type {Api.ModelUseInfo | null | undefined} */ model) {
  if (!model?.call_count) return "";
  const read = model.input_tokens + model.output_tokens;
  return [count(model.call_count, "model call"), read ? `${tokens(read)} tokens` : "", model.cost_usd === null ? "" : `$${money(model.cost_usd)}`].filter(Boolean).join(" · ");
}

/** The calls around the selected one, or the newest. They are drawn behind the rows, in a frame of their own. */
export const Timing = view((/** @type {import("./dom.js").Self<{log: Log}>} */ self) => {
  const ready = signal(false);
  self.mounted = () => void requestAnimationFrame(() => setTimeout(() => (ready.value = true)));
  return ({ log }) => (ready.value ? draw(log) : html`<footer class="timing"></footer>`);
});

function draw(/** @type {Log} */ log) {
  const selected = place.value[2] ? log.rowOf(place.value[2]) : -1, total = log.count.value;
  const middle = selected < 0 ? total : selected, last = Math.min(total, Math.max(SHOWN, middle + SHOWN / 2)), first = Math.max(0, last - SHOWN);
  const calls = [];
  for (let i = first; i < last; i++) {
    const one = log.at(i);
    if (one && one.kind !== "marker") calls.push({ i, one, model: one.model_use?.duration_ms ?? 0 });
  }
  const sums = { model: 0, tool: 0 };
  for (const { one, model } of calls) (sums.model += model), (sums.tool += one.tool.duration_ms);
  const whole = sums.model + sums.tool;
  if (!whole) return html`<footer class="timing"></footer>`;
  const parts = calls.length + calls.filter(({ model }) => model).length, scale = Math.max(0, WIDTH - parts * LEAST) / whole;
  let x = 0;
  const drawn = calls.map(({ i, one, model }) => {
    const left = x, wide = model ? model * scale + LEAST : 0, tool = one.tool.duration_ms * scale + LEAST;
    x += wide + tool;
    const bad = one.tool.status !== "done" || one.tool.exit_code;
    const told = `call ${one.seq} ${line(one.tool.name, 60)} ${brief(one.tool).slice(0, 80)}: ${duration(one.tool.duration_ms)}${model ? `, model ${duration(model)}` : ""}`;
    return html`<a key=${i} href=${link("t", place.value[1], one.id)} class="${i === selected ? "on" : ""} ${bad ? "bad" : ""}" tabindex="-1"><title>${told}</title>
      <rect class="hit" x=${left} y="0" width=${wide + tool} height="34"/>
      ${wide ? html`<rect class="model" x=${left} y="4" width=${Math.max(1, wide - 0.5)} height="11" rx="1.5"/>` : null}
      <rect class="tool" x=${left + wide} y="19" width=${Math.max(1, tool - 0.5)} height="11" rx="1.5"/></a>`;
  });
  const all = current.value?.model_use, range = first || last < total ? `calls ${log.first + first}–${log.first + last - 1}: ` : "";
  return html`<footer class="timing" aria-label="Time of the calls">
    <span class="legend faint"><span>model</span><span>tools</span></span>
    <svg viewBox="0 0 ${WIDTH} 34" preserveAspectRatio="none" role="img" aria-label="Time of model and tools, in order">${drawn}</svg>
    <span class="sums"><span>${range}${sums.model ? `model ${duration(sums.model)}, ` : ""}tools ${duration(sums.tool)}</span><span class="faint">${use(all)}</span></span></footer>`;
}
