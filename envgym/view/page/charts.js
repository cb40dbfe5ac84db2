// Curves and small pictures.
import { h, num } from "./dom.js";
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

/** Curves over steps; those with an interval have it as a band. Returns the element and a way to give new data.
 * @param {string} title @param {import("./plot.js").Line[]} lines
 * @returns {{element: HTMLElement, set: (records: any[]) => void}} */
export function chart(title, lines) {
  const value = h("span", { class: "now" });
  /** @type {any[]} */
  let own = [];
  const curves = plot(lines, tell), element = h("figure", { class: "chart", hidden: true }, h("figcaption", null, h("span", null, title), value), curves.element);
  const names = lines.flatMap((line) => [line.name, ...(line.low && line.high ? [line.low, line.high] : [])]);
  /** The values of a step under the pointer, or the last ones. @param {number | null} at */
  function tell(at) {
    value.replaceChildren(at === null ? "" : h("span", { class: "at" }, `step ${num(own[at].step)} `), ...lines.map((line, n) => {
      const one = at === null ? own.filter((record) => typeof record[line.name] === "number").at(-1) || {} : own[at];
      const hasBand = at !== null && line.low && line.high && typeof one[line.low] === "number" && typeof one[line.high] === "number";
      const word = `${num(one[line.name])}${hasBand ? ` [${num(one[line.low || ""])}, ${num(one[line.high || ""])}]` : ""}`;
      return lines.length === 1 ? word : h("span", { class: "of", vars: { "--ink-of": `var(${INKS[n % INKS.length]})` } }, ` ${line.name} ${word}`);
    }));
  }
  return {
    element,
    set(records) {
      own = records.filter((record) => names.some((name) => typeof record[name] === "number"));
      element.hidden = own.length === 0;
      if (own.length) tell(null);
      curves.set(own.map((record) => record.step), Object.fromEntries(names.map((name) => [name, own.map((record) => (typeof record[name] === "number" ? record[name] : null))])));
    },
  };
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
