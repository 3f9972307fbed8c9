// pg-boss: https://www.npmjs.com/package/pg-boss, with its listener on, since 0.5 s is the shortest that it polls.
//
// It marks a job completed and keeps the row, so it keeps its jobs as ours does, without their history.

import { fileURLToPath } from "node:url";
import pg from "pg";
import { PgBoss } from "pg-boss";
import { burn, latency, main, now, versionOf, worker } from "./measure.mjs";

const VERSION = versionOf("pg-boss");
const program = fileURLToPath(import.meta.url);
const QUEUE = "noop";
// Nobody else's: it is dropped before each workload.
const SCHEMA = "warp_bench_pgboss";

async function boss({ url, pool = 10 }) {
  const boss = new PgBoss({ connectionString: url, schema: SCHEMA, max: pool, schedule: false, useListenNotify: true });
  boss.on("error", (error) => console.error(error));
  return boss.start();
}

async function fresh(settings) {
  const pool = new pg.Pool({ connectionString: settings.url, max: 2 });
  pool.on("error", (error) => console.error(error));
  await pool.query(`drop schema if exists ${SCHEMA} cascade`);
  const publisher = await boss(settings);
  await publisher.createQueue(QUEUE, { notify: true });
  return { pool, publisher };
}

// Objects are made before the clock starts; turning them into text is part of the call, as in ours.
async function insert(publisher, jobs, batch) {
  const rows = Array.from({ length: jobs }, (_, n) => ({ data: { n, k: n % 100 } }));
  const started = now();
  for (let from = 0; from < jobs; from += batch) await publisher.insert(QUEUE, rows.slice(from, from + batch));
  return now() - started;
}

await main({
  async burn(settings) {
    const { pool, publisher } = await fresh(settings);
    await insert(publisher, settings.jobs, 10_000);
    await pool.query("vacuum analyze");
    const drained = async () => {
      const { rows } = await pool.query(`select exists (select from ${SCHEMA}.job where name = $1 and state < 'completed') as left`, [QUEUE]);
      return !rows[0].left;
    };
    const took = await burn({ program, settings, drained });
    return { version: VERSION, jobs: settings.jobs, jobs_per_s: (settings.jobs / took) * 1e3, settings: { ...settings, url: undefined } };
  },

  async work(settings) {
    const { batch = 500, concurrency = 4 } = settings;
    const here = await boss(settings);
    const count = await worker();
    const options = { batchSize: batch, localConcurrency: concurrency, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
    await here.work(QUEUE, options, async (jobs) => count(jobs.length));
    await new Promise(() => {});
  },

  async bulk(settings) {
    const { publisher } = await fresh(settings);
    const took = await insert(publisher, settings.jobs, settings.per_call ?? settings.jobs);
    return { version: VERSION, jobs: settings.jobs, jobs_per_s: (settings.jobs / took) * 1e3, settings: { ...settings, url: undefined } };
  },

  async latency(settings) {
    const { publisher } = await fresh(settings);
    const started = new Map();
    await publisher.work(QUEUE, { pollingIntervalSeconds: 0.5 }, async ([job]) => started.get(job.data.number)?.(now()));
    const enqueue = (number) => publisher.send(QUEUE, { number });
    const found = await latency({ samples: settings.samples, started, enqueue });
    return { version: VERSION, ...found, settings: { ...settings, url: undefined } };
  },
});
