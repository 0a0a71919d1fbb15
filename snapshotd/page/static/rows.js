// Lists of which only the visible rows are on the page. All rows have one height.
import { html, signal, view } from "./dom.js";

const BEYOND = 12;

/**
 * @typedef {object} RowsProps
 * @property {number} count
 * @property {number} height of each, in pixels
 * @property {(i: number) => import("./dom.js").Drawn} row draws one
 * @property {string} label
 * @property {number} [reveal] a row to scroll to when it changes
 * @property {boolean} [follow] stay at the end, as long as the reader has not scrolled up
 * @property {(atEnd: boolean) => void} [onEnd] is told when that changes
 * @property {string} [role]
 * @property {string} [className]
 */

export const Rows = view((/** @type {import("./dom.js").Self<RowsProps>} */ self) => {
  const top = signal(0), room = signal(800);
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
    const { count, height, row, label, role = "list", className = "" } = props;
    const first = Math.max(0, Math.floor(top.value / height) - BEYOND);
    const last = Math.min(count, Math.ceil((top.value + room.value) / height) + BEYOND);
    const drawn = [];
    for (let i = first; i < last; i++) drawn.push(row(i));
    return html`<div class="rows ${className}" role=${role} aria-label=${label} tabindex="0"
        ref=${(/** @type {HTMLElement | null} */ found) => found && (box = found)} onScroll=${() => scrolled(props)}>
      <div class="space" style=${{ height: `${count * height}px` }}>
        <div style=${{ transform: `translateY(${first * height}px)` }}>${drawn}</div>
      </div>
    </div>`;
  };
});
