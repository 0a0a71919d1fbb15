// A terminal on a throw-away fork of a snapshot. The fork ends with the page's tab, or when this view is left.
import { html, short, signal, view } from "./dom.js";
import { at, pageKey } from "./api.js";
import { link } from "./state.js";

const WINDOW_BYTES = 256 << 10;

/** Xterm's style elements (see vendor/LICENSES.txt): the page's policy lets a script adopt a sheet, and write none into the page. */
class SheetElement extends HTMLElement {
  sheet = new CSSStyleSheet();

  set textContent(/** @type {string} */ text) {
    this.sheet.replaceSync(text);
  }

  connectedCallback() {
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, this.sheet];
  }

  disconnectedCallback() {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((one) => one !== this.sheet);
  }
}

/** The colours of the page, as xterm takes them. */
function theme() {
  const style = getComputedStyle(document.documentElement), of = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  return { background: of("pane"), foreground: of("ink"), cursor: of("accent"), cursorAccent: of("pane"), selectionBackground: of("on"), red: of("minus"), green: of("plus"), yellow: of("warn"), blue: of("accent"),
    brightBlack: of("faint"), black: of("soft"), white: of("soft"), brightWhite: of("ink"), brightRed: of("minus"), brightGreen: of("plus"), brightYellow: of("warn"), brightBlue: of("accent"),
    magenta: "#a23bb0", brightMagenta: "#a23bb0", cyan: "#0b7c86", brightCyan: "#0b7c86" };
}

const FONT = { fontFamily: 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace', fontSize: 13 };

/** How many rows and columns a box has room for. */
function roomIn(/** @type {HTMLElement} */ box) {
  const probe = box.appendChild(document.createElement("span"));
  Object.assign(probe.style, { ...FONT, fontSize: `${FONT.fontSize}px`, position: "absolute", visibility: "hidden" });
  probe.textContent = "W".repeat(64);
  const { width, height } = probe.getBoundingClientRect();
  probe.remove();
  return { rows: Math.max(4, Math.floor(box.clientHeight / Math.ceil(height))), columns: Math.max(20, Math.floor((box.clientWidth - 16) / (width / 64))) };
}

const encode = (/** @type {string} */ text) => new TextEncoder().encode(text);
const base64 = (/** @type {Uint8Array} */ data) => btoa(Array.from(data, (one) => String.fromCharCode(one)).join(""));

/** Xterm's own style, which no other view needs. */
const loadStyle = () => new Promise((done, failed) => document.getElementById("xterm-style") ? done(null)
  : document.head.append(Object.assign(document.createElement("link"), { id: "xterm-style", rel: "stylesheet", href: "vendor/xterm.css", onload: done, onerror: failed })));

export const Terminal = view((/** @type {import("./dom.js").Self<{id: string}>} */ self) => {
  const told = signal("the fork starts…");
  let /** @type {HTMLElement} */ box;
  self.mounted = () => {
    const end = new AbortController();
    start(self.props.id, end.signal).catch((error) => (told.value = error.message));
    return () => end.abort();
  };

  async function start(/** @type {string} */ ref, /** @type {AbortSignal} */ left) {
    const { Terminal: Xterm } = await import("./vendor/xterm.mjs");
    await loadStyle();
    if (left.aborted) return;
    if (!customElements.get("x-style")) customElements.define("x-style", SheetElement);
    let size = roomIn(box);
    const xterm = new Xterm({ ...FONT, rows: size.rows, cols: size.columns, theme: theme(), scrollback: 10_000, screenReaderMode: true, linkHandler: { activate: () => {} } });
    xterm.open(box);
    xterm.focus();
    const socket = new WebSocket(`ws://${location.host}` + at`/terminal/${ref}?page=${pageKey()}`);
    socket.binaryType = "arraybuffer";
    const say = (/** @type {object} */ message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
    let waiting = /** @type {Uint8Array[]} */ ([]), under = 0;
    const flush = () => {
      while (waiting.length && under < WINDOW_BYTES) {
        const piece = waiting[0].subarray(0, WINDOW_BYTES - under);
        if (piece.length === waiting[0].length) waiting.shift();
        else waiting[0] = waiting[0].subarray(piece.length);
        under += piece.length;
        say({ stdin: base64(piece) });
      }
    };
    socket.onopen = () => say(size);
    socket.onmessage = ({ data }) => {
      if (typeof data !== "string") return xterm.write(new Uint8Array(data), () => told.value.startsWith("the fork") && (told.value = ""));
      const message = /** @type {{taken?: number, exit_code?: number, error?: string}} */ (JSON.parse(data));
      if (message.taken) (under -= message.taken), flush();
      else if (message.error) told.value = message.error;
      else told.value = `the shell has ended (${message.exit_code}); nothing of the fork is kept`;
    };
    socket.onclose = ({ reason }) => {
      if (!told.value || told.value.startsWith("the fork")) told.value = reason || "the connection has ended, and the fork with it";
      xterm.options.disableStdin = true;
    };
    xterm.onData((text) => (waiting.push(encode(text)), flush()));
    xterm.onBinary((text) => (waiting.push(Uint8Array.from(text, (one) => one.charCodeAt(0))), flush()));
    const sized = new ResizeObserver(() => {
      const next = roomIn(box);
      if (next.rows === size.rows && next.columns === size.columns) return;
      size = next;
      xterm.resize(size.columns, size.rows);
      say(size);
    });
    sized.observe(box);
    left.addEventListener("abort", () => (sized.disconnect(), socket.close(), xterm.dispose()));
  }

  return ({ id }) => html`<main class="tty"><header><h1>Throw-away fork of <a href=${link("s", id)}><code>${short(id)}</code></a></h1>
      <span class="faint">Nothing of it is kept; it ends when you leave.</span><span class="push"></span><span role="status">${told.value}</span></header>
    <div class="screen" ref=${(/** @type {HTMLElement | null} */ found) => found && (box = found)}></div></main>`;
});
