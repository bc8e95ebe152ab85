// The status strip: polls /health/ready and /metrics while the tab is visible. Started by app.js.

import { request } from "./api.js";
import { $, formatAbout, formatBytes, formatRate, setText } from "./dom.js";

const INTERVAL_MS = 1500;
const TIMEOUT_MS = 5000;
const SAMPLE = /^\w+:(\w+)(?:\{.*\})? (\S+)/;

const MEANING = {
  ready: "ready",
  loading: "loading",
  draining: "finishing, takes no more",
  unresponsive: "not responding",
  dead: "stopped",
  unreachable: "not reachable",
};

/** Calls `onReady` each time the server becomes ready. Returns a function that polls at once. */
export function startStatus(onReady) {
  let timer = 0;
  let before = null;
  let status = "";

  async function poll() {
    clearTimeout(timer);
    timer = 0;
    const [health, metrics] = await Promise.all([readHealth(), readMetrics()]);
    const became = health.status === "ready" && status !== "ready";
    status = health.status;
    showHealth(health);
    showLoad(health, metrics, before);
    before = metrics;
    if (became) onReady();
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, INTERVAL_MS);
  }

  document.addEventListener("visibilitychange", () => {
    before = null;
    if (document.hidden) clearTimeout(timer);
    else poll();
  });
  poll();
  return poll;
}

async function readHealth() {
  try {
    const response = await request("health/ready", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 401) return { status: "unreachable" };
    return await response.json();
  } catch {
    return { status: "unreachable" };
  }
}

/** Each metric added up over its labels, by its name without the prefix; null where there are none to read. */
async function readMetrics() {
  try {
    const response = await request("metrics", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!response.ok) return null;
    const values = { at: performance.now() };
    for (const line of (await response.text()).split("\n")) {
      const match = SAMPLE.exec(line);
      if (match) values[match[1]] = (values[match[1]] ?? 0) + Number(match[2]);
    }
    return values;
  } catch {
    return null;
  }
}

function showHealth(health) {
  const silent = health.status === "unresponsive" && health.last_heard_age_s != null;
  const since = silent ? ` for ${formatAbout(health.last_heard_age_s)}` : "";
  setText($("state"), (MEANING[health.status] ?? String(health.status)) + since);
  document.body.dataset.status = health.status;
  const loading = health.status === "loading";
  $("notice").hidden = !loading && !health.message;
  if (loading) {
    showProgress(health);
  } else {
    $("loading-bar").hidden = true;
    setText($("notice-text"), health.message ?? "");
  }
}

/** The phase, and where they are known the bytes and the time left. */
function showProgress({ phase, bytes_done: done, bytes_total: total, eta_s: eta }) {
  const bar = $("loading-bar");
  bar.hidden = !total;
  bar.max = total || 1;
  bar.value = done || 0;
  const parts = [phase || "starting"];
  if (total) parts.push(`${formatBytes(done)} of ${formatBytes(total)}`);
  if (eta != null) parts.push(`${formatAbout(eta)} left`);
  setText($("notice-text"), parts.join(" · "));
}

function showLoad(health, metrics, before) {
  setText($("running"), figure(metrics?.num_requests_running ?? health.running));
  setText($("waiting"), figure(metrics?.num_requests_waiting ?? health.waiting));
  const usage = metrics?.kv_cache_usage_perc;
  $("kv-bar").value = usage ?? 0;
  setText($("kv"), usage === undefined ? "–" : `${(usage * 100).toFixed(usage < 0.0995 ? 1 : 0)} %`);
  const made = metrics && before ? metrics.generation_tokens_total - before.generation_tokens_total : NaN;
  // Below zero: the server was started anew in between.
  setText($("throughput"), made >= 0 ? formatRate((made * 1000) / (metrics.at - before.at)) : "–");
}

function figure(value) {
  return value == null ? "–" : Number(value).toLocaleString("en");
}
