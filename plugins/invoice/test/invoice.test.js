import assert from "node:assert/strict";
import { test } from "node:test";

import { Malformed, escapeHtml, millisecondsLeft, parsePayload, renderInvoice } from "../src/invoice.js";
import { divideRounded, formatDecimal, parseDecimal } from "../src/money.js";

const payload = (changes = {}) => ({
  customer_id: "c-7",
  number: "2030-001",
  currency: "EUR",
  lines: [{ description: "Work", quantity: 1, unit_price: "10.00" }],
  ...changes,
});
const line = (changes) => payload({ lines: [{ description: "Work", quantity: 1, unit_price: "10.00", ...changes }] });

test("decimals are read and written exactly", () => {
  for (const [text, digits, count] of [
    ["19.99", 2, 1999n], [19.99, 2, 1999n], ["0.1", 2, 10n], [-0.5, 2, -50n], ["7", 0, 7n], ["1.500", 1, 15n], [0.1 + 0.2, 2, null],
    ["1.005", 2, null], ["1e3", 2, null], [1e21, 2, null], ["01", 2, null], ["+1", 2, null], ["", 2, null], [" 1", 2, null], [null, 2, null],
    [true, 2, null], [NaN, 2, null], ["1234567890123", 2, null],
  ]) {
    assert.equal(parseDecimal(text, digits), count, `${text}`);
  }
  assert.equal(formatDecimal(-5n, 2), "-0.05");
  assert.equal(formatDecimal(1234n, 0), "1234");
  assert.equal(formatDecimal(0n, 3), "0.000");
});

test("halves go away from zero", () => {
  assert.deepEqual([5n, 4n, -5n, -4n, 15n].map((n) => divideRounded(n, 10n)), [1n, 0n, -1n, 0n, 2n]);
});

test("totals have no error of binary fractions", () => {
  const tenth = { description: "x", quantity: 3, unit_price: 0.1 };
  assert.equal(renderInvoice(payload({ lines: [tenth] })).total, "0.30");
  assert.equal(renderInvoice(payload({ lines: Array(1000).fill(tenth) })).total, "300.00");
  assert.equal(renderInvoice(payload({ currency: "JPY", lines: [{ description: "x", quantity: "2.5", unit_price: 333 }] })).total, "833");
  assert.equal(renderInvoice(payload({ currency: "KWD", lines: [{ description: "x", quantity: 1, unit_price: "1.005" }] })).total, "1.005");
  const largest = { description: "x", quantity: "999999999999.999", unit_price: "999999999999.99" };
  assert.equal(renderInvoice(payload({ lines: [largest] })).total, "999999999999989000000000.00");
});

test("tax is rounded once per rate", () => {
  const lines = Array(3).fill({ description: "x", quantity: 1, unit_price: "0.33", tax_rate: "7.5" });
  // 0.99 * 7.5 % = 0.07425; three times 0.02475 would have given 0.06.
  assert.equal(renderInvoice(payload({ lines })).total, "1.06");
});

test("a discount is a negative line", () => {
  const lines = [{ description: "x", quantity: 1, unit_price: "10" }, { description: "y", quantity: 1, unit_price: "-2.50" }];
  assert.equal(renderInvoice(payload({ lines })).total, "7.50");
});

test("every value is escaped", () => {
  assert.equal(escapeHtml(`<a b="c" d='e'>&amp;`), "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;amp;");
  const evil = `</td><script>alert("1" & '2')</script>`;
  const { html } = renderInvoice(payload({ customer_id: evil, customer_name: evil, number: evil, lines: [{ description: evil, quantity: 1, unit_price: 1 }] }));
  assert.ok(!html.includes("<script"));
  assert.equal(html.split("&lt;script&gt;").length - 1, 5);
});

test("every refusal names the field", () => {
  for (const [bad, says] of [
    [payload({ customer_id: undefined }), "customer_id"],
    [payload({ customer_id: 1.5 }), "customer_id"],
    [payload({ number: " " }), "number"],
    [payload({ number: "a\u0000" }), "number"],
    [payload({ number: "\ud800" }), "number"],
    [payload({ number: "x".repeat(501) }), "number"],
    [payload({ currency: "eur" }), "currency"],
    [payload({ lines: [] }), "lines"],
    [payload({ lines: {} }), "lines"],
    [payload({ lines: [null] }), "lines[0]"],
    [line({ description: 7 }), "lines[0].description"],
    [line({ quantity: 0 }), "lines[0].quantity"],
    [line({ quantity: -1 }), "lines[0].quantity"],
    [line({ quantity: "1.0001" }), "lines[0].quantity"],
    [line({ unit_price: "1.005" }), "lines[0].unit_price"],
    [line({ unit_price: undefined }), "lines[0].unit_price"],
    [line({ tax_rate: 101 }), "lines[0].tax_rate"],
  ]) {
    assert.throws(() => renderInvoice(bad), (error) => error instanceof Malformed && error.message.includes(says), says);
  }
  assert.throws(() => parsePayload("{"), Malformed);
  assert.throws(() => parsePayload("[]"), Malformed);
  assert.equal(renderInvoice(payload({ number: "\u{1f600}" })).number, "\u{1f600}");
});

test("a later instant is waited for", () => {
  const now = Date.UTC(2030, 0, 1);
  const left = (not_before) => millisecondsLeft({ not_before }, now);
  assert.equal(left(undefined), 0);
  assert.equal(left("2029-12-31T23:59:59Z"), 0);
  assert.equal(left("2030-01-01T00:00:01.5Z"), 1500);
  assert.equal(left("2030-01-01T02:00:00+01:00"), 3_600_000);
  assert.equal(left("2029-12-31T23:00:00-02:00"), 3_600_000);
  assert.equal(left("2031-01-01T00:00:00Z"), 0xffffffff, "as long as can be said");
  for (const bad of ["2030-01-01", "2030-01-01T00:00:00", "2030-02-30T00:00:00Z", "2030-01-01T24:00:00Z", "tomorrow", 5, {}]) {
    assert.throws(() => left(bad), Malformed, `${bad}`);
  }
});
