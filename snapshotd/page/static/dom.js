// Views: functions of signals that Preact draws. `view` gives each instance its own signals and redraws it when one that
// it read has changed. All text of agents goes through `plain`, and into the page as text.
import { Component, h, render } from "./vendor/preact.mjs";
import { computed, effect, signal, batch } from "./vendor/signals-core.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { batch, computed, effect, render, signal };

/** @typedef {import("./vendor/preact.mjs").Drawn} Drawn */
/**
 * @template T
 * @typedef {import("./vendor/signals-core.mjs").Signal<T>} Signal
 */
/**
 * @template P
 * @typedef {Component<P> & {mounted?: () => void | (() => void), componentDidUpdate?: () => void}} Self
 */

/**
 * A component. `setup` runs once for each instance and returns the function that draws it; what it puts into
 * `self.mounted` runs when it is on the page, and what that returns when it leaves.
 * @template P
 * @param {(self: Self<P>, props: P) => (props: P) => Drawn} setup
 */
export function view(setup) {
  /** @extends {Component<P>} */
  class View extends Component {
    constructor(/** @type {P} */ props) {
      super(props);
      /** @type {(() => void | (() => void)) | undefined} */
      this.mounted = undefined;
      /** @type {(() => void) | undefined} */
      this.unfollow = undefined;
      /** @type {void | (() => void)} */
      this.left = undefined;
      this.given = signal(props);
      const draw = setup(this, props);
      this.drawn = computed(() => draw(this.given.value));
      this.drawing = false;
    }

    componentDidMount() {
      this.unfollow = effect(() => {
        this.drawn.value;
        if (!this.drawing && this.unfollow) this.forceUpdate();
      });
      this.left = this.mounted?.();
    }

    /** With the same values it is not drawn again. */
    shouldComponentUpdate(/** @type {P} */ next) {
      const before = /** @type {Record<string, unknown>} */ (this.props), after = Object.entries(/** @type {object} */ (next));
      return after.length !== Object.keys(before).length || after.some(([name, value]) => value !== before[name]);
    }

    componentWillUnmount() {
      this.unfollow?.();
      this.left?.();
    }

    render(/** @type {P} */ props) {
      this.drawing = true;
      this.given.value = props;
      this.drawing = false;
      return this.drawn.value;
    }
  }
  return View;
}

/**
 * An act that a person asks for: while it runs, a second click does nothing. `running` says whether it does.
 * @template {unknown[]} G
 * @template T
 * @param {(...given: G) => T | Promise<T>} act
 */
export function once(act) {
  const running = signal(false);
  return Object.assign(async (/** @type {G} */ ...given) => {
    if (running.value) return undefined;
    running.value = true;
    try {
      return await act(...given);
    } finally {
      running.value = false;
    }
  }, { running });
}

/** What a form's field holds when it tells of a change. */
export const typed = (/** @type {Event} */ event) => /** @type {HTMLInputElement} */ (event.target).value;

/** All but tabs, ends of lines, and what makes a pictograph of the one before. */
const UNSEEN = /(?![\t\n]|(?<=\p{Extended_Pictographic})\ufe0f)[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;

/** Text that has none of these, as most has. */
const PRINTED = /^[\t\n -~]*$/;

/** Text in which characters that a reader would not see, or that would turn the text around, stand as their numbers. */
export function plain(/** @type {unknown} */ text, limit = 4000) {
  const whole = typeof text === "string" ? text : JSON.stringify(text) ?? "";
  const cut = whole.length > limit ? `${whole.slice(0, limit)}…` : whole;
  return PRINTED.test(cut) ? cut : cut.replace(UNSEEN, (one) => `<${one.codePointAt(0)?.toString(16).toUpperCase().padStart(2, "0")}>`);
}

/** The same in one line. */
export const line = (/** @type {unknown} */ text, limit = 400) => plain(text, limit).replace(/\s+/g, " ");

/** Bytes as people read them. */
export function size(/** @type {number} */ bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

/** Milliseconds as people read them. */
export function duration(/** @type {number} */ ms) {
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  return ms < 3_600_000 ? `${(ms / 60_000).toFixed(1)} min` : `${(ms / 3_600_000).toFixed(1)} h`;
}

/** Changes when ages are to be drawn again, also where nothing else happens. */
const aged = signal(0);
setInterval(() => aged.value++, 5000);

/** How long ago a time was. */
export function ago(/** @type {string} */ time) {
  aged.value;
  const seconds = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  for (const [unit, length] of /** @type {[string, number][]} */ ([["d", 86400], ["h", 3600], ["min", 60]]))
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  return seconds < 5 ? "now" : `${Math.floor(seconds)} s`;
}

/** The same as people say it. */
export const since = (/** @type {string} */ time) => (ago(time) === "now" ? "just now" : `${ago(time)} ago`);

/** A whole number as people read it. The browser's own way takes 30 ms to begin. */
export const grouped = (/** @type {number} */ number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

/** A number of things, with its word. */
export const count = (/** @type {number} */ number, /** @type {string} */ word, many = `${word}s`) => `${grouped(number)} ${number === 1 ? word : many}`;

/** An amount of money, or of whatever the prices are in. */
export const money = (/** @type {number} */ cost) => (cost >= 1 ? cost.toFixed(2) : cost ? cost.toPrecision(2) : "0");

/** A number of tokens as people read it. */
export const tokens = (/** @type {number} */ number) => (number < 10_000 ? String(number) : number < 1e6 ? `${Math.round(number / 1000)}k` : `${(number / 1e6).toFixed(1)}M`);

/** The short form of an id. */
export const short = (/** @type {string} */ id) => id.slice(0, 12);
