// The episodes of a step: filtered, sorted, side by side.
import { ask, isExport, listOf } from "./api.js";
import { histogram } from "./charts.js";
import { h, link, num, plain, say } from "./dom.js";

const HEIGHT = 30;
const COLUMNS = /** @type {[string, string, boolean][]} */ ([["key", "task", false], ["reward", "reward", true], ["score", "score", true], ["status", "ended", false],
  ["member", "member", true], ["tokens", "tokens", true], ["turns", "turns", true], ["surprise", "surprise", true], ["seconds", "seconds", true]]);

/** The order that the list had when an episode was opened from it: what next and previous follow.
 * @type {{key: string, order: number[]}} */
export const walk = { key: "", order: [] };

/** @param {HTMLElement} main @param {string} id @param {number} step @param {URLSearchParams} query @param {(query: URLSearchParams) => void} remember
 * @returns {Promise<() => void>} */
export async function list(main, id, step, query, remember) {
  const told = await ask("run", id).catch(() => ({ steps: [] }));
  const state = { sort: query.get("sort") || "", down: query.get("down") === "1", status: query.get("status") || "", env: query.get("env") || "", text: query.get("text") || "",
    range: /** @type {[number, number] | null} */ (query.has("low") ? [Number(query.get("low")), Number(query.get("high"))] : null) };
  const bars = h("div"), count = h("span", { class: "hint", role: "status" }), rows = h("div", { class: "rows" });
  const head = h("div", { class: "row head", role: "row" }), view = h("div", { class: "list", tabindex: "0", role: "table", "aria-label": "Episodes" }, head, rows);
  const search = /** @type {HTMLInputElement} */ (h("input", { type: "search", placeholder: "Search in messages and tasks", "aria-label": "Search in messages and tasks", value: state.text }));
  const status = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Ended" }));
  const envs = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Environment", hidden: true }));
  const at = told.steps.indexOf(step);
  const near = (/** @type {number} */ n, /** @type {string} */ word) => told.steps[n] === undefined || at < 0 ? "" : h("a", { class: "button", href: link("list", id, told.steps[n]) }, word);
  main.replaceChildren(h("h1", null, told.kind === "run" ? `Step ${step}` : "Episodes"), h("div", { class: "tools" }, near(at - 1, "‹ previous step"), near(at + 1, "next step ›"),
    told.kind === "run" ? h("a", { class: "button", href: link("lanes", id, step) }, "Swimlanes") : "", search, status, envs, count), bars, view);
  /** @type {any} */
  let columns = { id: [] };
  /** @type {number[]} */
  let order = [];
  /** @type {Set<number> | null} */
  let found = null;
  const value = (/** @type {number} */ n) => columns.reward[n];

  function arrange() {
    order = [];
    for (let n = 0; n < columns.id.length; n++) {
      const kind = ended(n);
      if (state.status && kind !== state.status && columns.status[n] !== state.status) continue;
      if (state.env && columns.env[n] !== state.env) continue;
      if (state.range && !(value(n) >= state.range[0] && value(n) <= state.range[1])) continue;
      if (found && !found.has(n)) continue;
      order.push(n);
    }
    const by = columns[state.sort];
    if (by) {
      const sign = state.down ? -1 : 1;
      order.sort((a, b) => by[a] === by[b] ? a - b : by[a] === null ? 1 : by[b] === null ? -1 : by[a] < by[b] ? -sign : sign);
    }
    walk.key = `${id}|${step}`;
    walk.order = order;
    count.textContent = order.length === columns.id.length ? `${num(order.length)} episodes` : `${num(order.length)} of ${num(columns.id.length)} episodes`;
    rows.style.height = `${order.length * HEIGHT}px`;
    shown = "";
    paint();
  }
  let shown = "";
  function paint() {
    const first = Math.max(0, Math.floor(view.scrollTop / HEIGHT) - 8), last = Math.min(order.length, first + Math.ceil(view.clientHeight / HEIGHT) + 16);
    if (shown === `${first}-${last}-${order.length}`) return;
    shown = `${first}-${last}-${order.length}`;
    while (pool.length < last - first) pool.push(line());
    for (let n = 0; n < last - first; n++) fill(pool[n], order[first + n], first + n);
    if (rows.childElementCount !== last - first) rows.replaceChildren(...pool.slice(0, last - first));
  }
  /** Elements of rows, used again for other episodes when the list is scrolled. @type {HTMLElement[]} */
  const pool = [];
  const line = () => h("a", { class: "row", role: "row" }, COLUMNS.map(([name, , isNumber]) => h("span", { role: "cell", class: isNumber ? "n" : name === "key" ? "key" : "" })));
  /** @param {HTMLElement} row @param {number} n @param {number} place */
  function fill(row, n, place) {
    row.setAttribute("href", link("episode", id, step, n));
    row.style.transform = `translateY(${place * HEIGHT}px)`;
    for (let cell = 0; cell < COLUMNS.length; cell++) {
      const [name, , isNumber] = COLUMNS[cell], element = /** @type {HTMLElement} */ (row.children[cell]);
      element.textContent = isNumber ? num(columns[name][n]) : name === "key" ? plain(columns.key[n], 200) : ended(n).replaceAll("_", " ");
      if (name === "status") element.className = `state ${columns.status[n]}`;
    }
  }
  const ended = (/** @type {number} */ n) => columns.status[n] === "completed" ? "completed" : columns.reason[n] || columns.status[n];
  function heads() {
    head.replaceChildren(...COLUMNS.map(([name, word, isNumber]) => h("button", { type: "button", class: isNumber ? "n" : "", role: "columnheader",
      "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : "none",
      onclick: () => { state.down = state.sort === name ? !state.down : isNumber; state.sort = name; keep(); heads(); arrange(); } }, word, state.sort === name ? (state.down ? " ↓" : " ↑") : "")));
  }
  function keep() {
    const next = new URLSearchParams();
    if (state.sort) { next.set("sort", state.sort); if (state.down) next.set("down", "1"); }
    if (state.status) next.set("status", state.status);
    if (state.env) next.set("env", state.env);
    if (state.text) next.set("text", state.text);
    if (state.range) { next.set("low", String(state.range[0])); next.set("high", String(state.range[1])); }
    remember(next);
  }
  function draw() {
    const kinds = new Set();
    for (let n = 0; n < columns.id.length; n++) kinds.add(ended(n));
    status.replaceChildren(...["", "failed", "truncated", ...kinds].filter((kind, n, all) => all.indexOf(kind) === n).map((kind) => h("option", { value: kind, selected: kind === state.status }, kind ? kind.replaceAll("_", " ") : "all outcomes")));
    const known = [...new Set(columns.env)];
    envs.hidden = known.length < 2;
    envs.replaceChildren(...["", ...known].map((env) => h("option", { value: env, selected: env === state.env }, env ? plain(env, 80) : "all environments")));
    bars.replaceChildren(h("div", { class: "caption" }, "rewards"), histogram(columns.reward, (range) => { state.range = range; keep(); draw(); arrange(); }, state.range));
  }
  async function look() {
    state.text = search.value.trim();
    found = null;
    if (state.text && isExport()) say("an exported file cannot be searched");
    else if (state.text) { count.textContent = "searching…"; found = new Set(await ask("search", id, step, state.text)); }
    keep();
    arrange();
  }
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = window.setTimeout(() => look().catch((error) => say(error.message)), 350); });
  status.addEventListener("change", () => { state.status = status.value; keep(); arrange(); });
  envs.addEventListener("change", () => { state.env = envs.value; keep(); arrange(); });
  view.addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  const resize = new ResizeObserver(() => { shown = ""; paint(); });
  resize.observe(view);
  heads();
  let isOver = false, parts = 0;
  const all = await new Promise((done, failed) => {
    listOf(id, step, (part) => { columns = part.columns; if (!isOver && (parts++ === 0 || parts % 4 === 0)) arrange(); if (parts === 1) { draw(); done(null); } }).then(() => {
      if (!isOver) { draw(); arrange(); if (state.text) look().catch((error) => say(error.message)); }
    }, failed);
  });
  void all;
  return () => { isOver = true; resize.disconnect(); };
}
