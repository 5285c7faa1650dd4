// Draws the views. Texts are set as text, never as HTML, because clients choose session ids.

const SHOWN_DECISIONS = 100;
const SHOWN_POINTS = 1000;
const RATE_SECONDS = 10;
const BOUNDS = [0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768, 131072];
const POOLS = ["speculative", "greedy"];
const SOURCES = ["held", "fetched", "computed"];

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function s(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

const dash = "–";
const number = (value, digits = 0) =>
  value === null || value === undefined
    ? dash
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const seconds = (value) => (value === null || value === undefined ? dash : value < 1 ? `${number(value * 1000)} ms` : `${number(value, value < 10 ? 2 : 0)} s`);
const percent = (part, whole) => (whole ? `${number((100 * part) / whole)} %` : dash);
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const address = (url) => (url ? url.replace(/^https?:\/\//, "") : dash);
const accepted = (record) => (record.verifications ? number(record.output_tokens / record.verifications, 2) : dash);

function table(label, columns, rows) {
  const head = h("tr", {}, ...columns.map((name) => h("th", { scope: "col" }, name)));
  const body = h("tbody", {}, ...rows);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", {}, h("thead", {}, head), body));
}

const row = (...cells) => h("tr", {}, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell))));
const poolCell = (pool) => h("td", { class: pool ?? "" }, pool ?? dash);

// Replaces the content, but keeps the position of scrolled regions and the focus on them.
function replace(element, ...children) {
  const regions = [...element.querySelectorAll(".scroll")];
  const scrolled = regions.map((region) => region.scrollLeft);
  const focused = regions.indexOf(document.activeElement);
  element.replaceChildren(...children);
  element.querySelectorAll(".scroll").forEach((region, index) => {
    region.scrollLeft = scrolled[index] ?? 0;
    if (index === focused) region.focus({ preventScroll: true });
  });
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

// One state for several gateways: the sums of what they do, and the worst of what they report.
export function merged(states) {
  if (states.length === 1) return states[0];
  const total = (name) => sum(states.map((state) => state[name]));
  const worst = states.find((state) => state.configError) ?? states.find((state) => state.redis === "degraded") ?? states[0];
  const pools = Object.fromEntries(POOLS.map((name) => [name, mergedPool(states.map((state) => state.pools[name]))]));
  const inProgress = states.flatMap((state) => state.inProgress);
  return { ...worst, pools, inProgress, inProgressTotal: total("inProgressTotal"), decisions: total("decisions"), mirrorRecords: total("mirrorRecords") };
}

function mergedPool(pools) {
  const replicas = [];
  for (const replica of pools.flatMap((pool) => pool.replicas)) {
    const known = replicas.find((each) => each.url === replica.url);
    if (!known) replicas.push({ ...replica });
    else Object.assign(known, known.ready ? replica : {}, { inFlight: known.inFlight + replica.inFlight });
  }
  const total = (name) => sum(pools.map((pool) => pool[name]));
  return { replicas, readyReplicas: replicas.filter((each) => each.ready).length, inFlight: total("inFlight"), queued: total("queued") };
}

export function drawPools(element, state, records) {
  const recent = records.filter((record) => record.time + record.total_seconds > state.time - RATE_SECONDS);
  const rows = POOLS.flatMap((name) => {
    const pool = state.pools[name];
    const turns = recent.filter((record) => record.pool === name);
    const ready = `${pool.readyReplicas} of ${pool.replicas.length} ready`;
    const total = row(h("th", { scope: "row", class: name }, name), ready, ...figures(turns, pool), number(pool.queued));
    return [total, ...pool.replicas.map((replica) => {
      const own = turns.filter((record) => record.replica === replica.url);
      const condition = h("td", { class: replica.ready ? "" : "bad" }, replica.state);
      return row(address(replica.url), condition, ...figures(own, replica), "");
    })];
  });
  const columns = ["pool, replica", "state", "in flight", `turns/s (${RATE_SECONDS} s)`, "first token", "per token", "cached prompt", "acceptance", "queued"];
  replace(element, h("h2", {}, "Pools"), table("Pools", columns, rows));
}

function figures(turns, load) {
  const streamed = turns.filter((each) => each.first_token_seconds !== null);
  const longer = streamed.filter((each) => each.output_tokens > 1);
  const drafted = turns.filter((each) => each.verifications);
  const counted = turns.filter((each) => each.cached_tokens !== null);
  return [
    number(load.inFlight),
    number(turns.length / RATE_SECONDS, 1),
    seconds(mean(streamed.map((each) => each.first_token_seconds))),
    seconds(mean(longer.map((each) => (each.total_seconds - each.first_token_seconds) / (each.output_tokens - 1)))),
    percent(sum(counted.map((each) => each.cached_tokens)), sum(counted.map((each) => each.prompt_tokens))),
    drafted.length
      ? number(sum(drafted.map((each) => each.output_tokens)) / sum(drafted.map((each) => each.verifications)), 2)
      : dash,
  ];
}

const COLUMNS = ["time", "session", "turn", "ΔL", "L", "pool", "replica", "reason", "predicted", "acceptance"];
COLUMNS.push("held", "fetched", "computed", "queued", "first token", "duration", "outcome");

export function drawDecisions(element, fresh, traceUrl) {
  const [head, body] = [element.tHead, element.tBodies[0]];
  if (!head.rows.length) head.append(h("tr", {}, ...COLUMNS.map((name) => h("th", { scope: "col" }, name))));
  for (const record of fresh.slice(-SHOWN_DECISIONS)) body.prepend(decision(record, traceUrl));
  const shown = body.querySelectorAll("tr.decision");
  for (const old of [...shown].slice(SHOWN_DECISIONS)) {
    if (old.nextElementSibling?.matches(".inputs")) old.nextElementSibling.remove();
    old.remove();
  }
}

function decision(record, traceUrl) {
  const onclick = () => toggle(line, open, record, traceUrl);
  const open = h("button", { type: "button", "aria-expanded": "false", onclick }, clock(record.time));
  const predicted = record.predicted_seconds ?? {};
  const line = row(
    open,
    sessionLink(record),
    ...[record.turn, record.delta_tokens, record.prompt_tokens].map((count) => number(count)),
    poolCell(record.pool),
    address(record.replica),
    record.reason ?? dash,
    record.predicted_seconds ? POOLS.map((pool) => seconds(predicted[pool])).join(" / ") : dash,
    accepted(record),
    ...SOURCES.map((source) => number(record[`${source}_tokens`])),
    ...[record.queue_seconds, record.first_token_seconds, record.total_seconds].map(seconds),
    outcomeCell(record),
  );
  line.className = "decision";
  return line;
}

function outcomeCell(record) {
  if (record.outcome === "complete") return h("td", {}, "complete");
  return h("td", { class: "bad" }, `${record.outcome} (${record.status})`);
}

function sessionLink(record) {
  const id = record.client_session ?? record.session ?? record.request_id;
  return h("a", { href: `#sessions=${encodeURIComponent(id)}`, title: id }, id.length > 24 ? `${id.slice(0, 11)}…${id.slice(-11)}` : id);
}

function toggle(line, button, record, traceUrl) {
  const open = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!open));
  if (open) line.nextElementSibling.remove();
  else {
    const cell = h("td", { class: "details", colspan: COLUMNS.length }, inputs(record, traceUrl));
    line.after(h("tr", { class: "inputs" }, cell));
  }
}

function inputs(record, traceUrl) {
  const list = h("dl");
  for (const [name, value] of Object.entries(record)) {
    if (value === null || value === "" || (name === "trace" && traceUrl)) continue;
    const parts = typeof value === "object" ? Object.entries(value).map(([key, each]) => `${key} ${each}`) : [value];
    const text = parts.join(", ");
    list.append(h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, text || dash));
  }
  if (traceUrl && record.trace) {
    const link = h("a", { href: traceUrl.replace("{trace}", record.trace) }, record.trace);
    list.append(h("dt", {}, "trace"), h("dd", {}, link));
  }
  return list;
}

export function drawGrowth(element, state, records) {
  const turns = records.filter((record) => record.delta_tokens !== null && record.pool !== null);
  if (!turns.length) return replace(element, h("p", {}, "No turn has been routed yet."));
  const legend = POOLS.map((pool) => h("span", { class: pool }, `■ ${pool} `));
  const predicted = turns.filter((turn) => turn.outcome === "complete" && turn.pool in (turn.predicted_seconds ?? {}));
  replace(
    element,
    h("h2", {}, "Turns by ΔL"),
    h("p", {}, `${number(turns.length)} turns; `, ...legend),
    histogram(turns, state.thresholdTokens),
    h("h2", {}, "Shares"),
    shares(turns),
    h("h2", {}, "Predicted and actual duration"),
    predicted.length ? scatter(predicted.slice(-SHOWN_POINTS)) : h("p", {}, `The policy ${state.policy} predicts no durations.`),
  );
}

function histogram(turns, threshold) {
  const counts = BOUNDS.map(() => ({ speculative: 0, greedy: 0 }));
  const bucket = (tokens) => Math.max(0, BOUNDS.findIndex((bound, index) => tokens <= bound || index === BOUNDS.length - 1));
  for (const turn of turns) counts[bucket(turn.delta_tokens)][turn.pool] += 1;
  const largest = Math.max(...counts.map((count) => count.speculative + count.greedy));
  const [step, height] = [40, 180];
  const label = `Histogram of ΔL with τ = ${threshold ?? "infinite"}`;
  const viewBox = `0 0 ${step * BOUNDS.length + 20} ${height + 40}`;
  const drawing = s("svg", { viewBox, role: "img", "aria-label": label });
  counts.forEach((count, index) => {
    let top = height + 15;
    for (const pool of POOLS) {
      const size = (height * count[pool]) / largest;
      top -= size;
      const bar = s("rect", { x: index * step + 4, y: top, width: step - 8, height: size, class: pool });
      bar.append(s("title", {}, `ΔL up to ${BOUNDS[index]}: ${count[pool]} ${pool}`));
      drawing.append(bar);
    }
    const bound = BOUNDS[index] < 1024 ? BOUNDS[index] : `${BOUNDS[index] / 1024}k`;
    drawing.append(s("text", { x: index * step + step / 2, y: height + 30, "text-anchor": "middle" }, bound));
  });
  drawing.append(s("line", { x1: 0, x2: step * BOUNDS.length, y1: height + 15, y2: height + 15, class: "axis" }));
  if (threshold !== null) {
    const index = bucket(threshold);
    const from = index ? BOUNDS[index - 1] : 0;
    const x = step * (index + Math.min(1, BOUNDS[index] > from ? (threshold - from) / (BOUNDS[index] - from) : 1));
    drawing.append(s("line", { x1: x, x2: x, y1: 4, y2: height + 15, class: "threshold" }));
    drawing.append(s("text", { x: x + 5, y: 12, class: "threshold-label" }, `τ = ${threshold}`));
  }
  return drawing;
}

function shares(turns) {
  const counts = new Map();
  for (const { pool, reason } of turns) counts.set(`${pool} ${reason}`, (counts.get(`${pool} ${reason}`) ?? 0) + 1);
  const rows = [...counts].sort((a, b) => b[1] - a[1]).map(([key, count]) => {
    const [pool, reason] = key.split(" ");
    return row(poolCell(pool), reason, number(count), percent(count, turns.length));
  });
  return table("Shares", ["pool", "reason", "turns", "share"], rows);
}

function scatter(turns) {
  const size = 300;
  const durations = turns.map((turn) => [turn.predicted_seconds[turn.pool], turn.total_seconds]);
  const values = durations.flat().map((value) => Math.max(0.001, value));
  const [low, high] = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)) + 0.01)];
  const at = (value) => (size * (Math.min(high, Math.max(low, Math.log10(value))) - low)) / (high - low);
  const label = "Predicted duration (horizontal) and actual duration (vertical)";
  const drawing = s("svg", { class: "small", viewBox: `-60 -10 ${size + 75} ${size + 50}`, role: "img", "aria-label": label });
  drawing.append(s("line", { x1: 0, y1: size, x2: size, y2: 0, class: "axis" }));
  for (let power = low; power <= high; power++) {
    const value = 10 ** power;
    drawing.append(s("text", { x: at(value), y: size + 15, "text-anchor": "middle" }, seconds(value)));
    drawing.append(s("text", { x: -5, y: size - at(value), "text-anchor": "end" }, seconds(value)));
  }
  durations.forEach(([predicted, actual], index) => {
    drawing.append(s("circle", { cx: at(predicted), cy: size - at(actual), r: 2.5, class: turns[index].pool }));
  });
  drawing.append(s("text", { x: size / 2, y: size + 32, "text-anchor": "middle" }, "predicted (horizontal), actual (vertical)"));
  return drawing;
}

function bar(parts, largest) {
  const element = h("div", { class: "bar" });
  for (const [name, tokens] of parts) {
    const span = h("span", { class: name, title: `${name} ${number(tokens)}` });
    span.style.width = `${(100 * Math.max(0, tokens ?? 0)) / largest}%`;
    element.append(span);
  }
  return element;
}

const TURN_COLUMNS = ["turn", "time", "length", "L (ΔL)", "history", "pool", "reason", "tokens by source"];
TURN_COLUMNS.push("held / fetched / computed", "first token", "duration", "outcome");

export function drawTurns(element, session, turns) {
  if (!turns.length) {
    const stored = h("a", { href: `/sessions/${encodeURIComponent(session)}` }, "Stored record");
    return replace(element, h("p", {}, `This gateway has no decision of “${session}” in memory. `, stored));
  }
  const largest = Math.max(1, ...turns.map((turn) => turn.prompt_tokens ?? 0));
  const rows = turns.map((turn) => {
    const grown = turn.delta_tokens ?? turn.prompt_tokens ?? 0;
    const sources = SOURCES.map((source) => [source, turn[`${source}_tokens`]]);
    return row(
      number(turn.turn),
      clock(turn.time),
      h("td", {}, bar([["older", (turn.prompt_tokens ?? 0) - grown], ["grown", grown]], largest)),
      `${number(turn.prompt_tokens)} (+${number(turn.delta_tokens)})`,
      turn.changed ? `${turn.history} from message ${turn.changed.message} (${turn.changed.role ?? "role unknown"})` : turn.history,
      poolCell(turn.pool),
      turn.reason ?? dash,
      h("td", {}, bar(sources, largest)),
      sources.map(([, tokens]) => number(tokens)).join(" / "),
      ...[turn.first_token_seconds, turn.total_seconds].map(seconds),
      outcomeCell(turn),
    );
  });
  const id = turns[turns.length - 1].session;
  const tenant = encodeURIComponent(turns[0].tenant);
  const colors = [["older", "earlier prompt"], ["grown", "growth"], ...SOURCES.map((name) => [name, name])];
  const legend = h("p", { class: "legend" }, ...colors.map(([name, text]) => h("span", {}, h("i", { class: name }), text)));
  replace(
    element,
    h("h2", {}, `${turns.length} turns of ${session}`),
    legend,
    table("Turns", TURN_COLUMNS, rows),
    id ? h("p", {}, h("a", { href: `/sessions/${encodeURIComponent(id)}?tenant=${tenant}` }, "Stored record"), " (JSON)") : "",
  );
}

export function drawProgress(element, state, session) {
  const ids = (request) => [request.request_id, request.session, request.client_session];
  const found = state.inProgress.filter((request) => session === null || ids(request).includes(session));
  if (!found.length) return replace(element, h("p", {}, "No request is in progress."));
  const rows = found.map((each) => {
    const figures = [each.phase, seconds(each.seconds), number(each.prompt_tokens)];
    return row(sessionLink(each), ...figures, poolCell(each.pool), address(each.replica));
  });
  const columns = ["session", "phase", "since", "L", "pool", "replica"];
  replace(element, h("p", {}, `${found.length} shown of ${state.inProgressTotal}`), table("In progress", columns, rows));
}

const RESULTS = [
  ["whole batch", (report) => `${number(report.batch_seconds, 1)} s`],
  ["GPUs", (report) => number(report.gpus)],
  ["session latency, median", (report) => seconds(report.session_seconds.median)],
  ["session latency, p95", (report) => seconds(report.session_seconds.p95)],
  ["time to first token, median", (report) => seconds(report.time_to_first_token_seconds.median)],
  ["output tokens per second", (report) => number(report.tokens_per_second, 1)],
  ["speculative turns", (report) => percent(report.speculative_share, 1)],
  ["turns that changed pools", (report) => percent(report.moved_share, 1)],
];

export function drawResult(element, result) {
  if (result.error) return replace(element, h("p", { class: "bad" }, result.error));
  const rows = RESULTS.map(([name, of]) => row(h("th", { scope: "row" }, name), of(result.now), of(result.then)));
  replace(element, h("p", {}, `${number(result.turns)} turns`), table("Results", ["", "in force", "what if"], rows));
}

const REDIS = {
  none: "in memory only; no Redis is configured",
  ok: "Redis answers",
  degraded: "Redis is unavailable or rejects writes",
};

export function drawHealth(element, state) {
  const facts = {
    version: state.version,
    model: state.model,
    ready: state.draining ? "draining" : state.ready ? "yes" : "no",
    "session state": REDIS[state.redis],
    mirror: `${number(state.mirrorRecords)} records`,
    policy: `${state.policy}, τ = ${state.thresholdTokens ?? "infinite"}`,
    "configuration loaded": clock(state.configuredAt),
    "newest configuration": state.configError ?? "in force",
  };
  const bad = { "session state": state.redis === "degraded", "newest configuration": state.configError !== null, ready: !state.ready };
  const list = h("dl");
  for (const [name, text] of Object.entries(facts)) list.append(h("dt", {}, name), h("dd", { class: bad[name] ? "bad" : "" }, text));
  const links = ["config", "pools", "metrics"].map((name) => h("a", { href: `/${name}` }, `/${name}`));
  replace(element, h("h2", {}, "Health"), list, h("p", {}, ...links.flatMap((link) => [link, " "])));
}
