// Elements, numbers and texts. Text is only ever set as text, never as HTML.

/** @param {string} tag @param {Record<string, any> | null} [props] @param {...any} children @returns {HTMLElement} */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, setting] of Object.entries(value)) element.style.setProperty(key, String(setting));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** @param {...(string | number)} parts @returns {string} */
export function link(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}`;
}

/** A number as text for people. @param {any} value @param {number} [digits] @returns {string} */
export function num(value, digits = 3) {
  if (typeof value !== "number") return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("-", "−");
  return value.toFixed(size >= 100 ? 1 : digits).replace("-", "−");
}

/** @param {number} seconds @returns {string} */
export function ago(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  for (const [size, unit] of /** @type {[number, string][]} */ ([[86400, "d"], [3600, "h"], [60, "min"]]))
    if (past >= size) return `${Math.floor(past / size)} ${unit} ago`;
  return "just now";
}

/** A duration, as in the terminal. @param {any} seconds @returns {string} */
export function lasting(seconds) {
  if (typeof seconds !== "number") return "";
  const total = Math.round(seconds), two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  if (total < 60) return `${total} s`;
  return total < 3600 ? `${Math.floor(total / 60)} min ${two(total % 60)} s` : `${Math.floor(total / 3600)} h ${two(Math.floor((total % 3600) / 60))} min`;
}

const REASONS = /** @type {Record<string, string>} */ ({
  completed: "completed", environment: "ended by the environment", length: "the turn was truncated at its limit",
  context: "the context is full", tokens: "the token limit was reached", turns: "too many turns",
  timeout: "took too long", engine: "the engine failed", prompt_too_long: "the prompt is too long",
  invalid_environment: "the environment broke the protocol", does_not_end: "it could not be cancelled", service: "a judge failed",
});

/** An outcome as text: status, reason and message. @param {any} outcome @returns {string} */
export function ending(outcome) {
  const reason = outcome.reason ? REASONS[outcome.reason] || outcome.reason.replaceAll("_", " ") : "";
  return [outcome.status, reason, outcome.message].filter(Boolean).join(": ");
}

// Characters that take effect instead of being shown: controls, and changes of the text direction.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const MAX_LENGTH = 20000;

/** Untrusted text, with its control characters as visible codes, truncated to `limit` characters.
 * @param {any} text @param {number} [limit] @returns {string} */
export function plain(text, limit = MAX_LENGTH) {
  const full = String(text ?? "");
  const truncated = full.length > limit ? `${full.slice(0, limit)}… (${(full.length - limit).toLocaleString("en")} more characters)` : full;
  return truncated.replace(CONTROLS, (character) => `␦${character.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** The value of a setting as text. @param {any} value @returns {string} */
export function setting(value) {
  return value === undefined ? "–" : typeof value === "string" ? plain(value, 200) : plain(JSON.stringify(value), 200);
}

/** @param {string} text @returns {void} */
export function notify(text) {
  const status = /** @type {HTMLElement} */ (document.getElementById("status"));
  status.textContent = text;
  setTimeout(() => status.textContent === text && (status.textContent = ""), 2500);
}

/** @param {string} text @param {string} message @returns {Promise<void>} */
export async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
    notify(message);
  } catch {
    notify("the browser does not allow this page to copy");
  }
}

/** The class of an episode's status: completed is neither good nor bad, the score says. @param {string} status @returns {string} */
export function stateOf(status) {
  return status === "completed" ? "" : status;
}

/** The pass of an evaluation in a run that a group belongs to: sampled or greedy; empty for any other group. @param {any} group @returns {string} */
export function passOf(group) {
  return /** @type {Record<string, string>} */ ({ eval: "sampled", "eval-greedy": "greedy" })[String(group).split("/")[0]] || "";
}

/** A score with its interval, as in the terminal. @param {any} value @returns {string} */
export function scored(value) {
  const fixed = (/** @type {any} */ number) => (typeof number === "number" ? number.toFixed(3).replace("-", "−") : "–");
  return `${fixed(value.score)}${Array.isArray(value.ci95) ? ` [${value.ci95.map(fixed).join(", ")}]` : ""}`;
}

/** A name with its value. @param {string} name @param {any} value @returns {HTMLElement} */
export function fact(name, value) {
  return h("div", { class: "fact" }, h("dt", null, name), h("dd", null, value));
}

/** A part of a page that shows only if it has content. @param {string} title @param {HTMLElement} content @returns {HTMLElement} */
export function section(title, content) {
  return h("section", { class: "part" }, h("h2", null, title), content);
}

/** A table. @param {any[]} headings @param {any[][]} rows @returns {HTMLElement} */
export function table(headings, rows) {
  const head = h("thead", null, h("tr", null, headings.map((heading) => h("th", null, heading))));
  return h("div", { class: "wide" }, h("table", { class: "settings" }, head, h("tbody", null, rows.map((row) => h("tr", null, row.map((cell) => h("td", null, cell)))))));
}

/** Which of two values of a column comes first, for a `sign` of 1 the smaller; null comes last. @param {any} a @param {any} b @param {number} sign @returns {number} */
export function ordered(a, b, sign) {
  return a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -sign : sign;
}

/** A command with a button that copies it. @param {string} text @returns {HTMLElement} */
export function commandLine(text) {
  return h("div", { class: "command" }, h("code", null, text), h("button", { type: "button", "aria-label": `Copy ${text}`, onclick: () => copy(text, "the command is copied") }, "Copy"));
}

/** A word of a command line. @param {string} text @returns {string} */
export function quoted(text) {
  return /^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A color of the page's current theme. @param {string} name @returns {string} */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
