// Decimal arithmetic on integers. A price is a count of its currency's smallest unit from the moment it is read to
// the moment it is printed; no binary fraction ever holds money.

// Digits behind the point where they are not two (ISO 4217).
const DIGITS = new Map([
  ...["BIF", "CLP", "DJF", "GNF", "ISK", "JPY", "KMF", "KRW", "PYG", "RWF", "UGX", "VND", "VUV", "XAF", "XOF", "XPF"].map((c) => [c, 0]),
  ...["BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"].map((c) => [c, 3]),
]);

export function digitsOf(currency) {
  return DIGITS.get(currency) ?? 2;
}

// Twelve digits before the point: larger than every invoice, small enough to keep a typing mistake out.
const DECIMAL = /^(-?)(0|[1-9][0-9]{0,11})(?:\.([0-9]{1,6}))?$/;

// Text or a JSON number to a count of 10^-digits. Returns null for what is not a plain decimal or is finer than that.
export function parseDecimal(value, digits) {
  // The shortest text that gives the same number back is what was written, up to fifteen digits.
  const match = DECIMAL.exec(typeof value === "number" ? String(value) : typeof value === "string" ? value : "");
  if (match === null) return null;
  const fraction = (match[3] ?? "").replace(/0+$/, "");
  if (fraction.length > digits) return null;
  const count = BigInt(match[2] + fraction.padEnd(digits, "0"));
  return match[1] === "-" ? -count : count;
}

export function formatDecimal(count, digits) {
  const sign = count < 0n ? "-" : "";
  const text = (count < 0n ? -count : count).toString().padStart(digits + 1, "0");
  const cut = text.length - digits;
  return sign + text.slice(0, cut) + (digits > 0 ? "." + text.slice(cut) : "");
}

// Half a unit goes away from zero, as on paper; BigInt division alone would cut it off.
export function divideRounded(count, divisor) {
  const half = divisor / 2n;
  return count < 0n ? -((-count + half) / divisor) : (count + half) / divisor;
}
