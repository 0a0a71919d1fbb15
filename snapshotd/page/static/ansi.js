// A terminal's output as pieces of text with classes: colours and weight are kept, every other control is dropped.

const CONTROL = /\u001b(?:\[([0-9;:]*)([ -/]*[@-~])|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*(?:\u001b\\)?|[ -/]*[0-~])/g;

/**
 * The pieces of one line, and the style that goes on in the next.
 * @param {string} text @param {Set<string>} style
 * @returns {[string, string][]}
 */
export function pieces(text, style) {
  const found = /** @type {[string, string][]} */ ([]);
  let done = 0;
  const put = (/** @type {number} */ end) => end > done && found.push([[...style].join(" "), text.slice(done, end)]);
  for (const match of text.matchAll(CONTROL)) {
    put(match.index);
    done = match.index + match[0].length;
    if (match[2] === "m") restyle(style, match[1]);
  }
  put(text.length);
  return found;
}

function restyle(/** @type {Set<string>} */ style, /** @type {string} */ codes) {
  const numbers = (codes || "0").split(/[;:]/).map(Number);
  const drop = (/** @type {string} */ kind) => style.forEach((one) => one.startsWith(kind) && style.delete(one));
  const paint = (/** @type {string} */ kind, /** @type {number} */ colour) => (drop(kind), style.add(`${kind}${colour}`));
  for (let i = 0; i < numbers.length; i++) {
    const code = numbers[i];
    if (code === 0) style.clear();
    else if (code === 1) style.add("bold");
    else if (code === 2) style.add("dim");
    else if (code === 3) style.add("italic");
    else if (code === 4) style.add("under");
    else if (code === 22) (style.delete("bold"), style.delete("dim"));
    else if (code === 23) style.delete("italic");
    else if (code === 24) style.delete("under");
    else if (code >= 30 && code <= 37) paint("fg", code - 30);
    else if (code >= 90 && code <= 97) paint("fg", code - 90);
    else if (code === 39) drop("fg");
    else if (code >= 40 && code <= 47) paint("bg", code - 40);
    else if (code >= 100 && code <= 107) paint("bg", code - 100);
    else if (code === 49) drop("bg");
    else if (code === 38 || code === 48) {
      const colour = numbers[i + 1] === 5 ? numbers[i + 2] : NaN;
      if (colour < 16) paint(code === 38 ? "fg" : "bg", colour % 8);
      i += numbers[i + 1] === 5 ? 2 : 4;
    }
  }
}
