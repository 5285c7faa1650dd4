// Connects to the stream of each gateway, keeps the newest records, and draws the view that the address selects.
import { drawDecisions, drawGrowth, drawHealth, drawPools, drawProgress, drawResult, drawTurns, merged } from "./views.js";

const MAX_RECORDS = 10000;
const VIEWS = ["now", "growth", "sessions", "what-if", "health"];
const $ = (id) => document.getElementById(id);

// The gateway of the page and, with ?gateways=URL,URL, others, whose states and decisions are merged.
const gateways = ["", ...(new URLSearchParams(location.search).get("gateways")?.split(",") ?? [])];
const states = new Map();
const heard = new Map(gateways.map((gateway) => [gateway, Date.now()])); // when the last event arrived

let state = null;
let records = []; // oldest first
let fresh = []; // records that the table of decisions does not show yet

function view() {
  const [name, session] = location.hash.slice(1).split("=");
  return [VIEWS.includes(name) ? name : "now", session === undefined ? null : decodeURIComponent(session)];
}

function draw() {
  if (state === null) return;
  const [name, session] = view();
  if (name === "now") {
    $("empty").hidden = state.decisions > 0;
    if (!$("empty").hidden) $("command").textContent = command();
    drawPools($("pools"), state, records);
    if (!$("pause").checked) {
      drawDecisions($("decisions"), fresh, state.traceUrl);
      fresh = [];
    }
  } else if (name === "growth") drawGrowth($("view-growth"), state, records);
  else if (name === "sessions") drawProgress($("progress"), state, session);
  else if (name === "health") drawHealth($("view-health"), state);
}

function command() {
  const key = state.authenticated ? ' \\\n  --header "Authorization: Bearer $API_KEY"' : "";
  const body = { model: state.model, messages: [{ role: "user", content: "Hello" }], max_tokens: 8 };
  const url = `${state.tls ? "https" : "http"}://${location.hostname}:${state.port}/v1/chat/completions`;
  return `curl ${url}${key} \\\n  --json '${JSON.stringify(body)}'`;
}

function show() {
  const [name, session] = view();
  for (const each of VIEWS) $(`view-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (session !== null) find(session);
  draw();
}

async function find(session) {
  $("session").value = session;
  const found = await Promise.all(gateways.map(async (gateway) => {
    const response = await fetch(`${gateway}/records?session=${encodeURIComponent(session)}`, { credentials: "include" });
    return response.json();
  }));
  drawTurns($("turns"), session, found.flat().sort((a, b) => a.time - b.time));
}

function status() {
  const silent = gateways.filter((gateway) => Date.now() - heard.get(gateway) > 3000);
  let problem = "";
  if (silent.length) problem = `no connection to ${silent[0] || "the gateway"}`;
  else if (state.configError) problem = "configuration refused";
  else if (state.redis === "degraded") problem = "Redis unavailable";
  else if (state.draining) problem = "draining";
  const threshold = state?.thresholdTokens ?? "∞";
  const text = problem || `${state.model} · ${state.policy}, τ = ${threshold}`;
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("bad", problem !== "");
}

function read(gateway) {
  const stream = new EventSource(`${gateway}/live`, { withCredentials: true });
  stream.addEventListener("state", (event) => receive(gateway, JSON.parse(event.data)));
  stream.addEventListener("decisions", (event) => {
    const added = JSON.parse(event.data);
    records = records.concat(added).slice(-MAX_RECORDS);
    fresh = fresh.concat(added).slice(-MAX_RECORDS);
    draw();
  });
}

function receive(gateway, received) {
  const first = state === null;
  states.set(gateway, received);
  state = merged(gateways.map((each) => states.get(each)).filter((each) => each !== undefined));
  heard.set(gateway, Date.now());
  if (first) {
    $("policy").value = state.policy;
    $("threshold").value = state.thresholdTokens ?? "none";
    $("fleet").value = Object.entries(state.pools).map(([name, pool]) => `${name}=${Math.max(1, pool.replicas.length)}`).join(",");
  }
  status();
  draw();
}

gateways.forEach(read);
setInterval(() => state && status(), 1000);

$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const hash = `#sessions=${encodeURIComponent($("session").value.trim())}`;
  if (location.hash === hash) show();
  else location.hash = hash;
});
$("simulate").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  $("result").textContent = "simulating…";
  try {
    const body = JSON.stringify(Object.fromEntries(new FormData(event.target)));
    const response = await fetch("/what-if", { method: "POST", headers: { "content-type": "application/json" }, body });
    drawResult($("result"), await response.json());
  } catch (error) {
    $("result").textContent = `The gateway did not answer: ${error.message}`;
  } finally {
    button.disabled = false;
  }
});
$("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(command());
  $("copy").textContent = "Copied";
});
addEventListener("hashchange", show);
show();
