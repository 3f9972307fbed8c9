// graphile-worker: https://www.npmjs.com/package/graphile-worker, as its own page on performance sets it for throughput.
//
// It deletes a job that has succeeded, so it keeps no history.

import { fileURLToPath } from "node:url";
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { burn, latency, main, now, versionOf, worker } from "./measure.mjs";

const VERSION = versionOf("graphile-worker");
const program = fileURLToPath(import.meta.url);
// Nobody else's: it is dropped before each workload.
const SCHEMA = "warp_bench_graphile";
const quiet = new Logger(() => () => {});

const preset = ({ url, concurrency = 24, size = 500, batch = 0, refetch, pool, batched = true }) => ({
  worker: {
    connectionString: url,
    schema: SCHEMA,
    concurrentJobs: concurrency,
    maxPoolSize: pool ?? concurrency + 1,
    logger: quiet,
    ...(batched && {
      localQueue: { size, ...(refetch && { refetchDelay: { durationMs: refetch } }) },
      completeJobBatchDelay: batch,
      failJobBatchDelay: batch,
    }),
  },
});

async function fresh(url) {
  const pool = new pg.Pool({ connectionString: url, max: 2 });
  const report = (error) => console.error(error);
  pool.on("error", report).on("connect", (client) => client.on("error", report));
  await pool.query(`drop schema if exists ${SCHEMA} cascade`);
  const utils = await makeWorkerUtils({ pgPool: pool, schema: SCHEMA, logger: quiet });
  await utils.migrate();
  return pool;
}

// Objects are made before the clock starts; turning them into text is part of the call, as in ours.
async function addJobs(pool, jobs, batch) {
  const specs = Array.from({ length: jobs }, (_, n) => ({ identifier: "noop", payload: { n, k: n % 100 } }));
  const started = now();
  for (let from = 0; from < jobs; from += batch) {
    const text = JSON.stringify(specs.slice(from, from + batch));
    await pool.query(`select 1 from ${SCHEMA}.add_jobs(array(select json_populate_recordset(null::${SCHEMA}.job_spec, $1::json)))`, [text]);
  }
  return now() - started;
}

await main({
  async burn(settings) {
    const pool = await fresh(settings.url);
    await addJobs(pool, settings.jobs, 100_000);
    await pool.query("vacuum analyze");
    const drained = async () => {
      const { rows } = await pool.query(`select exists (select from ${SCHEMA}._private_jobs) as left`);
      return !rows[0].left;
    };
    const took = await burn({ program, settings, drained });
    return { version: VERSION, jobs: settings.jobs, jobs_per_s: (settings.jobs / took) * 1e3, settings: { ...settings, url: undefined } };
  },

  async work(settings) {
    const count = await worker();
    await run({ preset: preset(settings), noHandleSignals: true, taskList: { noop: () => count() } });
    await new Promise(() => {});
  },

  async bulk(settings) {
    const pool = await fresh(settings.url);
    const batch = settings.per_call ?? settings.jobs;
    const took = await addJobs(pool, settings.jobs, batch);
    return { version: VERSION, jobs: settings.jobs, jobs_per_s: (settings.jobs / took) * 1e3, settings: { ...settings, url: undefined } };
  },

  async latency(settings) {
    const pool = await fresh(settings.url);
    const started = new Map();
    const runner = await run({
      preset: preset(settings),
      noHandleSignals: true,
      taskList: { latency: ({ number }) => started.get(number)?.(now()) },
    });
    const enqueue = (number) => pool.query(`select from ${SCHEMA}.add_job('latency', json_build_object('number', $1::int))`, [number]);
    const found = await latency({ samples: settings.samples, started, enqueue });
    await runner.stop();
    return { version: VERSION, ...found, settings: { ...settings, url: undefined } };
  },
});
