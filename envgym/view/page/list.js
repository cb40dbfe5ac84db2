// The list of a step's episodes, filtered and sorted.
import { ask, isExport, listOf } from "./api.js";
import { histogram, isWithin } from "./charts.js";
import { color, fact, h, lasting, link, notify, num, ordered, passOf, plain, scored, setting, stateOf } from "./dom.js";

const COLUMNS = /** @type {[string, string, boolean][]} */ ([["key", "task", false], ["reward", "reward", true], ["score", "score", true], ["status", "outcome", false],
  ["tokens", "tokens", true], ["turns", "turns", true], ["member", "member", true], ["surprise", "surprise", true], ["seconds", "seconds", true]]);
const TEXTS = ["question", "wanted", "answered", "completion"];
const SEARCHED = /** @type {Record<string, string>} */ ({ "as wanted, and graded wrong": "misgraded", "answer not in the completion": "unstated" });

/** The order of the list when an episode was opened from it, for the keys "next" and "previous", and its filters.
 * @type {{key: string, order: number[], filters: string}} */
export const walk = { key: "", order: [], filters: "" };

/** A link to a list, with the filters that it had. @param {string} id @param {number} step @returns {string} */
export function listLink(id, step) {
  return `${link("list", id, step)}${walk.key === `${id}|${step}` && walk.filters ? `?${walk.filters}` : ""}`;
}

/** @param {HTMLElement} main @param {string} id @param {number} step @param {URLSearchParams} query @param {(query: URLSearchParams) => void} remember
 * @returns {Promise<() => void>} */
export async function list(main, id, step, query, remember) {
  const info = await ask("run", id).catch(() => ({ steps: [] }));
  const state = { sort: query.get("sort") || "", down: query.get("down") === "1", status: query.get("status") || "", env: query.get("env") || "", pass: query.get("pass") || "", task: query.get("task") || "", text: query.get("text") || "",
    range: /** @type {import("./charts.js").Range | null} */ (query.has("low") ? [Number(query.get("low")), Number(query.get("below") ?? query.get("high")), query.has("below")] : null) };
  const bars = h("div"), count = h("span", { class: "hint", role: "status" }), rows = h("div", { class: "rows" });
  const none = h("p", { hidden: true });
  const head = h("div", { class: "row head", role: "row" }), view = h("div", { class: "list", tabindex: "0", role: "table", "aria-label": "Episodes" }, head, rows);
  const search = /** @type {HTMLInputElement} */ (h("input", { type: "search", placeholder: "Search in messages and tasks", "aria-label": "Search in messages and tasks", value: state.text }));
  const tasks = /** @type {HTMLInputElement} */ (h("input", { type: "search", class: "short", placeholder: "Task", "aria-label": "Task", value: state.task }));
  const rowHeight = () => parseInt(color("--row-height")) || 46; // 700,000 rows of 46 stay below the largest height of an element
  const status = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Outcome" }));
  const envs = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Environment", hidden: true }));
  const passes = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Pass", hidden: true }));
  const result = info.kind === "evaluation" && info.summary.n_tasks !== undefined ? info.summary : null;
  const facts = result && h("dl", { class: "facts" }, fact("score, 95% interval", scored(result)), Object.keys(result.envs || {}).length < 2 ? "" : Object.entries(result.envs).map(([name, part]) => fact(plain(name, 80), scored(part))), fact("model", setting(result.model)), fact("tasks", num(result.n_tasks)),
    fact("truncated", num(result.truncated)), fact("failed", num(Object.values(result.failures || {}).reduce((/** @type {number} */ sum, /** @type {any} */ count) => sum + count, 0))), fact("duration", lasting(result.seconds)));
  const position = info.steps.indexOf(step);
  const stepLink = (/** @type {number} */ n, /** @type {string} */ text) => info.steps[n] === undefined || position < 0 ? "" : h("a", { class: "button", href: `${link("list", id, info.steps[n])}${query.size ? `?${query}` : ""}`, "data-step": info.steps[n] }, text);
  main.replaceChildren(h("h1", null, info.kind === "run" ? `Step ${step}` : info.kind === "held-out" ? `Held-out tasks at step ${step}` : "Episodes"), facts || "", h("div", { class: "tools" }, stepLink(position - 1, "‹ previous step"), stepLink(position + 1, "next step ›"),
    info.kind === "run" ? h("a", { class: "button", href: link("lanes", id, step) }, "Swimlanes") : "", search, tasks, status, envs, passes, count), bars, none, view);
  /** @type {any} */
  let columns = { id: [] };
  /** @type {number[]} */
  let order = [];
  /** @type {Set<number> | null} */
  let matches = null;
  /** The episodes of outcomes that the server searches for. @type {Record<string, Set<number>>} */
  const searched = {};
  let isOver = false, total = 0;
  const reward = (/** @type {number} */ n) => columns.reward[n], grade = (/** @type {number} */ n) => columns.score[n] ?? columns.reward[n] ?? NaN;

  function arrange() {
    order = [];
    const task = state.task.toLowerCase();
    for (let n = 0; n < columns.id.length; n++) {
      if (state.status in SEARCHED ? !searched[state.status]?.has(n) : state.status === "wrong" ? !(grade(n) < 1) : state.status && outcome(n) !== state.status && columns.status[n] !== state.status) continue;
      if (task && !columns.key[n].toLowerCase().includes(task)) continue;
      if (state.env && columns.env[n] !== state.env) continue;
      if (state.pass && passOf(columns.group[n]) !== state.pass) continue;
      if (state.range && !isWithin(reward(n), state.range)) continue;
      if (matches && !matches.has(n)) continue;
      order.push(n);
    }
    const values = columns[state.sort];
    if (values) {
      const sign = state.down ? -1 : 1;
      order.sort((a, b) => ordered(values[a], values[b], sign));
    }
    walk.key = `${id}|${step}`;
    walk.order = order;
    walk.filters = query.toString();
    const held = num(columns.id.length), part = columns.id.length < total ? ` (the first ${held} of ${num(total)})` : ""; // an export has no more
    count.textContent = `${order.length === columns.id.length ? "" : `${num(order.length)} of `}${held} episodes${part}`;
    none.hidden = order.length > 0 || !columns.id.length || (state.status in SEARCHED && !searched[state.status]);
    view.hidden = !none.hidden;
    none.replaceChildren(`none of ${num(columns.id.length)} match `, h("a", { class: "button", href: link("list", id, step) }, "Clear the filters"));
    rows.style.height = `${order.length * rowHeight()}px`;
    painted = "";
    paint();
  }
  /** The range of rows in the page. */
  let painted = "";
  function paint() {
    const height = rowHeight(), first = Math.max(0, Math.floor(view.scrollTop / height) - 8), last = Math.min(order.length, first + Math.ceil(view.clientHeight / height) + 16);
    if (painted === `${first}-${last}-${order.length}`) return;
    painted = `${first}-${last}-${order.length}`;
    while (pool.length < last - first) pool.push(line());
    for (let n = 0; n < last - first; n++) fill(pool[n], order[first + n], (first + n) * height);
    if (rows.childElementCount !== last - first) rows.replaceChildren(...pool.slice(0, last - first));
    clearTimeout(pause);
    pause = window.setTimeout(() => readBeginnings(order.slice(first, last)).catch(() => {}), 60); // once it is not scrolled
  }
  let pause = 0;
  /** The beginnings of prompts and completions by episode, read when its row is in view. @type {Map<number, string[]>} */
  const beginnings = new Map();
  /** @param {number[]} shown */
  async function readBeginnings(shown) {
    const missing = shown.filter((n) => !beginnings.has(n));
    if (isOver || !missing.length) return;
    for (const n of missing) beginnings.set(n, []);
    const texts = isExport() ? await Promise.all(missing.map((n) => ask("episode", id, step, n).then((record) => record.beginning, () => [])))
      : await ask("beginnings", id, step, missing.join(","));
    missing.forEach((n, position) => beginnings.set(n, texts[position]));
    painted = "";
    paint();
  }
  /** Elements of rows, reused for other episodes when the list is scrolled. @type {HTMLElement[]} */
  const pool = [];
  const line = () => h("a", { class: "row", role: "row" }, COLUMNS.map(([name, , isNumber]) => h("span", { role: "cell", class: isNumber ? "n" : name === "key" ? "key" : "", "data-of": name })),
    TEXTS.map((name) => h("span", { role: "cell", class: `line ${name}`, dir: "auto", title: name })));
  /** @param {HTMLElement} row @param {number} n @param {number} top */
  function fill(row, n, top) {
    row.setAttribute("href", link("episode", id, step, n));
    row.style.transform = `translateY(${top}px)`;
    for (let cell = 0; cell < COLUMNS.length; cell++) {
      const [name, , isNumber] = COLUMNS[cell], element = /** @type {HTMLElement} */ (row.children[cell]);
      element.textContent = isNumber ? num(columns[name][n]) : name === "key" ? plain(passes.hidden ? columns.key[n] : [passOf(columns.group[n]), columns.key[n]].filter(Boolean).join(" · "), 200) : outcome(n).replaceAll("_", " ");
      if (name === "status") element.className = `state ${stateOf(columns.status[n])}`;
      if (name === "score") element.className = `n ${grade(n) >= 1 ? "up" : ""}`;
    }
    const [question = "", completion = "", wanted = "", answer = "", unstated = ""] = beginnings.get(n) || [];
    row.classList.toggle("unstated", unstated !== "");
    [question, wanted && `wanted ${plain(wanted)}`, answer && `answered ${plain(answer)}${unstated && `, ${unstated}`}`, completion].forEach((text, cell) => { row.children[COLUMNS.length + cell].textContent = plain(text); });
  }
  const outcome = (/** @type {number} */ n) => columns.status[n] === "completed" ? "completed" : columns.reason[n] || columns.status[n];
  function drawHead() {
    head.replaceChildren(...COLUMNS.map(([name, title, isNumber]) => h("button", { type: "button", class: isNumber ? "n" : "", role: "columnheader", "data-of": name,
      "aria-sort": state.sort === name ? (state.down ? "descending" : "ascending") : "none",
      onclick: () => { state.down = state.sort === name ? !state.down : isNumber; state.sort = name; saveState(); drawHead(); arrange(); } }, title, state.sort === name ? (state.down ? " ↓" : " ↑") : "")));
  }
  function saveState() {
    const { range, ...texts } = state, [low, high, isOpen] = range || [], down = state.sort && state.down ? "1" : "";
    const next = query = new URLSearchParams(Object.entries({ ...texts, down }).filter(([, value]) => value));
    if (range) { next.set("low", String(low)); next.set(isOpen ? "below" : "high", String(high)); }
    remember(next);
    for (const anchor of main.querySelectorAll("a[data-step]")) anchor.setAttribute("href", `${link("list", id, Number(anchor.getAttribute("data-step")))}?${next}`);
  }
  function draw() {
    const kinds = new Set();
    for (let n = 0; n < columns.id.length; n++) kinds.add(outcome(n));
    status.replaceChildren(...["", "failed", "truncated", "wrong", ...(isExport() ? [] : Object.keys(SEARCHED)), ...kinds].filter((kind, n, all) => all.indexOf(kind) === n).map((kind) => h("option", { value: kind, selected: kind === state.status }, kind ? kind.replaceAll("_", " ") : "all outcomes")));
    const names = [...new Set(columns.env)];
    envs.hidden = names.length < 2;
    envs.replaceChildren(...["", ...names].map((env) => h("option", { value: env, selected: env === state.env }, env ? plain(env, 80) : "all environments")));
    const kindsOfPass = [...new Set(columns.group.map(passOf))].filter(Boolean);
    passes.hidden = kindsOfPass.length < 2;
    passes.replaceChildren(...["", ...kindsOfPass].map((pass) => h("option", { value: pass, selected: pass === state.pass }, pass || "both passes")));
    bars.replaceChildren(histogram(columns.reward, (range) => { state.range = range; saveState(); draw(); arrange(); }, state.range));
  }
  async function runSearch() {
    const text = state.text = search.value.trim();
    matches = null;
    if (text && isExport()) notify("an exported file cannot be searched");
    else if (text) {
      count.textContent = "searching…";
      const found = await ask("search", id, step, text);
      if (text !== state.text) return; // another search began, or none is wanted now
      matches = new Set(found);
    }
    saveState();
    arrange();
  }
  let timer = 0;
  search.addEventListener("input", () => { clearTimeout(timer); timer = window.setTimeout(() => runSearch().catch((error) => notify(error.message)), 350); });
  async function runStatus() {
    const kind = state.status;
    if (kind in SEARCHED && !searched[kind]) { count.textContent = "searching…"; searched[kind] = new Set(await ask(SEARCHED[kind], id, step)); }
    arrange();
  }
  tasks.addEventListener("input", () => { state.task = tasks.value.trim(); saveState(); arrange(); });
  status.addEventListener("change", () => { state.status = status.value; saveState(); runStatus().catch((error) => notify(error.message)); });
  envs.addEventListener("change", () => { state.env = envs.value; saveState(); arrange(); });
  passes.addEventListener("change", () => { state.pass = passes.value; saveState(); arrange(); });
  view.addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  const resize = new ResizeObserver(arrange);
  resize.observe(view);
  drawHead();
  let parts = 0;
  await new Promise((resolve, reject) => {
    listOf(id, step, (part) => { columns = part.columns; total = part.total; if (parts === 0) draw(); if (!isOver && (parts++ === 0 || parts % 4 === 0)) arrange(); resolve(null); }).then(() => {
      if (!isOver) { draw(); runStatus().catch((error) => notify(error.message)); if (state.text) runSearch().catch((error) => notify(error.message)); }
    }, reject);
  });
  return () => { isOver = true; resize.disconnect(); };
}
