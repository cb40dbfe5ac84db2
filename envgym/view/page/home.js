// All runs, evaluations and files.
import { ask, isExport } from "./api.js";
import { spark } from "./charts.js";
import { ago, h, link, num, plain } from "./dom.js";

/** @param {HTMLElement} main @returns {Promise<() => void>} */
export async function home(main) {
  const body = h("tbody"), search = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name" });
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  /** @type {string[]} */
  let selected = [];
  /** @type {any[]} */
  let entries = [];
  function draw() {
    const filter = /** @type {HTMLInputElement} */ (search).value.toLowerCase();
    body.replaceChildren(...entries.filter((entry) => entry.id.toLowerCase().includes(filter)).map(row));
    compare.hidden = selected.length !== 2;
    if (selected.length === 2) compare.setAttribute("href", link("compare", selected[0], lastStep(selected[0]), selected[1], lastStep(selected[1])));
  }
  /** @param {string} id */
  const lastStep = (id) => { const entry = entries.find((candidate) => candidate.id === id); return entry.steps || 0; };
  /** @param {any} entry */
  function row(entry) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${entry.id}`, onchange: () => {
      selected = selected.includes(entry.id) ? selected.filter((id) => id !== entry.id) : [...selected.slice(-1), entry.id];
      draw();
    } });
    /** @type {HTMLInputElement} */ (box).checked = selected.includes(entry.id);
    const target = entry.kind === "run" ? link("run", entry.id) : link("list", entry.id, entry.steps || 0);
    const score = entry.kind === "evaluation" ? num(entry.after) : entry.after != null ? `${num(entry.before)} → ${num(entry.after)}` : "";
    const name = plain(entry.id, 300), error = entry.why && h("div", { class: "caption" }, plain(entry.why, 300));
    return h("tr", null, h("td", null, entry.files ? box : ""), h("td", { class: "name" }, entry.why ? [name, error] : h("a", { href: target }, name)), h("td", null, entry.kind),
      h("td", null, h("span", { class: `state ${entry.state}` }, entry.state)), h("td", { class: "n" }, entry.kind === "run" ? num(entry.steps) : ""),
      h("td", { class: "curve" }, entry.curve && entry.curve.length > 1 ? spark(entry.curve) : ""), h("td", { class: "n" }, score),
      h("td", { class: "n" }, entry.alarms ? h("span", { class: "alarm" }, `${entry.alarms}`) : ""), h("td", { class: "n" }, entry.changed ? ago(entry.changed) : ""));
  }
  const headings = ["", "name", "kind", "state", "steps", "curve", "score", "alerts", "changed"];
  search.addEventListener("input", draw);
  main.replaceChildren(h("h1", null, "Runs and evaluations"), h("div", { class: "tools" }, search, compare, h("span", { class: "hint" }, "select two to compare them")),
    h("div", { class: "wide" }, h("table", { class: "index" }, h("thead", null, h("tr", null, headings.map((name, n) => h("th", { class: n > 3 && n !== 5 ? "n" : null }, n ? name : h("span", { class: "unseen" }, "compare"))))), body)));
  let isOver = false;
  async function load() {
    entries = await ask("index");
    draw();
    if (!entries.length) body.replaceChildren(h("tr", null, h("td", { colspan: headings.length }, "No runs or evaluations yet: train or evaluate a model.")));
  }
  await load();
  if (isExport() && entries.length === 1) location.hash = entries[0].kind === "run" ? link("run", entries[0].id) : link("list", entries[0].id, 0);
  const timer = setInterval(() => { if (!isOver && !document.hidden && entries.some((entry) => entry.state === "running")) load().catch(() => {}); }, 3000);
  return () => { isOver = true; clearInterval(timer); };
}
