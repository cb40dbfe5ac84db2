// The view of the page's address, and the keys.
import { compare } from "./compare.js";
import { h, link } from "./dom.js";
import { episode, group, task } from "./episode.js";
import { home } from "./home.js";
import { lanes } from "./lanes.js";
import { list, listLink } from "./list.js";
import { overlay } from "./overlay.js";
import { run } from "./run.js";

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const trail = /** @type {HTMLElement} */ (document.getElementById("trail"));
/** @type {(() => void) | null} */
let leave = null;
/** @type {Record<string, () => void>} */
let keys = {};
let turnNumber = 0;

/** @param {URLSearchParams} query */
function remember(query) {
  const text = query.toString();
  history.replaceState(history.state, "", `${location.hash.split("?")[0] || "#/"}${text ? `?${text}` : ""}`);
}

/** The name of a run, after the folders that it is in; a stage's is its run's and its own. @param {string} id @returns {string} */
function nameOf(id) {
  return id.replace(/\/held_out$/, "").split("/").slice(/\/\d+-[^/]+$/.test(id) ? -2 : -1).join("/");
}

/** @param {[string, string | null, string?][]} parts */
function showTrail(parts) {
  trail.replaceChildren(...parts.flatMap(([text, target, title], n) => [n ? h("span", { class: "sep" }, "›") : "", h(target ? "a" : "span", { href: target, title }, text)]));
  document.title = `${parts.map(([text]) => text).reverse().join(" · ")}`;
}

async function show() {
  const number = ++turnNumber;
  leave?.();
  leave = null;
  keys = {};
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, id = "", ...args] = path.split("/").map(decodeURIComponent), query = new URLSearchParams(search || "");
  const store = (/** @type {URLSearchParams} */ query) => { if (number === turnNumber) remember(query); }; // a search may end after its view
  const step = Number(args[0] || 0), box = h("div", { class: `view view-${view || "home"}` });
  /** @type {[string, string | null, string?][]} */
  const parts = [["envgym", "#/"]];
  try {
    /** @type {any} */
    let result = null;
    if (!view) result = await home(box, query, store);
    else if (view === "run") { parts.push([nameOf(id), null, id]); result = await run(box, id); }
    else if (view === "overlay") { parts.push(["overlay", null]); await overlay(box, [id, ...args]); }
    else if (view === "compare") { parts.push(["compare", null]); await compare(box, id, step, args[1], Number(args[2] || 0)); }
    else {
      const path = id.replace(/\/held_out$/, "");
      parts.push([nameOf(id), link("run", path), path], [path !== id ? `held-out tasks at step ${step}` : step ? `step ${step}` : "episodes", listLink(id, step)]);
      if (view === "list") result = await list(box, id, step, query, store);
      else if (view === "lanes") { parts.push(["swimlanes", null]); await lanes(box, id, step); }
      else if (view === "group") { parts.push(["group", null]); await group(box, id, step, Number(args[1])); }
      else if (view === "task") { parts.push(["this task over the run", null]); await task(box, id, step, Number(args[1])); }
      else if (view === "episode") { parts.push([`episode ${args[1]}`, null]); result = await episode(box, id, step, Number(args[1]), query, store); }
      else throw new Error(`there is no view ${view}`);
    }
    if (number !== turnNumber) return typeof result === "function" && result();
    if (typeof result === "function") leave = result;
    else if (result) keys = result;
  } catch (error) {
    if (number !== turnNumber) return;
    box.replaceChildren(h("h1", null, "This cannot be shown"), h("p", { class: "error" }, /** @type {Error} */ (error).message));
  }
  showTrail(parts);
  main.replaceChildren(box);
  if (!history.state) scrollTo(0, 0); // a view that was shown before has one: the browser returns to its position
  history.replaceState({ shown: true }, "");
  dispatchEvent(new Event("shown"));
}

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = ""; // the system's, until the button is pressed
try { theme = localStorage.getItem("chosen-theme") || ""; } catch { /* a file from the disk may have no storage */ }
function setTheme() {
  document.documentElement.dataset.theme = theme || (dark.matches ? "dark" : "light");
}
setTheme();
dark.addEventListener("change", () => { setTheme(); show(); });
document.getElementById("theme")?.addEventListener("click", () => {
  theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("chosen-theme", theme); } catch { /* as above */ }
  setTheme();
  show();
});

const HELP = [["j, k", "next, previous episode"], ["g", "the episode's group"], ["t", "conversation or tokens"], ["c", "next coloring"], ["← →", "from token to token"], ["u", "up"], ["/", "search"], ["?", "these keys"]];
function help() {
  const open = document.querySelector("dialog");
  if (open) return open.remove();
  const box = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-label": "Keys" }, h("dl", null, HELP.map(([key, text]) => [h("dt", null, key), h("dd", null, text)])), h("button", { type: "button", onclick: () => box.remove() }, "Close")));
  document.body.append(box);
  box.showModal();
}
document.getElementById("keys")?.addEventListener("click", help);
addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) return;
  if (keys[event.key]) keys[event.key]();
  else if (event.key === "?") help();
  else if (event.key === "u") { const parent = [...trail.querySelectorAll("a")].at(-1); if (parent) location.hash = parent.hash; }
  else if (event.key === "/") { const search = /** @type {HTMLElement | null} */ (main.querySelector("input[type=search]")); if (search) { event.preventDefault(); search.focus(); } }
});
addEventListener("hashchange", show);
show();
