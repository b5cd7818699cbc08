// Draws what /events tells: each frame is the whole state, so a frame that is missed is no loss.
//
// The page holds no state of the server but the latest frame, and the rate of tokens over the last minute. It writes
// text as text only. scheduler/frame.py says what a frame holds.

const RATE_SECONDS = 2;      // a rate is that of the last frames within so long
const RATES_KEPT = 240;      // points of its curve
const STEPS_SHOWN = 96;
const SEQUENCES_SHOWN = 12;
const NAME_LENGTH = 10;      // in the table; the pointer over a cell tells names in full
const MIN_CELL = 4, MAX_CELL = 32;

const byId = (id) => document.getElementById(id);
const panels = new Map();    // by target
let rates = [];              // tokens per second, the oldest first
let samples = [];            // [seconds, tokens drawn by each target]
let chosen = null;           // the group of sequences under the pointer

// Colours.

const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const places = new Map();    // of the groups that are shown: the smallest numbers that were free when they came

function placeGroups(executors) {
  const groups = new Set(executors.flatMap((executor) => (executor.sequences ?? []).map((sequence) => sequence[GROUP])));
  places.forEach((_, group) => groups.has(group) || places.delete(group));
  const taken = new Set(places.values());
  let place = 0;
  for (const group of groups) {
    if (places.has(group)) continue;
    while (taken.has(place)) place++;
    taken.add(place);
    places.set(group, place);
  }
}

/** Of a group, for as long as it runs: hues by the golden angle, so that few groups differ as much as they can. */
function colour(group, alpha = 1) {
  const place = places.get(group) ?? 0;
  const lightness = (dark.matches ? 0.70 : 0.62) + ((place % 3) - 1) * 0.05;
  return `oklch(${lightness} 0.145 ${((255 + place * 137.508) % 360).toFixed(1)} / ${alpha})`;
}

// Frames.

class Frame {
  constructor(message, columns) {
    Object.assign(this, message);
    this.executors.forEach((executor, i) => Object.assign(executor, columns[i]));
  }
}

async function unpack(executor) {
  if (!executor.columns) return {};
  const packed = Uint8Array.from(atob(executor.columns), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new DataView(await new Response(stream).arrayBuffer());
  const n = executor.blocks;
  const short = (offset) => Uint16Array.from({ length: n }, (_, i) => bytes.getUint16(offset + 2 * i, true));
  return { holders: short(0), refs: short(2 * n), filled: new Uint8Array(bytes.buffer, 4 * n, n) };
}

const [ID, GROUP, PRIORITY, PROMPT, TOKENS, COMPUTED, CACHED, BLOCKS, PREEMPTIONS, INDEX, REQUEST, TENANT] = Array(12).keys();
const [STEP, DECODES, PREFILLS, PREFILL_TOKENS, ADMITTED, PREEMPTED, COPIES, SECONDS] = Array(8).keys();

const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function nameOf(sequence, sequences, length = Infinity) {
  const siblings = sequences.some((other) => other[GROUP] === sequence[GROUP] && other[ID] !== sequence[ID]);
  const name = sequence[REQUEST] ? `${cut(sequence[TENANT], length)} / ${cut(sequence[REQUEST], length)}` : `#${sequence[GROUP]}`;
  return siblings ? `${name}, output ${sequence[INDEX] + 1}` : name;
}

// Drawing.

const number = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** A context in CSS pixels, cleared, of a canvas as large as it is shown. */
function pen(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth, scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

function bars(canvas, values, fill) {
  const [context, width, height] = pen(canvas);
  const step = width / STEPS_SHOWN, most = Math.max(1, ...values.filter(Number.isFinite));
  context.fillStyle = css("--line");
  context.fillRect(0, height - 1, width, 1);
  context.fillStyle = fill;
  values.forEach((value, i) => {
    if (!value) return;
    const size = Math.max(2, (value / most) * (height - 1));
    context.fillRect((STEPS_SHOWN - values.length + i) * step, height - size, Math.max(1, step - 1), size);
  });
}

function curve(canvas, values) {
  const [context, width, height] = pen(canvas);
  if (values.length < 2) return;
  const most = Math.max(1, ...values), step = width / (RATES_KEPT - 1);
  const at = (i) => [width - (values.length - 1 - i) * step, height - 1.5 - (values[i] / most) * (height - 4)];
  context.beginPath();
  values.forEach((_, i) => context.lineTo(...at(i)));
  context.strokeStyle = css("--decode");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(at(0)[0], height);
  context.globalAlpha = 0.12;
  context.fillStyle = css("--decode");
  context.fill();
  context.globalAlpha = 1;
}

/** How cells are laid out: row by row, in the order of block ids, the null block left out. */
function layout(canvas, cells) {
  const width = canvas.clientWidth, height = Math.max(260, innerHeight * 0.62);
  let size = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(Math.sqrt((width * height) / cells))));
  while (size > MIN_CELL && Math.ceil(cells / Math.floor(width / size)) * size > height) size--;
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, gap: size >= 14 ? 3 : size >= 8 ? 2 : 1, height: Math.ceil(cells / columns) * size };
}

function drawGrid(panel) {
  const { canvas, executor } = panel;
  const cells = executor.blocks - 1;
  const { size, columns, gap, height } = (panel.layout = layout(canvas, cells));
  canvas.style.height = `${height}px`;
  Object.assign(canvas.dataset, { cells, columns, size, gap });
  const [context] = pen(canvas, height);
  const box = size - gap, radius = size >= 10 ? Math.min(3, box / 5) : 0;
  const colours = { free: css("--free"), cached: css("--cached"), ink: css("--ink") };
  context.font = `600 ${Math.max(9, Math.round(box * 0.55))}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let id = 1; id <= cells; id++) {
    const x = ((id - 1) % columns) * size, y = Math.floor((id - 1) / columns) * size;
    const holder = executor.holders[id], refs = executor.refs[id];
    context.beginPath();
    context.roundRect(x, y, box, box, radius);
    if (!holder) {
      context.fillStyle = colours.free;
      context.fill();
      if (executor.filled[id]) {  // ring
        const edge = size >= 14 ? 2 : 1;
        context.beginPath();
        context.roundRect(x + edge / 2, y + edge / 2, box - edge, box - edge, radius);
        context.strokeStyle = colours.cached;
        context.lineWidth = edge;
        context.stroke();
      }
      continue;
    }
    const group = executor.sequences[holder - 1][GROUP];
    const strength = chosen === null || chosen === group ? 1 : 0.22;
    context.fillStyle = colour(group, 0.24 * strength);
    context.fill();
    const level = Math.round((box * executor.filled[id]) / executor.blockSize);
    context.save();
    context.clip();
    context.fillStyle = colour(group, strength);
    context.fillRect(x, y + box - level, box, level);
    context.restore();
    if (refs > 1) drawShared(context, x, y, box, radius, refs, colours.ink, strength);
  }
}

function drawShared(context, x, y, box, radius, refs, ink, strength) {
  const edge = box >= 10 ? 2 : 1;
  context.globalAlpha = strength;
  context.beginPath();
  context.roundRect(x + edge / 2, y + edge / 2, box - edge, box - edge, radius);
  context.strokeStyle = ink;
  context.lineWidth = edge;
  context.stroke();
  if (box >= 14) {
    context.fillStyle = dark.matches ? "#101214" : "#fff";
    context.fillText(refs > 99 ? "∞" : refs, x + box / 2, y + box / 2 + 0.5);
  }
  context.globalAlpha = 1;
}

// One executor.

function cell(text, className) {
  const td = document.createElement("td");
  td.textContent = text;
  if (className) td.className = className;
  return td;
}

function makePanel(target) {
  const root = byId("executor").content.firstElementChild.cloneNode(true);
  const find = (selector) => root.querySelector(selector);
  const panel = { root, find, canvas: find("canvas.grid"), executor: null };
  find(".target").textContent = target;
  panel.canvas.addEventListener("pointermove", (event) => point(panel, event));
  panel.canvas.addEventListener("pointerleave", () => choose(null));
  byId("executors").append(root);
  return panel;
}

function point(panel, event) {
  const { executor, layout: { size, columns } } = panel;
  const column = Math.floor(event.offsetX / size), id = 1 + column + columns * Math.floor(event.offsetY / size);
  if (column >= columns || id >= executor.blocks) return choose(null);
  const sequence = executor.sequences[executor.holders[id] - 1];
  const lines = [`block ${id}`];
  if (sequence) {
    lines[0] += `: ${executor.filled[id]} of ${executor.blockSize} slots filled`;
    lines.push(nameOf(sequence, executor.sequences));
    lines.push(`${sequence[COMPUTED]} of ${sequence[TOKENS]} tokens in ${sequence[BLOCKS]} blocks`);
    if (executor.refs[id] > 1) lines.push(`shared by ${executor.refs[id]} sequences`);
  } else lines.push(executor.filled[id] ? "free; its prefix can still be found" : "free");
  choose(sequence ? sequence[GROUP] : null, lines.join("\n"), event);
}

function choose(group, text, event) {
  const tip = byId("tip");
  tip.hidden = !text;
  if (text) {
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }
  if (group === chosen) return;
  chosen = group;
  panels.forEach((panel) => panel.executor?.blocks && (drawGrid(panel), drawSequences(panel)));
}

function drawSequences({ find, executor }) {
  const { sequences } = executor;
  find(".sequences tbody").replaceChildren(...sequences.slice(0, SEQUENCES_SHOWN).map((sequence) => {
    const row = document.createElement("tr"), swatch = cell("", "swatch"), mark = document.createElement("i");
    mark.style.background = colour(sequence[GROUP]);
    swatch.append(mark);
    row.classList.toggle("on", sequence[GROUP] === chosen);
    const computed = Math.min(sequence[COMPUTED], sequence[PROMPT]);
    row.append(
      swatch,
      cell(nameOf(sequence, sequences, NAME_LENGTH) + (sequence[PREEMPTIONS] ? ` (preempted ${sequence[PREEMPTIONS]}×)` : "")),
      cell(computed < sequence[PROMPT] ? `${computed} of ${sequence[PROMPT]}` : sequence[PROMPT], "number"),
      cell(sequence[CACHED] || "–", "number"),
      cell(sequence[TOKENS] - sequence[PROMPT], "number"),
      cell(sequence[BLOCKS], "number"),
    );
    row.addEventListener("pointerenter", () => choose(sequence[GROUP]));
    row.addEventListener("pointerleave", () => choose(null));
    return row;
  }));
  const more = sequences.length - SEQUENCES_SHOWN;
  find(".more").textContent = more > 0 ? `and ${more} more` : "";
}

function drawPanel(panel, executor) {
  const { root, find } = panel;
  panel.executor = executor;
  find(".state").textContent = executor.state;
  find(".reason").textContent = executor.reason;
  find(".reason").hidden = !executor.reason;
  root.classList.toggle("away", !executor.blocks);
  if (!executor.blocks) return;
  const { steps, sequences } = executor, cells = executor.blocks - 1, held = cells - executor.free;
  const cached = executor.filled.reduce((count, filled, id) => count + (filled > 0 && !executor.holders[id]), 0);
  find(".sizes").textContent =
    `${number(cells)} blocks of ${executor.blockSize} tokens: ${held} held, ${cached} cached, ${executor.free - cached} empty`;
  find(".seats").textContent =
    `${sequences.length} of ${executor.maxSeqs} seats, at most ${number(executor.maxTokens)} tokens a step`;
  panel.canvas.setAttribute("aria-label", `${held} of ${cells} blocks held by ${sequences.length} sequences`);
  const shown = steps.slice(-STEPS_SHOWN), last = steps.at(-1);
  const answered = steps.findLast((step) => step[SECONDS] !== null);
  const captions = root.querySelectorAll("figcaption b");
  captions[0].textContent = last ? number(last[PREFILL_TOKENS]) : "";
  captions[1].textContent = last ? number(last[DECODES]) : "";
  captions[2].textContent = answered ? number(answered[SECONDS] * 1000) : "";
  bars(find(".prefills"), shown.map((step) => step[PREFILL_TOKENS]), css("--prefill"));
  bars(find(".decodes"), shown.map((step) => step[DECODES]), css("--decode"));
  bars(find(".times"), shown.map((step) => step[SECONDS] * 1000), css("--time"));
  drawGrid(panel);
  drawSequences(panel);
}

// The whole page.

function drawTotals(frame) {
  const joined = frame.executors.filter((executor) => executor.blocks);
  const sum = (of) => joined.reduce((total, executor) => total + of(executor), 0);
  const blocks = sum((e) => e.blocks - 1), held = sum((e) => e.blocks - 1 - e.free);
  const shared = sum((e) => e.refs.reduce((count, refs) => count + (refs > 1), 0));
  byId("model").textContent = frame.model + (frame.draining ? " (draining)" : "");
  byId("rate").textContent = rates.length ? number(rates.at(-1)) : "–";
  byId("running").textContent = sum((e) => e.sequences.length);
  byId("waiting").textContent = frame.queue.length + sum((e) => e.waiting);
  byId("held").textContent = share(held, blocks);
  byId("shared").textContent = number(shared);
  byId("hits").textContent = share(sum((e) => e.prefix[0]), sum((e) => e.prefix[1]));
  curve(byId("rates"), rates);
}

function drawQueue({ queue }) {
  byId("queue").hidden = !queue.length;
  byId("queue-size").textContent =
    `${queue.length} of at most ${number(queue.limit)} requests, ${number(queue.tokens)} tokens of KV demand`;
  const named = queue.waiting.some(([, , tenant]) => tenant);
  byId("queue").querySelectorAll("th")[2].hidden = !named;
  byId("queue").querySelector("tbody").replaceChildren(...queue.waiting.map(([count, priority, tenant, reason]) => {
    const row = document.createElement("tr"), who = cell(tenant);
    who.hidden = !named;
    row.append(cell(count, "number"), cell(priority, "number"), who, cell(reason));
    return row;
  }));
}

/** Tokens per second of all executors; one that came meanwhile has drawn what it tells. */
function noteRate(frame) {
  const drawn = new Map(frame.executors.map((executor) => [executor.target, executor.sampled ?? 0]));
  samples.push([frame.seconds, drawn]);
  samples = samples.filter(([seconds]) => frame.seconds - seconds <= RATE_SECONDS);
  const [seconds, before] = samples[0];
  if (frame.seconds === seconds) return;
  let tokens = 0;
  drawn.forEach((now, target) => (tokens += Math.max(0, now - (before.get(target) ?? now))));
  rates = [...rates, tokens / (frame.seconds - seconds)].slice(-RATES_KEPT);
}

function draw(frame) {
  noteRate(frame);
  placeGroups(frame.executors);
  const targets = new Set(frame.executors.map((executor) => executor.target));
  panels.forEach((panel, target) => targets.has(target) || (panel.root.remove(), panels.delete(target)));
  for (const executor of frame.executors) {
    if (!panels.has(executor.target)) panels.set(executor.target, makePanel(executor.target));
    drawPanel(panels.get(executor.target), executor);
  }
  drawTotals(frame);
  drawQueue(frame);
  document.body.dataset.frames = Number(document.body.dataset.frames ?? 0) + 1;
}

// The stream: open only while somebody can see the page.

let source = null, latest = null, busy = false;

async function take(text) {
  latest = text;
  if (busy) return;
  busy = true;
  while (latest !== null) {
    const message = JSON.parse(latest);
    latest = null;
    const columns = await Promise.all(message.executors.map(unpack));
    draw(new Frame(message, columns));
  }
  busy = false;
}

function tell(state, words) {
  byId("status").textContent = words;
  byId("status").classList.toggle("live", state);
}

function open() {
  if (source || document.hidden) return;
  source = new EventSource("/events");
  source.onopen = () => tell(true, "live");
  source.onmessage = (event) => take(event.data);
  source.onerror = () => {
    tell(false, "no connection");
    if (source.readyState !== EventSource.CLOSED) return;  // else the browser tries again itself
    close();
    setTimeout(open, 5000);
  };
}

function close() {
  source?.close();
  source = null;
  samples = [];
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
const redraw = () => panels.forEach((panel) => panel.executor && drawPanel(panel, panel.executor));
addEventListener("resize", redraw);
dark.addEventListener("change", redraw);
open();
