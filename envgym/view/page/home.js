// All runs, evaluations and files.
import { ask, isExport } from "./api.js";
import { spark } from "./charts.js";
import { ago, h, link, num, plain } from "./dom.js";

/** @param {HTMLElement} main @returns {Promise<() => void>} */
export async function home(main) {
  const body = h("tbody"), search = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name" });
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  /** @type {string[]} */
  let picked = [];
  /** @type {any[]} */
  let all = [];
  function draw() {
    const wanted = /** @type {HTMLInputElement} */ (search).value.toLowerCase();
    body.replaceChildren(...all.filter((one) => one.id.toLowerCase().includes(wanted)).map(row));
    compare.hidden = picked.length !== 2;
    if (picked.length === 2) compare.setAttribute("href", link("compare", picked[0], last(picked[0]), picked[1], last(picked[1])));
  }
  /** @param {string} id */
  const last = (id) => { const one = all.find((each) => each.id === id); return one.kind === "run" ? one.steps : 0; };
  /** @param {any} one */
  function row(one) {
    const box = h("input", { type: "checkbox", "aria-label": `Compare ${one.id}`, onchange: () => {
      picked = picked.includes(one.id) ? picked.filter((id) => id !== one.id) : [...picked.slice(-1), one.id];
      draw();
    } });
    /** @type {HTMLInputElement} */ (box).checked = picked.includes(one.id);
    const target = one.kind === "run" ? link("run", one.id) : link("list", one.id, 0);
    const score = one.kind === "evaluation" ? num(one.after) : one.after != null ? `${num(one.before)} → ${num(one.after)}` : "";
    const name = plain(one.id, 300), why = one.why && h("div", { class: "caption" }, plain(one.why, 300));
    return h("tr", null, h("td", null, one.files ? box : ""), h("td", { class: "name" }, one.why ? [name, why] : h("a", { href: target }, name)), h("td", null, one.kind),
      h("td", null, h("span", { class: `state ${one.state}` }, one.state)), h("td", { class: "n" }, one.kind === "run" ? num(one.steps) : ""),
      h("td", { class: "curve" }, one.curve && one.curve.length > 1 ? spark(one.curve) : ""), h("td", { class: "n" }, score),
      h("td", { class: "n" }, one.alarms ? h("span", { class: "alarm" }, `${one.alarms}`) : ""), h("td", { class: "n" }, one.changed ? ago(one.changed) : ""));
  }
  const heads = ["", "name", "kind", "state", "steps", "curve", "score", "alarms", "changed"];
  search.addEventListener("input", draw);
  main.replaceChildren(h("h1", null, "Runs and evaluations"), h("div", { class: "tools" }, search, compare, h("span", { class: "hint" }, "tick two to compare them")),
    h("div", { class: "wide" }, h("table", { class: "index" }, h("thead", null, h("tr", null, heads.map((name, n) => h("th", { class: n > 3 && n !== 5 ? "n" : null }, n ? name : h("span", { class: "unseen" }, "compare"))))), body)));
  let isOver = false;
  async function load() {
    all = await ask("index");
    draw();
    if (!all.length) body.replaceChildren(h("tr", null, h("td", { colspan: heads.length }, "Nothing here yet: train a run, or evaluate a model.")));
  }
  await load();
  if (isExport() && all.length === 1) location.hash = all[0].kind === "run" ? link("run", all[0].id) : link("list", all[0].id, 0);
  const timer = setInterval(() => { if (!isOver && !document.hidden && all.some((one) => one.state === "running")) load().catch(() => {}); }, 3000);
  return () => { isOver = true; clearInterval(timer); };
}
