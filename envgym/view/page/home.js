// All runs, evaluations and files.
import { ask, isExport } from "./api.js";
import { spark } from "./charts.js";
import { ago, h, lasting, link, num, ordered, plain } from "./dom.js";

const HEADINGS = /** @type {[string, string, boolean][]} */ ([["id", "name", false], ["env", "environment", false], ["recipe", "recipe", false], ["model", "model", false], ["state", "state", false],
  ["steps", "steps", true], ["curve", "curve", false], ["judged", "held-out", true], ["started", "started", true], ["seconds", "duration", true], ["alarms", "alerts", true]]);

/** What a source is judged by: name, first and last value. @param {any} entry @returns {[string, any, any][]} */
function judgesOf(entry) {
  return entry.kind === "evaluation" ? [["score", null, entry.after]] : entry.judged || [];
}

/** What a column is sorted by. @param {any} entry @param {string} name @returns {any} */
function sortValue(entry, name) {
  if (name === "judged") { const last = judgesOf(entry)[0]; return last ? (last[0] === "loss" ? -last[2] : last[2]) : null; }
  return name === "curve" ? null : entry[name] ?? null;
}

/** @param {HTMLElement} main @param {URLSearchParams} query @param {(query: URLSearchParams) => void} remember @returns {Promise<() => void>} */
export async function home(main, query, remember) {
  const state = { sort: query.get("sort") || "", down: query.get("down") === "1", text: query.get("text") || "" };
  const body = h("tbody"), head = h("tr"), label = "Filter by name, environment, recipe or model";
  const search = /** @type {HTMLInputElement} */ (h("input", { type: "search", placeholder: "Filter", "aria-label": label, title: label, value: state.text }));
  const compare = h("a", { class: "button", hidden: true }, "Compare"), overlay = h("a", { class: "button", hidden: true }, "Overlay");
  /** @type {string[]} */
  let selected = [];
  /** @type {any[]} */
  let entries = [];
  const isShown = (/** @type {any} */ entry) => entry.kind !== "held-out" || entry.why; // a run's page has its evaluations
  function draw() {
    const words = state.text.toLowerCase().split(/\s+/);
    const shown = entries.filter((entry) => isShown(entry) && words.every((word) => [entry.id, entry.kind, entry.env, entry.recipe, entry.model, entry.state].join(" ").toLowerCase().includes(word)));
    const sign = state.down ? -1 : 1, values = new Map(shown.map((entry) => [entry, sortValue(entry, state.sort)]));
    if (state.sort) shown.sort((a, b) => ordered(values.get(a), values.get(b), sign));
    head.replaceChildren(h("th", null, h("span", { class: "unseen" }, "choose")), ...HEADINGS.map(([name, title, isNumber]) => h("th", { class: isNumber ? "n" : null, "aria-sort": state.sort !== name ? "none" : state.down ? "descending" : "ascending" },
      name === "curve" ? title : h("button", { type: "button", onclick: () => { state.down = state.sort === name ? !state.down : isNumber; state.sort = name; save(); } }, `${title}${state.sort !== name ? "" : state.down ? " ↓" : " ↑"}`))));
    body.replaceChildren(...shown.map(row));
    const chosen = entries.filter((entry) => selected.includes(entry.id)), runs = chosen.filter((entry) => entry.kind === "run");
    compare.hidden = chosen.length !== 2 || !chosen.every((entry) => entry.files || heldOut(entry));
    if (chosen.length === 2) compare.setAttribute("href", link("compare", ...selected.flatMap(side)));
    overlay.hidden = runs.length < 2;
    overlay.setAttribute("href", link("overlay", ...selected.filter((id) => runs.some((entry) => entry.id === id))));
  }
  const heldOut = (/** @type {any} */ entry) => entries.find((other) => other.id === `${entry.id}/held_out` && other.files);
  /** The last held-out episodes of a run, else its last step's. @param {string} id @returns {[string, number]} */
  function side(id) {
    const entry = entries.find((candidate) => candidate.id === id), shown = selected.every((name) => heldOut({ id: name })) ? heldOut(entry) : entry;
    return [shown.id, shown.steps || 0];
  }
  function save() {
    remember(new URLSearchParams(Object.entries({ ...state, down: state.down ? "1" : "" }).filter(([, value]) => value)));
    draw();
  }
  /** @param {any} entry */
  function row(entry) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${entry.id}`, onchange: () => {
      selected = selected.includes(entry.id) ? selected.filter((id) => id !== entry.id) : [...selected, entry.id];
      draw();
    } });
    /** @type {HTMLInputElement} */ (box).checked = selected.includes(entry.id);
    const target = entry.kind === "run" ? link("run", entry.id) : link("list", entry.id, 0);
    const judged = judgesOf(entry).map(([name, first, last]) => h("div", null, name === "score" ? "" : h("span", { class: "caption" }, `${name} `), first === null || first === last ? num(last) : `${num(first)} → ${num(last)}`));
    const name = plain(entry.id, 300), text = (/** @type {any} */ value) => plain(value ?? "", 200);
    const cells = [[entry.why ? [name, h("div", { class: "caption" }, plain(entry.why, 300))] : h("a", { href: target }, name), entry.kind === "run" ? "" : h("span", { class: "caption" }, ` ${entry.kind}`)],
      text(entry.env), text(entry.recipe), h("span", { title: text(entry.model) }, text(entry.model).split("/").slice(-2).join("/")), h("span", { class: `state ${entry.state}` }, entry.state), entry.kind === "run" ? num(entry.steps) : "",
      entry.curve && entry.curve.length > 1 ? spark(entry.curve) : "", judged, entry.started || entry.changed ? ago(entry.started || entry.changed) : "", lasting(entry.seconds), entry.alarms ? h("span", { class: "alarm" }, `${entry.alarms}`) : ""];
    return h("tr", null, h("td", { class: "choose" }, entry.why ? "" : box), cells.map((cell, n) => h("td", { class: HEADINGS[n][2] ? "n" : HEADINGS[n][0] === "id" ? "name" : HEADINGS[n][0], "data-of": HEADINGS[n][1] }, cell)));
  }
  search.addEventListener("input", () => { state.text = search.value; save(); });
  main.replaceChildren(h("h1", null, "Runs and evaluations"), h("div", { class: "tools" }, search, overlay, compare, h("span", { class: "hint" }, "choose runs to lay their curves over each other, or two to compare their episodes")),
    h("div", { class: "wide" }, h("table", { class: "index" }, h("thead", null, head), body)));
  let isOver = false;
  async function load() {
    entries = await ask("index");
    draw();
    if (!entries.length) body.replaceChildren(h("tr", null, h("td", { colspan: HEADINGS.length + 1 }, "No runs or evaluations yet: train or evaluate a model.")));
  }
  await load();
  const [first, ...others] = entries.filter(isShown);
  if (isExport() && first && !others.length) location.hash = first.kind === "run" ? link("run", first.id) : link("list", first.id, 0);
  const timer = setInterval(() => { if (!isOver && !document.hidden && entries.some((entry) => entry.state === "running")) load().catch(() => {}); }, 3000);
  return () => { isOver = true; clearInterval(timer); };
}
