// JSON as agents wrote it: a whole number above 2^53 keeps its digits when it is shown, or sent again.

/** A whole number that JavaScript rounds counts as such, and is written with the digits that it was read with. */
class Exact extends Number {
  constructor(/** @type {string} */ digits) {
    super(digits);
    this.toJSON = () => /** @type {any} */ (JSON).rawJSON(digits);
  }
}

const keepDigits = (/** @type {string} */ _, /** @type {unknown} */ value, /** @type {{source?: string}} */ { source = "" } = {}) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) && "rawJSON" in JSON ? new Exact(source) : value;

/** The value of a JSON text. */
export const parse = (/** @type {string} */ text) =>
  /[:[,\s]-?\d{16}/.test(text) ? JSON.parse(text, /** @type {(key: string, value: unknown) => unknown} */ (keepDigits)) : JSON.parse(text);
