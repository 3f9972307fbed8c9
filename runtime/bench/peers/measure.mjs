// What the peers written for Node have in common: arguments, a clock, percentiles, worker processes.
//
// Each peer is a program `node PEER.mjs WORKLOAD '{"url": …, "jobs": …, …}'` that prints one JSON object on its last line.
// A burn-down with several processes forks the program again with the workload `work`; the parent counts what the
// children report, so that the clock of one process times all of them.

import { fork } from "node:child_process";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

export { sleep };

/** Milliseconds on a clock that never steps. */
export const now = () => performance.now();

/** What is installed, which the peers do not say by themselves. */
export const versionOf = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url), "utf8")).version;

/** Runs the workload that the command line names. */
export async function main(workloads) {
  const [name, settings = "{}"] = process.argv.slice(2);
  const workload = workloads[name];
  if (!workload) {
    console.error(`there is no workload ${name}; there are ${Object.keys(workloads).join(", ")}`);
    process.exit(2);
  }
  const found = await workload(JSON.parse(settings));
  if (found) process.stdout.write(`${JSON.stringify(found)}\n`);
  process.exit(0);
}

/** The value below which this part of the samples lies. */
function percentile(samples, part) {
  const sorted = [...samples].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))];
}

/** Milliseconds from `started` until `jobs` are done in `processes` children and `drained` says that their ends are written. */
export async function burn({ program, settings, drained }) {
  const { jobs, processes = 1 } = settings;
  let done = 0;
  let finish;
  const finished = new Promise((resolve, reject) => (finish = { resolve, reject }));
  const children = Array.from({ length: processes }, () => fork(program, ["work", JSON.stringify(settings)]));
  const ready = children.map(
    (child) =>
      new Promise((resolve) => {
        child.on("message", (message) => {
          if (message === "ready") return resolve();
          done += message;
          if (done >= jobs) finish.resolve();
        });
        child.on("exit", (code) => finish.reject(new Error(`a worker process ended with ${code} after ${done} jobs`)));
      }),
  );
  await Promise.all(ready);
  const started = now();
  for (const child of children) child.send("go");
  await finished;
  while (!(await drained())) await sleep(2);
  const took = now() - started;
  for (const child of children) {
    child.removeAllListeners("exit");
    child.kill("SIGKILL");
  }
  return took;
}

/** In a child: waits for the parent's start. The answer counts a job; counts go to the parent every few milliseconds. */
export async function worker() {
  let fresh = 0;
  setInterval(() => {
    if (fresh > 0) process.send(fresh);
    fresh = 0;
  }, 5);
  process.on("disconnect", () => process.exit(0));
  const go = new Promise((resolve) => process.once("message", resolve));
  process.send("ready");
  await go;
  return (jobs = 1) => {
    fresh += jobs;
  };
}

/**
 * Enqueues `samples` jobs one after the other, each after the last has started. Milliseconds until the handler starts, from the
 * call that enqueues (as the peers' own tests count) and from its answer.
 */
export async function latency({ samples, started, enqueue, warmUp = 100 }) {
  const fromCall = [];
  const fromAnswer = [];
  for (let number = 0; number < warmUp + samples; number++) {
    const start = new Promise((resolve) => started.set(number, resolve));
    const called = now();
    await enqueue(number);
    const answered = now();
    const at = await start;
    if (number >= warmUp) {
      fromCall.push(at - called);
      // A start may even precede the answer.
      fromAnswer.push(Math.max(0, at - answered));
    }
    await sleep(5);
  }
  return {
    samples,
    p50_ms: percentile(fromCall, 0.5),
    p95_ms: percentile(fromCall, 0.95),
    p99_ms: percentile(fromCall, 0.99),
    from_answer_p50_ms: percentile(fromAnswer, 0.5),
    from_answer_p99_ms: percentile(fromAnswer, 0.99),
  };
}
