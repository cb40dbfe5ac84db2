// Which view an address stands for, and the keys.
import { compare } from "./compare.js";
import { h, link } from "./dom.js";
import { episode, group } from "./episode.js";
import { home } from "./home.js";
import { lanes } from "./lanes.js";
import { list } from "./list.js";
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
  history.replaceState(null, "", `${location.hash.split("?")[0]}${text ? `?${text}` : ""}`);
}

/** @param {[string, string | null][]} parts */
function trace(parts) {
  trail.replaceChildren(...parts.flatMap(([word, target], n) => [n ? h("span", { class: "sep" }, "›") : "", target ? h("a", { href: target }, word) : h("span", null, word)]));
  document.title = `${parts.map(([word]) => word).reverse().join(" · ")}`;
}

async function show() {
  const mine = ++turnNumber;
  leave?.();
  leave = null;
  keys = {};
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [what, id = "", ...rest] = path.split("/").map(decodeURIComponent), query = new URLSearchParams(search || "");
  const step = Number(rest[0] || 0), box = h("div", { class: `view view-${what || "home"}` });
  /** @type {[string, string | null][]} */
  const parts = [["envgym", "#/"]];
  try {
    /** @type {any} */
    let made = null;
    if (!what) made = await home(box);
    else if (what === "run") { parts.push([id, null]); made = await run(box, id); }
    else if (what === "compare") { parts.push(["compare", null]); await compare(box, id, step, rest[1], Number(rest[2] || 0)); }
    else {
      parts.push([id, link("run", id)], [step ? `step ${step}` : "episodes", link("list", id, step)]);
      if (what === "list") made = await list(box, id, step, query, remember);
      else if (what === "lanes") { parts.push(["in time", null]); await lanes(box, id, step); }
      else if (what === "group") { parts.push(["group", null]); await group(box, id, step, Number(rest[1])); }
      else if (what === "episode") { parts.push([`episode ${rest[1]}`, null]); made = await episode(box, id, step, Number(rest[1]), query, remember); }
      else throw new Error(`there is no view ${what}`);
    }
    if (mine !== turnNumber) return typeof made === "function" && made();
    if (typeof made === "function") leave = made;
    else if (made) keys = made;
  } catch (error) {
    if (mine !== turnNumber) return;
    box.replaceChildren(h("h1", null, "This cannot be shown"), h("p", { class: "error" }, /** @type {Error} */ (error).message));
  }
  trace(parts);
  main.replaceChildren(box);
  dispatchEvent(new Event("shown"));
}

/** @param {string} theme */
function dress(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* a file from the disk may keep nothing */ }
}
let theme = "";
try { theme = localStorage.getItem("theme") || ""; } catch { theme = ""; }
dress(theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.getElementById("theme")?.addEventListener("click", () => { dress(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); show(); });

const HELP = [["j, k", "next, previous episode"], ["g", "its group"], ["t", "conversation or tokens"], ["c", "next coloring"], ["u", "up"], ["/", "search"], ["?", "these keys"]];
function help() {
  const open = document.querySelector("dialog");
  if (open) return open.remove();
  const box = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-label": "Keys" }, h("dl", null, HELP.map(([key, word]) => [h("dt", null, key), h("dd", null, word)])), h("button", { type: "button", onclick: () => box.remove() }, "Close")));
  document.body.append(box);
  box.showModal();
}
document.getElementById("keys")?.addEventListener("click", help);
addEventListener("keydown", (event) => {
  const target = /** @type {HTMLElement} */ (event.target);
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(target.tagName)) return;
  if (keys[event.key]) keys[event.key]();
  else if (event.key === "?") help();
  else if (event.key === "u") { const up = [...trail.querySelectorAll("a")].at(-1); if (up) location.hash = up.hash; }
  else if (event.key === "/") { const search = /** @type {HTMLElement | null} */ (main.querySelector("input[type=search]")); if (search) { event.preventDefault(); search.focus(); } }
});
addEventListener("hashchange", show);
show();
