// Curves and small pictures.
import { h, num } from "./dom.js";

/** @param {string} name @returns {string} */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A small curve without axes. @param {number[]} values @returns {Element} */
export function spark(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (values.length > 1) {
    const low = Math.min(...values), size = Math.max(...values) - low || 1;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", values.map((v, n) => `${(n * 100) / (values.length - 1)},${22 - ((v - low) / size) * 20}`).join(" "));
    svg.append(line);
  }
  return svg;
}

/** Curves over steps; those with an interval have it as a band. Returns the element and a way to give new data.
 * @param {string} title @param {{name: string, low?: string, high?: string, points?: boolean}[]} lines
 * @returns {{element: HTMLElement, set: (records: any[]) => void}} */
export function chart(title, lines) {
  const value = h("span", { class: "now" });
  const box = h("div", { class: "plot" });
  const element = h("figure", { class: "chart" }, h("figcaption", null, title, value), box);
  /** @type {any} */
  let plot = null;
  const inks = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];
  const names = lines.flatMap((line) => [line.name, ...(line.low && line.high ? [line.low, line.high] : [])]);
  const series = names.map((name) => {
    const number = lines.findIndex((line) => [line.name, line.low, line.high].includes(name));
    const isEdge = lines[number].name !== name;
    const points = { show: Boolean(lines[number].points) && !isEdge, size: 5 };
    return { label: name, stroke: isEdge ? "transparent" : () => colour(inks[number % inks.length]), width: 1.5, spanGaps: true, points };
  });
  const bands = lines.filter((line) => line.low && line.high).map((line) => ({
    series: [names.indexOf(/** @type {string} */ (line.high)) + 1, names.indexOf(/** @type {string} */ (line.low)) + 1],
    fill: () => colour("--band"),
  }));
  const axis = { stroke: () => colour("--quiet"), grid: { stroke: () => colour("--rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const size = () => ({ width: Math.max(160, box.clientWidth), height: 130 });
  new ResizeObserver(() => plot && plot.setSize(size())).observe(box);
  return {
    element,
    set(records) {
      const own = records.filter((record) => names.some((name) => typeof record[name] === "number"));
      const data = [own.map((record) => record.step), ...names.map((name) => own.map((record) => record[name] ?? null))];
      const last = own.length ? own[own.length - 1][lines[0].name] : null;
      value.textContent = lines.length === 1 && typeof last === "number" ? num(last) : "";
      element.hidden = own.length === 0;
      if (plot) return plot.setData(data);
      if (!own.length) return;
      requestAnimationFrame(() => {
        // @ts-ignore uPlot is a script of its own
        plot = new uPlot({
          ...size(), series: [{ label: "step" }, ...series], bands, legend: { show: lines.length > 1, live: false },
          axes: [{ ...axis, size: 22 }, { ...axis, size: 50, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => short(tick)) }], scales: { x: { time: false } }, cursor: { y: false },
        }, data, box);
      });
    },
  };
}

/** A number beside an axis. @param {number} tick @returns {string} */
function short(tick) {
  const size = Math.abs(tick);
  if (size >= 1e6 || (size && size < 1e-3)) return tick.toExponential(0).replace("e+", "e");
  return size >= 1e4 ? `${tick / 1e3}k` : String(Number(tick.toPrecision(4)));
}

/** A histogram whose bars are buttons. @param {number[]} values @param {(range: [number, number] | null) => void} onPick
 * @param {[number, number] | null} picked @returns {HTMLElement} */
export function histogram(values, onPick, picked) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return h("div", { class: "bars" });
  let low = Infinity, high = -Infinity;
  for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
  const distinct = new Set(known.length > 5000 ? known.slice(0, 5000) : known).size;
  const bins = Math.max(1, Math.min(24, distinct)), width = (high - low) / bins || 1;
  const counts = new Array(bins).fill(0);
  for (const value of known) counts[Math.min(bins - 1, Math.floor((value - low) / width))]++;
  const most = Math.max(...counts);
  return h("div", { class: "bars", role: "group", "aria-label": "Rewards" }, counts.map((count, n) => {
    /** @type {[number, number]} */
    const range = [low + n * width, n === bins - 1 ? high : low + (n + 1) * width];
    const isPicked = picked !== null && picked[0] === range[0];
    const label = `${num(range[0])} to ${num(range[1])}: ${count} episodes`;
    return h("button", { type: "button", title: label, "aria-label": label, "aria-pressed": String(isPicked), disabled: count === 0,
      vars: { "--h": `${Math.max(count ? 6 : 0, (count * 100) / most)}%` }, onclick: () => onPick(isPicked ? null : range) });
  }));
}
