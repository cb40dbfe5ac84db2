// Charts: curves, sparklines and histograms.
import { h, num, plain } from "./dom.js";
import { INKS, plot } from "./plot.js";

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

/** An alert's step and sentence, with links to the step's episodes if they are recorded (`href`). @param {any} alarm @returns {any[]} */
export function alarmText(alarm) {
  const [before, ...after] = plain(alarm.text, 600).split("rollouts/"), anchor = (/** @type {string} */ text) => h("a", { href: alarm.href }, text);
  return [alarm.href ? anchor(`step ${alarm.step}`) : h("b", null, `step ${alarm.step}`), ` ${before}`, ...after.flatMap((text) => [alarm.href ? anchor("rollouts/") : "rollouts/", text])];
}

/** Curves over steps, with their intervals as bands. Returns the element and a function that sets the data.
 * @param {string} title @param {import("./plot.js").Line[]} lines @param {import("./plot.js").Axis} [axis] @param {boolean} [hasNames] if values have their lines' names
 * @returns {{element: HTMLElement, set: (records: any[], alarms?: any[]) => void}} */
export function chart(title, lines, axis, hasNames = true) {
  const value = h("span", { class: "now" });
  /** @type {any[]} */
  let plotted = [];
  const curves = plot(lines, showValues, axis), notes = h("ul", { class: "alarms" }), element = h("figure", { class: "chart", hidden: true }, h("figcaption", null, h("span", null, title), value), curves.element, notes);
  const names = lines.flatMap((line) => [line.name, ...(line.low && line.high ? [line.low, line.high] : [])]);
  /** Show the values of the step under the pointer, or the last ones. @param {number | null} index */
  function showValues(index) {
    value.replaceChildren(index === null ? "" : h("span", { class: "step-number" }, `step ${num(plotted[index].step)} `), ...lines.map((line, n) => {
      const record = index === null ? plotted.filter((candidate) => typeof candidate[line.name] === "number").at(-1) || {} : plotted[index];
      const hasBand = index !== null && line.low && line.high && typeof record[line.low] === "number" && typeof record[line.high] === "number";
      const text = `${num(record[line.name])}${hasBand ? ` [${num(record[line.low || ""])}, ${num(record[line.high || ""])}]` : ""}`;
      return lines.length === 1 ? text : h("span", { class: "line-value", vars: { "--line-ink": `var(${INKS[n % INKS.length]})` } }, hasNames ? ` ${line.name} ${text}` : ` ${text}`);
    }));
  }
  return {
    element,
    set(records, alarms = []) {
      plotted = records.filter((record) => names.some((name) => typeof record[name] === "number"));
      element.hidden = plotted.length === 0;
      notes.replaceChildren(...alarms.slice(-3).map((alarm) => h("li", null, alarmText(alarm))));
      curves.set(plotted.map((record) => record.step), Object.fromEntries(names.map((name) => [name, plotted.map((record) => (typeof record[name] === "number" ? record[name] : null))])), alarms.map((alarm) => alarm.step));
    },
  };
}

/** The rewards of a bar: from the first to the second number, without the second itself if the third is true. @typedef {[number, number, boolean]} Range */

/** @param {number | null} value @param {Range} range @returns {boolean} */
export function isWithin(value, [low, high, isOpen]) {
  return typeof value === "number" && value >= low && (isOpen ? value < high : value <= high);
}

/** @param {Range} range @returns {string} */
const rangeText = ([low, high, isOpen]) => `${num(low)} to ${isOpen ? "below " : ""}${num(high)}`;

/** A histogram with buttons as bars. @param {number[]} values @param {(range: Range | null) => void} onSelect
 * @param {Range | null} selected @returns {HTMLElement} */
export function histogram(values, onSelect, selected) {
  const numbers = values.filter((value) => typeof value === "number");
  if (!numbers.length) return h("div", { class: "bars" });
  let low = Infinity, high = -Infinity;
  for (const value of numbers) { low = Math.min(low, value); high = Math.max(high, value); }
  const distinct = new Set(numbers.length > 5000 ? numbers.slice(0, 5000) : numbers).size;
  const bins = Math.max(1, Math.min(24, distinct)), width = (high - low) / bins || 1;
  const edges = Array.from({ length: bins + 1 }, (_, n) => n === bins ? high : low + n * width);
  const ranges = edges.slice(1).map((edge, n) => /** @type {Range} */ ([edges[n], edge, n < bins - 1]));
  const counts = new Array(bins).fill(0);
  for (const value of numbers) {
    const near = Math.min(bins - 1, Math.floor((value - low) / width)); // rounded: at an edge it may be the bar beside
    counts[value < edges[near] ? near - 1 : near < bins - 1 && value >= edges[near + 1] ? near + 1 : near]++;
  }
  const maxCount = Math.max(...counts), shown = bins <= 8 ? edges : [edges[0], low + (high - low) / 2, high];
  return h("div", { class: "histogram", vars: { "--bins": bins } }, h("div", { class: "caption" }, `episodes by reward, at most ${num(maxCount)} in a bar `, selected && h("button", { type: "button", onclick: () => onSelect(null) }, `clear ${rangeText(selected)}`)), h("div", { class: "bars", role: "group", "aria-label": "Rewards" }, counts.map((count, n) => {
    const range = ranges[n];
    const isSelected = selected !== null && selected[0] === range[0];
    const label = `${rangeText(range)}: ${count} episodes`;
    return h("button", { type: "button", title: label, "aria-label": label, "aria-pressed": String(isSelected), disabled: count === 0, "data-count": bins <= 12 && count ? num(count) : null,
      vars: { "--h": `${Math.max(count ? 6 : 0, (count * 80) / maxCount)}%` }, onclick: () => onSelect(isSelected ? null : range) });
  })), h("div", { class: "axis" }, high > low ? shown.map((edge) => h("span", null, num(edge))) : h("span", null, num(low))));
}
