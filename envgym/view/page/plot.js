// Curves on a canvas: lines over steps, with bands, points, ticks and a cursor.
import { color, h, num } from "./dom.js";

/** A line over the steps; `low` and `high` are the names of its band's edges.
 * @typedef {{name: string, low?: string, high?: string, points?: boolean}} Line */

const TOP = 12, BOTTOM = 22, RIGHT = 12, FONT = "11px system-ui, sans-serif";
export const INKS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

/** @type {Record<string, string>} */
let inks = {};
/** Colors of the page's current theme, cached: each lookup makes the browser compute the layout again. */
function currentInks() {
  const theme = document.documentElement.dataset.theme || "";
  if (inks.theme !== theme) inks = Object.fromEntries([["theme", theme], ...["--rule", "--quiet", "--band", "--raised", "--warn", ...INKS].map((name) => [name, color(name)])]);
  return inks;
}

/** About `count` ticks between two numbers, and their distance: 1, 2 or 5 times a power of ten, at least `minStep`.
 * @param {number} low @param {number} high @param {number} count @param {number} [minStep] @returns {[number[], number]} */
export function ticks(low, high, count, minStep = 0) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(minStep, power * ([1, 2, 5].find((n) => n * power >= rough * (1 - 1e-9)) || 10));
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) values.push(n * step);
  return values.length < 2 && step > minStep && count < 32 ? ticks(low, high, 2 * count, minStep) : [values, step];
}

/** The text of a tick, for ticks at a distance of `step`. @param {number} tick @param {number} step @returns {string} */
export function label(tick, step) {
  const size = Math.abs(tick), power = Math.floor(Math.log10(step) + 1e-9);
  if (size < step / 2) return "0";
  if (size >= 1e6 || step < 1e-4) return tick.toExponential(Math.max(0, Math.floor(Math.log10(size) + 1e-9) - power)).replace("e+", "e").replaceAll("-", "−");
  if (step >= 1e3) return `${(tick / 1e3).toFixed(0)}k`.replace("-", "−");
  return tick.toFixed(Math.max(0, -power)).replace("-", "−");
}

/** The range of an axis: the numbers with a margin, also around a single number.
 * @param {number} low @param {number} high @returns {[number, number]} */
function range(low, high) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low > size * 1e-9) return [low - (high - low) * 0.06, high + (high - low) * 0.06];
  return size ? [low - size / 2, high + size / 2] : [0, 1];
}

/** The points of a line. A dense line has one point per column of pixels: sum and count for the mean, and a range that
 * reaches to the last value of the previous column.
 * @param {number[]} xs @param {(number | null)[]} ys @param {(x: number) => number} position @param {number} width */
function linePoints(xs, ys, position, width) {
  const points = [], isDense = xs.length > 2 * width;
  /** @type {{x: number, low: number, high: number, last: number, sum: number, count: number} | null} */
  let last = null;
  let lastColumn = -1;
  for (let n = 0; n < xs.length; n++) {
    const y = ys[n];
    if (typeof y !== "number") continue;
    const x = position(xs[n]), column = isDense ? Math.round(x) : n;
    if (last === null || column !== lastColumn) {
      /** @type {number} */
      const previous = isDense && last !== null ? last.last : y;
      points.push(last = { x, low: Math.min(y, previous), high: Math.max(y, previous), last: y, sum: y, count: 1 });
    } else {
      if (y < last.low) last.low = y;
      if (y > last.high) last.high = y;
      last.last = y;
      last.sum += y;
      last.count++;
    }
    lastColumn = column;
  }
  return points;
}

/** What plots share: a cursor at a step, the range of steps that they show, null for all, and what a click on a step does.
 * @typedef {{range: [number, number] | null, pick?: (step: number, name: string) => void, members: {point: (x: number | null) => void, zoom: () => void}[], point: (x: number | null) => void, zoom: (range: [number, number] | null) => void}} Axis */

/** @param {(range: [number, number] | null) => void} [onZoom] @returns {Axis} */
export function sharedAxis(onZoom) {
  /** @type {Axis} */
  const axis = { range: null, members: [], point: (x) => axis.members.forEach((member) => member.point(x)),
    zoom(chosen) { axis.range = chosen; onZoom?.(chosen); axis.members.forEach((member) => member.zoom()); } };
  return axis;
}

/** A canvas that shows lines; dragging over it zooms. `onPoint` is called with the number of the record under the
 * pointer, or null. Dashed lines are at the steps of `marks`.
 * @param {Line[]} lines @param {(n: number | null) => void} onPoint @param {Axis} [axis]
 * @returns {{element: HTMLElement, set: (xs: number[], data: Record<string, (number | null)[]>, marks?: number[]) => void}} */
export function plot(lines, onPoint, axis = sharedAxis()) {
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { role: "img" })), mark = h("div", { class: "mark", hidden: true }, h("i")), drag = h("div", { class: "drag", hidden: true });
  const element = h("div", { class: "plot" }, canvas, mark, drag);
  /** @type {[number[], Record<string, (number | null)[]>, number[]]} */
  let all = [[], {}, []];
  let offset = 0, dragStart = -1, pointed = -1;
  const names = lines.flatMap((line) => [line.name, line.low, line.high]);
  let width = 0, height = 0, left = 0, isDue = false;
  /** @type {number[]} */
  let xs = [];
  /** @type {Record<string, (number | null)[]>} */
  let data = {};
  let low = 0, high = 1, first = 0, end = 1;
  const stepAt = (/** @type {number} */ clientX) => first + ((clientX - canvas.getBoundingClientRect().left - left) / (width - left - RIGHT)) * (end - first);
  const placeX = (/** @type {number} */ x) => left + ((x - first) / (end - first)) * (width - left - RIGHT);
  const placeY = (/** @type {number} */ y) => TOP + ((high - y) / (high - low)) * (height - TOP - BOTTOM);

  function measure() {
    low = Infinity, high = -Infinity;
    for (const name of names) for (const y of (name && data[name]) || []) if (typeof y === "number") { if (y < low) low = y; if (y > high) high = y; }
    [low, high] = range(low, high);
    [first, end] = xs[0] < xs[xs.length - 1] ? [xs[0], xs[xs.length - 1]] : [xs[0] - 1, xs[0] + 1];
    const last = data[lines[0].name].filter((y) => y !== null).at(-1);
    canvas.setAttribute("aria-label", `${lines.map((line) => line.name).join(", ")} over steps ${xs[0]} to ${xs[xs.length - 1]}, last ${num(last)}${all[2].length ? `, alerts at ${all[2].join(", ")}` : ""}`);
  }

  /** Take the records in the range of steps that is shown. */
  function select() {
    const [[allXs, allData], range] = [all, axis.range];
    [xs, data, offset] = [allXs, allData, 0];
    if (range) {
      offset = allXs.findIndex((x) => x >= range[0]);
      const stop = allXs.findLastIndex((x) => x <= range[1]) + 1;
      xs = offset < 0 ? [] : allXs.slice(offset, stop);
      data = Object.fromEntries(Object.entries(allData).map(([name, values]) => [name, values.slice(offset, stop)]));
    }
    showPoint(null);
    if (xs.length) measure();
    if (!isDue) { isDue = true; requestAnimationFrame(draw); }
  }

  function draw() {
    isDue = false;
    if (!width) return;
    if (!xs.length) { canvas.width = 0; return; }
    const ink = currentInks(), ratio = devicePixelRatio || 1, pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.scale(ratio, ratio);
    pen.font = FONT;
    pen.lineWidth = 1;
    pen.strokeStyle = ink["--rule"];
    pen.fillStyle = ink["--quiet"];
    const [rows, rowStep] = ticks(low, high, Math.floor((height - TOP - BOTTOM) / 26)), labels = rows.map((tick) => label(tick, rowStep));
    left = Math.ceil(Math.max(24, ...labels.map((text) => pen.measureText(text).width))) + 8;
    const spacing = pen.measureText(label(end, 1)).width + 26;
    const [steps, stepSize] = ticks(first, end, Math.floor((width - left - RIGHT) / spacing), 1);
    pen.beginPath();
    for (const tick of rows) { const y = Math.round(placeY(tick)) + 0.5; pen.moveTo(left, y); pen.lineTo(width - RIGHT, y); }
    for (const tick of steps) { const x = Math.round(placeX(tick)) + 0.5; pen.moveTo(x, TOP); pen.lineTo(x, height - BOTTOM); }
    pen.stroke();
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    rows.forEach((tick, n) => pen.fillText(labels[n], left - 6, placeY(tick)));
    pen.textAlign = "center";
    pen.textBaseline = "bottom";
    for (const tick of steps) {
      const text = label(tick, stepSize), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(placeX(tick), width - half), height - 2);
    }
    pen.strokeStyle = ink["--warn"];
    pen.setLineDash([4, 3]);
    pen.beginPath();
    for (const x of all[2]) if (x >= first && x <= end) { pen.moveTo(placeX(x), TOP); pen.lineTo(placeX(x), height - BOTTOM); }
    pen.stroke();
    pen.setLineDash([]);
    lines.forEach((line, n) => {
      if (line.low && line.high) band(pen, linePoints(xs, data[line.low], placeX, width), linePoints(xs, data[line.high], placeX, width), ink["--band"]);
      curve(pen, linePoints(xs, data[line.name], placeX, width), ink[INKS[n % INKS.length]], Boolean(line.points));
    });
  }

  /** @param {CanvasRenderingContext2D} pen @param {{x: number, low: number}[]} below @param {{x: number, high: number}[]} above
   * @param {string} ink */
  function band(pen, below, above, ink) {
    pen.fillStyle = ink;
    pen.beginPath();
    for (const point of above) pen.lineTo(point.x, placeY(point.high));
    for (let n = below.length - 1; n >= 0; n--) pen.lineTo(below[n].x, placeY(below[n].low));
    pen.fill();
  }

  /** @param {CanvasRenderingContext2D} pen @param {ReturnType<typeof linePoints>} points @param {string} ink @param {boolean} hasPoints */
  function curve(pen, points, ink, hasPoints) {
    if (xs.length > 2 * width) { // drawn from value to value, a dense line would be a solid block, and slow
      pen.globalAlpha = 0.3;
      band(pen, points, points, ink);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    pen.lineJoin = "round";
    pen.beginPath();
    for (const point of points) pen.lineTo(point.x, placeY(point.sum / point.count));
    pen.stroke();
    pen.fillStyle = inks["--raised"];
    for (const point of hasPoints || points.length === 1 ? points : []) {
      pen.beginPath();
      pen.arc(point.x, placeY(point.last), 2.5, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
    }
  }

  /** Show the cursor at the record next to a step. @param {number | null} x */
  function showPoint(x) {
    mark.hidden = x === null || !xs.length;
    if (x === null || !xs.length) return onPoint(null);
    let n = 0, upper = xs.length - 1;
    while (n < upper) { const middle = (n + upper) >> 1; if (xs[middle] < x) n = middle + 1; else upper = middle; }
    if (n && x - xs[n - 1] < xs[n] - x) n--;
    const y = data[lines[0].name][n];
    mark.style.setProperty("--x", `${placeX(xs[n])}px`);
    mark.style.setProperty("--y", y === null ? "-99px" : `${placeY(y)}px`);
    onPoint((pointed = n) + offset);
  }
  const xOf = (/** @type {PointerEvent} */ event) => event.clientX - canvas.getBoundingClientRect().left;
  element.addEventListener("pointermove", (event) => {
    axis.point(stepAt(event.clientX));
    if (dragStart < 0) return;
    drag.hidden = Math.abs(xOf(event) - dragStart) < 8;
    drag.style.setProperty("--x", `${Math.min(xOf(event), dragStart)}px`);
    drag.style.setProperty("--w", `${Math.abs(xOf(event) - dragStart)}px`);
  });
  element.addEventListener("pointerdown", (event) => { dragStart = xOf(event); element.setPointerCapture(event.pointerId); });
  element.addEventListener("pointerup", (event) => {
    const from = first + ((dragStart - left) / (width - left - RIGHT)) * (end - first), to = stepAt(event.clientX);
    if (!drag.hidden) axis.zoom([Math.round(Math.min(from, to)), Math.round(Math.max(from, to))]);
    else if (dragStart >= 0 && pointed in xs) axis.pick?.(xs[pointed], lines[0].name);
    drag.hidden = true;
    dragStart = -1;
  });
  element.addEventListener("pointercancel", () => { drag.hidden = true; dragStart = -1; });
  element.addEventListener("dblclick", () => axis.zoom(null));
  element.addEventListener("pointerleave", () => axis.point(null));
  axis.members.push({ point: showPoint, zoom: select });
  new ResizeObserver(([entry]) => { ({ width, height } = entry.contentRect); draw(); }).observe(element);
  return {
    element,
    set(newXs, newData, marks = []) {
      all = [newXs, newData, marks];
      if (newXs.length) select();
    },
  };
}
