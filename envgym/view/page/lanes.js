// When the episodes of a step waited, were sampled, stepped and judged, above the step's phases.
import { ask, listOf } from "./api.js";
import { colour, h, link, num } from "./dom.js";

const KINDS = ["waiting", "generating", "environment", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint"];
const NAMES = /** @type {Record<string, string>} */ ({ rollout: "rolling out", score: "scoring", prepare: "preparing", learn: "learning", sync: "syncing", eval: "evaluating" });
const LANE = 14;

/** One episode's own lane. @param {string} id @param {number} step @param {string} name @returns {Promise<HTMLElement | null>} */
export async function strip(id, step, name) {
  const told = await ask("lanes", id, step);
  const one = told.episodes.find((/** @type {any} */ each) => each.episode === name);
  if (!one || !one.spans.length) return null;
  const low = Math.min(...one.spans.map((/** @type {any} */ span) => span[1])), whole = Math.max(...one.spans.map((/** @type {any} */ span) => span[2])) - low || 1;
  const sums = KINDS.map((kind) => [kind, one.spans.filter((/** @type {any} */ span) => span[0] === kind).reduce((/** @type {number} */ sum, /** @type {any} */ span) => sum + span[2] - span[1], 0)]).filter(([, seconds]) => Number(seconds) > 0);
  const words = sums.map(([kind, seconds]) => `${NAMES[String(kind)] || kind} ${num(seconds)} s`).join(", ");
  return h("div", { class: "strip", role: "img", "aria-label": words, title: words }, one.spans.map((/** @type {any} */ [kind, start, end]) =>
    h("i", { class: `p${KINDS.indexOf(kind)}`, vars: { "--x": `${((start - low) / whole) * 100}%`, "--w": `${Math.max(0.2, ((end - start) / whole) * 100)}%` } })));
}

/** @param {HTMLElement} main @param {string} id @param {number} step @returns {Promise<void>} */
export async function lanes(main, id, step) {
  const told = await ask("lanes", id, step);
  const every = await listOf(id, step, () => {}).catch(() => ({ columns: { id: [] } }));
  const place = new Map(every.columns.id.map((/** @type {string} */ name, /** @type {number} */ n) => [name, n]));
  const own = told.episodes.filter((/** @type {any} */ one) => one.spans.length);
  const bar = h("div", { class: "bar", role: "status" }, "point at a lane");
  const title = h("h1", null, `Step ${step}, in time`);
  const all = [...own.flatMap((/** @type {any} */ one) => one.spans), ...told.phases];
  if (!all.length) return main.replaceChildren(title, h("p", null, "No times were recorded for this step."));
  const low = all.reduce((least, span) => Math.min(least, span[1]), Infinity), high = all.reduce((most, span) => Math.max(most, span[2]), 0), whole = high - low || 1;
  const used = new Set(all.map((span) => span[0]));
  const legend = h("div", { class: "legend" }, KINDS.map((kind, n) => used.has(kind) ? h("span", null, h("i", { class: `p${n}` }), NAMES[kind] || kind) : ""));
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { class: "lanes", role: "img", "aria-label": `${own.length} episodes over ${num(whole)} seconds` }));
  main.replaceChildren(title, legend, bar, canvas);
  const lines = [told.phases, ...own.sort((/** @type {any} */ a, /** @type {any} */ b) => a.spans[0][1] - b.spans[0][1]).map((/** @type {any} */ one) => one.spans)];
  function paint() {
    const width = canvas.parentElement ? canvas.parentElement.clientWidth : 800, ratio = devicePixelRatio || 1, height = lines.length * LANE + 10;
    canvas.width = width * ratio;
    canvas.height = Math.min(height, 16000) * ratio;
    canvas.style.height = `${Math.min(height, 16000)}px`;
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.scale(ratio, ratio);
    const inks = KINDS.map((_, n) => colour(`--phase-${n}`));
    lines.forEach((spans, n) => spans.forEach((/** @type {any} */ [kind, start, end]) => {
      pen.fillStyle = inks[KINDS.indexOf(kind)] || colour("--quiet");
      pen.fillRect(((start - low) / whole) * width, n ? 6 + n * LANE : 0, Math.max(1, ((end - start) / whole) * width), n ? LANE - 4 : LANE + 2);
    }));
  }
  paint();
  const resize = new ResizeObserver(() => canvas.isConnected ? paint() : resize.disconnect());
  resize.observe(main);
  const at = (/** @type {MouseEvent} */ event) => Math.max(0, Math.floor((event.offsetY - 6) / LANE));
  canvas.addEventListener("pointermove", (event) => {
    const n = at(event), time = low + (event.offsetX / canvas.clientWidth) * whole;
    const span = (lines[n] || []).find((/** @type {any} */ one) => one[1] <= time && time <= one[2]);
    bar.textContent = `${n ? own[n - 1]?.episode ?? "" : "the run"}: ${span ? `${NAMES[span[0]] || span[0]} for ${num(span[2] - span[1])} s` : "nothing recorded"}, ${num(time - low)} s after the step began`;
  });
  canvas.addEventListener("click", (event) => {
    const one = own[at(event) - 1];
    if (one && place.has(one.episode)) location.hash = link("episode", id, step, /** @type {number} */ (place.get(one.episode)));
  });
}
