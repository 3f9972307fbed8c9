// The component: turns an attempt into calls of the functions in invoice.js, and what they throw into failures.
// What is thrown with a `tag` is the failure that the host reads; anything else that is thrown is a trap.

import log from "warp:job/log@1.0.0";
import progress from "warp:job/progress@1.0.0";
import { Malformed, millisecondsLeft, parsePayload, renderInvoice } from "./invoice.js";

export function handle(attempt) {
  try {
    const payload = parsePayload(attempt.payload);
    const left = millisecondsLeft(payload, Date.now());
    if (left > 0) {
      log.write("info", "too early, asking for a later start", [["not_before", payload.not_before]]);
      throw { tag: "snooze", val: left };
    }
    const invoice = renderInvoice(payload);
    progress.report("invoice", 100);
    log.write("info", "invoice rendered", [
      ["number", invoice.number],
      ["total", `${invoice.total} ${invoice.currency}`],
    ]);
    return JSON.stringify(invoice);
  } catch (error) {
    if (error instanceof Malformed) throw { tag: "permanent", val: error.message };
    throw error;
  }
}
