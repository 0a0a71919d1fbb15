// Lists of which only the visible rows are on the page. All rows have one height, and each its own place: a row that stays
// visible while others come and go is neither compared nor painted again.
import { html, signal, view } from "./dom.js";

const BEYOND = 8;
/** The height of a list whose box is not on the page yet. */
const ROOM = 800;

/** The place of a row among all, since the others are not on the page. @typedef {{"aria-setsize"?: number, "aria-posinset"?: number}} Position */
/**
 * @typedef {object} RowsProps
 * @property {number} count
 * @property {number} height of each, in pixels
 * @property {(i: number, at: Position) => import("./dom.js").Drawn} row draws one; an option of a listbox has its position
 * @property {string} label
 * @property {(i: number) => string} [keyOf] what a row stays the same by when others are put before it
 * @property {number} [reveal] a row to scroll to when it changes
 * @property {boolean} [follow] stay at the end, as long as the reader has not scrolled up
 * @property {(atEnd: boolean) => void} [onEnd] is told when that changes
 * @property {string} [role]
 * @property {string} [className]
 */

/** One row, which is drawn again when a signal that it read has changed. */
const Row = view(() => (/** @type {{row: RowsProps["row"], i: number, height: number, count: number, role: string}} */ { row, i, height, count, role }) => {
  const at = { "aria-setsize": count, "aria-posinset": i + 1 }, isItem = role === "list";
  return html`<div class="slot" role=${isItem ? "listitem" : "presentation"} ...${isItem ? at : {}} style=${{ top: `${i * height}px`, height: `${height}px` }}>${row(i, at)}</div>`;
});

export const Rows = view((/** @type {import("./dom.js").Self<RowsProps>} */ self, given) => {
  const top = signal(given.follow ? Math.max(0, given.count * given.height - ROOM) : 0), room = signal(ROOM);
  let /** @type {HTMLElement} */ box, revealed = -1, atEnd = true, drawnCount = 0;
  self.mounted = () => {
    const sized = new ResizeObserver(() => (room.value = box.clientHeight));
    sized.observe(box);
    keep(self.props);
    return () => sized.disconnect();
  };
  self.componentDidUpdate = () => keep(self.props);

  function keep(/** @type {RowsProps} */ { count, height, reveal = -1, follow }) {
    if (follow && atEnd && count !== drawnCount) box.scrollTop = count * height;
    else if (reveal >= 0 && reveal !== revealed) {
      const y = reveal * height;
      if (y < box.scrollTop) box.scrollTop = y;
      else if (y + height > box.scrollTop + box.clientHeight) box.scrollTop = y + height - box.clientHeight;
    }
    [revealed, drawnCount] = [reveal, count];
  }

  function scrolled(/** @type {RowsProps} */ { count, height, onEnd }) {
    top.value = box.scrollTop;
    const now = box.scrollTop + box.clientHeight >= count * height - height;
    if (now !== atEnd) onEnd?.(now);
    atEnd = now;
  }

  return (props) => {
    const { count, height, row, label, keyOf, role = "list", className = "" } = props;
    const first = Math.max(0, Math.floor(top.value / height) - BEYOND);
    const last = Math.min(count, Math.ceil((top.value + room.value) / height) + BEYOND);
    const visible = [];
    for (let i = first; i < last; i++) visible.push(html`<${Row} key=${keyOf?.(i) ?? i} i=${i} row=${row} height=${height} count=${count} role=${role}/>`);
    return html`<div class="rows ${className}" role=${role} aria-label=${label} tabindex="0"
        ref=${(/** @type {HTMLElement | null} */ found) => found && (box = found)} onScroll=${() => scrolled(props)}>
      <div class="space" style=${{ height: `${count * height}px` }}>${visible}</div>
    </div>`;
  };
});
