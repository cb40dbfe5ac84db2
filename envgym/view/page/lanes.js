// Swimlanes: when each episode of a step waited, was sampled, stepped and scored with its group, and the step's phases.
import { ask, listOf } from "./api.js";
import { color, h, link, num } from "./dom.js";
import { label, ticks } from "./plot.js";

const KINDS = ["waiting", "generating", "environment", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint"];
const NAMES = /** @type {Record<string, string>} */ ({ rollout: "rolling out", score: "scoring", prepare: "preparing", learn: "training", sync: "syncing", eval: "evaluating" });
const LANE = 14, AXIS = 18;

/** The lane of one episode. @param {string} id @param {number} step @param {string} name @returns {Promise<HTMLElement | null>} */
export async function strip(id, step, name) {
  const times = await ask("lanes", id, step);
  const lane = times.episodes.find((/** @type {any} */ candidate) => candidate.episode === name);
  if (!lane || !lane.spans.length) return null;
  const low = Math.min(...lane.spans.map((/** @type {any} */ span) => span[1])), duration = Math.max(...lane.spans.map((/** @type {any} */ span) => span[2])) - low || 1;
  const sums = KINDS.map((kind) => [kind, lane.spans.filter((/** @type {any} */ span) => span[0] === kind).reduce((/** @type {number} */ sum, /** @type {any} */ span) => sum + span[2] - span[1], 0)]).filter(([, seconds]) => Number(seconds) > 0);
  const text = sums.map(([kind, seconds]) => `${NAMES[String(kind)] || kind} ${num(seconds)} s`).join(", ");
  return h("div", null, h("div", { class: "strip", role: "img", "aria-label": text, title: text }, lane.spans.map((/** @type {any} */ [kind, start, end]) =>
    h("i", { class: `p${KINDS.indexOf(kind)}`, vars: { "--x": `${((start - low) / duration) * 100}%`, "--w": `${Math.max(0.2, ((end - start) / duration) * 100)}%` } }))), h("div", { class: "legend caption" }, sums.map(([kind, seconds]) => h("span", null, h("i", { class: `p${KINDS.indexOf(String(kind))}` }), `${NAMES[String(kind)] || kind} ${num(seconds)} s`))));
}

/** @param {HTMLElement} main @param {string} id @param {number} step @returns {Promise<void>} */
export async function lanes(main, id, step) {
  const times = await ask("lanes", id, step);
  const listing = await listOf(id, step, () => {}).catch(() => ({ columns: { id: [] } }));
  const indexOf = new Map(listing.columns.id.map((/** @type {string} */ name, /** @type {number} */ n) => [name, n]));
  const timed = times.episodes.filter((/** @type {any} */ lane) => lane.spans.length);
  const bar = h("div", { class: "bar", role: "status" }, "point at a lane");
  const title = h("h1", null, `Step ${step}: swimlanes`);
  const spans = [...timed.flatMap((/** @type {any} */ lane) => lane.spans), ...times.phases];
  if (!spans.length) return main.replaceChildren(title, h("p", null, "No times were recorded for this step."));
  const low = spans.reduce((min, span) => Math.min(min, span[1]), Infinity), high = spans.reduce((max, span) => Math.max(max, span[2]), 0), duration = high - low || 1;
  const used = new Set(spans.map((span) => span[0]));
  const legend = h("div", { class: "legend" }, KINDS.map((kind, n) => used.has(kind) ? h("span", null, h("i", { class: `p${n}` }), NAMES[kind] || kind) : ""));
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { class: "lanes", role: "img", "aria-label": `${timed.length} episodes over ${num(duration)} seconds` }));
  main.replaceChildren(title, legend, bar, canvas);
  const lines = [times.phases, ...timed.sort((/** @type {any} */ a, /** @type {any} */ b) => a.spans[0][1] - b.spans[0][1]).map((/** @type {any} */ lane) => lane.spans)];
  function paint() {
    const width = canvas.parentElement ? canvas.parentElement.clientWidth : 800, ratio = devicePixelRatio || 1, height = lines.length * LANE + 10 + AXIS;
    canvas.width = width * ratio;
    canvas.height = Math.min(height, 16000) * ratio;
    canvas.style.height = `${Math.min(height, 16000)}px`;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.scale(ratio, ratio);
    const inks = KINDS.map((_, n) => color(`--phase-${n}`));
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = pen.strokeStyle = color("--quiet");
    const [seconds, distance] = ticks(0, duration, Math.max(2, Math.floor(width / 90)));
    for (const tick of seconds) {
      const text = `${label(tick, distance)} s`, x = (tick / duration) * width;
      pen.fillText(text, Math.min(x + 3, width - pen.measureText(text).width), 11);
      pen.fillRect(x, 0, 1, AXIS - 2);
    }
    pen.translate(0, AXIS);
    lines.forEach((line, n) => line.forEach((/** @type {any} */ [kind, start, end]) => {
      pen.fillStyle = inks[KINDS.indexOf(kind)] || color("--quiet");
      pen.fillRect(((start - low) / duration) * width, n ? 6 + n * LANE : 0, Math.max(1, ((end - start) / duration) * width), n ? LANE - 4 : LANE + 2);
    }));
  }
  paint();
  const resize = new ResizeObserver(() => canvas.isConnected ? paint() : resize.disconnect());
  resize.observe(main);
  const lineAt = (/** @type {MouseEvent} */ event) => Math.max(0, Math.floor((event.offsetY - AXIS - 6) / LANE));
  canvas.addEventListener("pointermove", (event) => {
    const n = lineAt(event), time = low + (event.offsetX / canvas.clientWidth) * duration;
    const span = (lines[n] || []).find((/** @type {any} */ candidate) => candidate[1] <= time && time <= candidate[2]);
    bar.textContent = `${n ? timed[n - 1]?.episode ?? "" : "the run"}: ${span ? `${NAMES[span[0]] || span[0]} for ${num(span[2] - span[1])} s` : "nothing recorded"}, ${num(time - low)} s after the step began`;
  });
  canvas.addEventListener("click", (event) => {
    const lane = timed[lineAt(event) - 1];
    if (lane && indexOf.has(lane.episode)) location.hash = link("episode", id, step, /** @type {number} */ (indexOf.get(lane.episode)));
  });
}
