// From a payload to an invoice. Pure: the time is an argument, and nothing is written anywhere.

import { digitsOf, divideRounded, formatDecimal, parseDecimal } from "./money.js";

// The payload is wrong; running the job again would not help.
export class Malformed extends Error {}

const MAX_LINES = 1000;
const MAX_TEXT = 500;
const QUANTITY_DIGITS = 3;
const RATE_DIGITS = 2;
// The longest that can be said in 32 bits of milliseconds, 49 days. A job that wakes too early snoozes again.
const MAX_SNOOZE = 0xffffffff;

export function parsePayload(text) {
  let payload;
  try {
    payload = JSON.parse(text);
  } catch (error) {
    throw new Malformed(`the payload is not JSON: ${error.message}`);
  }
  if (payload === null || typeof payload !== "object" || Array.isArray(payload)) {
    throw new Malformed("the payload is not an object");
  }
  return payload;
}

// Milliseconds until the payload's `not_before`; 0 if there is none or it has passed.
export function millisecondsLeft(payload, now) {
  if (payload.not_before === undefined || payload.not_before === null) return 0;
  const instant = parseInstant(payload.not_before);
  return Math.min(Math.max(0, instant - now), MAX_SNOOZE);
}

// With a zone, always: a time without one would mean another instant on another host.
const INSTANT = /^(\d{4})-(\d{2})-(\d{2})T(\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,9}))?(?:Z|([+-])(\d{2}):(\d{2}))$/;

function parseInstant(value) {
  const match = typeof value === "string" ? INSTANT.exec(value) : null;
  if (match === null) {
    throw new Malformed(`not_before must be an instant with a zone, like 2030-01-31T08:00:00Z: ${show(value)}`);
  }
  const [, year, month, day, hour, minute, second] = match.map(Number);
  const wall = Date.UTC(year, month - 1, day, hour, minute, second);
  // Date.UTC rolls the 31st of February over into March; what comes back must be what went in.
  const back = new Date(wall);
  const same = back.getUTCFullYear() === year && back.getUTCMonth() === month - 1 && back.getUTCDate() === day;
  const offset = match[8] === undefined ? 0 : Number(match[9]) * 60 + Number(match[10]);
  if (!same || hour > 23 || minute > 59 || second > 59 || offset > 18 * 60) {
    throw new Malformed(`not_before is no date of the calendar: ${show(value)}`);
  }
  const fraction = Number((match[7] ?? "").padEnd(3, "0").slice(0, 3));
  return wall + fraction - (match[8] === "-" ? -offset : offset) * 60_000;
}

export function renderInvoice(payload) {
  const invoice = readInvoice(payload);
  const money = (count) => `${formatDecimal(count, invoice.digits)} ${invoice.currency}`;
  const rows = invoice.lines.map(
    (line, index) =>
      `<tr><td>${index + 1}</td><td>${escapeHtml(line.description)}</td><td>${formatDecimal(line.quantity, QUANTITY_DIGITS)
        .replace(/\.?0+$/, "")}</td><td>${money(line.unitPrice)}</td><td>${money(line.amount)}</td></tr>`,
  );
  const taxes = invoice.taxes.map(
    ({ rate, base, tax }) => `<tr><td colspan="4">Tax ${formatDecimal(rate, RATE_DIGITS)} % on ${money(base)}</td><td>${money(tax)}</td></tr>`,
  );
  const title = `Invoice ${escapeHtml(invoice.number)}`;
  const html = [
    "<!doctype html>",
    '<html lang="en"><head><meta charset="utf-8">',
    `<title>${title}</title></head><body>`,
    `<h1>${title}</h1>`,
    `<p>Customer ${escapeHtml(invoice.customerId)}${invoice.customerName === null ? "" : `, ${escapeHtml(invoice.customerName)}`}</p>`,
    "<table><thead><tr><th>#</th><th>Description</th><th>Quantity</th><th>Unit price</th><th>Amount</th></tr></thead>",
    `<tbody>${rows.join("\n")}</tbody>`,
    `<tfoot>${taxes.join("\n")}<tr><th colspan="4">Total</th><th>${money(invoice.total)}</th></tr></tfoot></table>`,
    "</body></html>",
    "",
  ].join("\n");
  return { number: invoice.number, currency: invoice.currency, total: formatDecimal(invoice.total, invoice.digits), html };
}

function readInvoice(payload) {
  const customerId = Number.isSafeInteger(payload.customer_id) ? String(payload.customer_id) : readText(payload.customer_id, "customer_id");
  const customerName = payload.customer_name === undefined ? null : readText(payload.customer_name, "customer_name");
  const number = readText(payload.number, "number");
  const currency = readText(payload.currency, "currency");
  if (!/^[A-Z]{3}$/.test(currency)) throw new Malformed(`currency must be three capital letters, like EUR: ${show(currency)}`);
  if (!Array.isArray(payload.lines) || payload.lines.length === 0 || payload.lines.length > MAX_LINES) {
    throw new Malformed(`lines must be an array of 1 to ${MAX_LINES} lines`);
  }

  const digits = digitsOf(currency);
  const lines = payload.lines.map((line, index) => readLine(line, `lines[${index}]`, currency, digits));
  // Tax is rounded once per rate, on the sum: rounded per line, the cents of many lines would add up.
  const bases = new Map();
  for (const { taxRate, amount } of lines) bases.set(taxRate, (bases.get(taxRate) ?? 0n) + amount);
  const taxes = [...bases]
    .filter(([rate]) => rate !== 0n)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([rate, base]) => ({ rate, base, tax: divideRounded(base * rate, 100n * 10n ** BigInt(RATE_DIGITS)) }));
  const sum = (counts) => counts.reduce((a, b) => a + b, 0n);
  const total = sum(lines.map((line) => line.amount)) + sum(taxes.map((tax) => tax.tax));
  return { customerId, customerName, number, currency, digits, lines, taxes, total };
}

function readLine(line, where, currency, digits) {
  if (line === null || typeof line !== "object" || Array.isArray(line)) throw new Malformed(`${where} is not an object`);
  const description = readText(line.description, `${where}.description`);
  const quantity = parseDecimal(line.quantity, QUANTITY_DIGITS);
  if (quantity === null || quantity <= 0n) {
    throw new Malformed(`${where}.quantity must be a decimal above 0 with at most ${QUANTITY_DIGITS} digits behind the point: ${show(line.quantity)}`);
  }
  // May be negative: a discount is a line too.
  const unitPrice = parseDecimal(line.unit_price, digits);
  if (unitPrice === null) {
    throw new Malformed(`${where}.unit_price must be a decimal with at most ${digits} digits behind the point (${currency}): ${show(line.unit_price)}`);
  }
  const taxRate = line.tax_rate === undefined ? 0n : parseDecimal(line.tax_rate, RATE_DIGITS);
  if (taxRate === null || taxRate < 0n || taxRate > 100n * 10n ** BigInt(RATE_DIGITS)) {
    throw new Malformed(`${where}.tax_rate must be a percentage of 0 to 100: ${show(line.tax_rate)}`);
  }
  return { description, quantity, unitPrice, taxRate, amount: divideRounded(quantity * unitPrice, 10n ** BigInt(QUANTITY_DIGITS)) };
}

// A failure's text is kept with the job; a payload of megabytes is not repeated in it.
function show(value) {
  const text = JSON.stringify(value) ?? "missing";
  return text.length <= 80 ? text : `${text.slice(0, 80).replace(LONE_SURROGATE, "")}...`;
}

// With the u flag this matches only halves without their other half, which no UTF-8 text can hold.
const LONE_SURROGATE = /[\ud800-\udfff]/u;
const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]/;

function readText(value, where) {
  if (typeof value !== "string" || value.trim() === "") throw new Malformed(`${where} must be a text that is not empty`);
  if (value.length > MAX_TEXT) throw new Malformed(`${where} is longer than ${MAX_TEXT} characters`);
  if (CONTROL.test(value) || LONE_SURROGATE.test(value)) throw new Malformed(`${where} contains a character that cannot be shown`);
  return value;
}

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

// Enough for text and for quoted attributes, the only places where values stand.
export function escapeHtml(text) {
  return text.replace(/[&<>"']/g, (character) => ENTITIES[character]);
}
