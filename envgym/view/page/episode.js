// One episode: as a conversation and as tokens; its group side by side.
import { ask, isExport, listOf } from "./api.js";
import { copy, ending, fact, h, link, num, plain } from "./dom.js";
import { strip } from "./lanes.js";
import { walk } from "./list.js";

export const COLOURS = /** @type {[string, string][]} */ ([["role", "role"], ["weight", "loss weight"], ["logprob", "log-probability"], ["difference", "engine − trainer"],
  ["ratio", "ratio"], ["advantage", "advantage"], ["version", "policy version"]]);

/** @param {any} row @param {number} n @param {string} by @returns {number | null} */
function numberOf(row, n, by) {
  const value = (/** @type {string} */ name) => (row[name] ? row[name][n] : null);
  if (by === "logprob") return value("logprobs");
  if (by === "difference") return value("trained") === null || value("trained") === undefined ? null : value("logprobs") - value("trained");
  if (by === "ratio") return value("ratios") ?? null;
  if (by === "advantage") return value("advantages") ?? null;
  if (by === "weight") return value("weights");
  return value("versions");
}

/** A number as a tint: which hue, and how strong. @param {number | null} value @param {string} by @param {number} scale @returns {[string, number]} */
function tint(value, by, scale) {
  if (value === null || value === undefined) return ["none", 0];
  if (by === "logprob") return ["low", Math.min(1, -value / 5)];
  if (by === "weight") return ["high", Math.min(1, value)];
  if (by === "version") return [`v${((value % 6) + 6) % 6}`, 0.6];
  const size = by === "ratio" ? Math.log(value) : value;
  return [size < 0 ? "low" : "high", Math.min(1, Math.abs(size) / (scale || 1))];
}

/** @param {any} row @param {string} by @returns {HTMLElement} */
function tokensOf(row, by) {
  const box = h("div", { class: "tokens", dir: "auto" });
  const numbers = by === "role" ? [] : row.ids.map((/** @type {any} */ _, /** @type {number} */ n) => numberOf(row, n, by));
  let scale = 0;
  for (const value of numbers) if (value !== null) scale = Math.max(scale, Math.abs(by === "ratio" ? Math.log(value) : value));
  const fragment = document.createDocumentFragment();
  for (let n = 0; n < row.ids.length; n++) {
    const token = document.createElement("span");
    token.textContent = row.texts ? plain(row.texts[n], 400) || "∅" : `${row.ids[n]} `;
    token.dataset.n = String(n);
    if (by === "role") token.className = `role-${row.roles[n]}`;
    else {
      const [hue, strength] = tint(numbers[n], by, scale);
      token.className = `tint-${hue}`;
      if (strength) token.style.setProperty("--a", strength.toFixed(2));
    }
    fragment.append(token);
  }
  box.append(fragment);
  return box;
}

/** @param {any} row @param {HTMLElement} bar @returns {(event: Event) => void} */
function told(row, bar) {
  return (event) => {
    const at = /** @type {HTMLElement} */ (event.target).dataset?.n;
    if (at === undefined) return;
    const n = Number(at), known = (/** @type {string} */ name) => num(numberOf(row, n, name), 4);
    bar.textContent = `token ${n}: id ${row.ids[n]} ${row.texts ? JSON.stringify(plain(row.texts[n], 60)) : ""} · ${row.roles[n]} · weight ${known("weight")} · log-probability ${known("logprob")} · difference ${known("difference")} · ratio ${known("ratio")} · advantage ${known("advantage")} · version ${numberOf(row, n, "version") ?? "–"}`;
  };
}

/** @param {any} message @param {any} reward @returns {HTMLElement} */
function turn(message, reward) {
  const calls = (message.tool_calls || []).map((/** @type {any} */ call) => {
    const given = call.function?.arguments;
    return h("details", { class: "call" }, h("summary", null, "calls ", h("b", null, plain(call.function?.name, 200)), call.error ? h("span", { class: "state failed" }, ` ${plain(call.error, 300)}`) : ""),
      h("pre", null, plain(typeof given === "string" ? given : JSON.stringify(given, null, 1))));
  });
  const text = plain(message.content);
  const isLong = message.role === "tool" && text.length > 400;
  const body = text ? h("div", { class: "text", dir: "auto" }, text) : "";
  return h("section", { class: `turn ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "user"}` },
    h("header", null, plain(message.name ? `${message.role} ${message.name}` : message.role, 100), reward === undefined || reward === null ? "" : h("span", { class: "paid" }, `reward ${num(reward)}`)),
    isLong ? h("details", null, h("summary", null, `${text.length.toLocaleString("en")} characters`), body) : body, calls);
}

/** @param {any} told @returns {HTMLElement} */
function conversation(told) {
  const rewards = told.rows.flatMap((/** @type {any} */ row) => row.turns.map((/** @type {any} */ one) => one.reward));
  const answers = told.messages.filter((/** @type {any} */ one) => one.role === "assistant").length;
  let answer = rewards.length - answers;
  return h("div", { class: "talk" }, told.messages.map((/** @type {any} */ message) => turn(message, message.role === "assistant" ? rewards[answer++] : undefined)));
}

/** @param {HTMLElement} main @param {string} id @param {number} step @param {number} index @param {URLSearchParams} query
 * @param {(query: URLSearchParams) => void} remember @returns {Promise<Record<string, () => void>>} */
export async function episode(main, id, step, index, query, remember) {
  const one = await ask("episode", id, step, index);
  const shown = { as: query.get("as") || "talk", by: query.get("by") || "advantage" };
  if (shown.by === "advantage" && !one.rows.some((/** @type {any} */ row) => row.advantages)) shown.by = query.get("by") || "logprob";
  const body = h("div"), bar = h("div", { class: "bar", role: "status" }, "point at a token");
  const swap = h("div", { class: "choices", role: "group", "aria-label": "Show as" }), colours = h("div", { class: "choices", role: "group", "aria-label": "Colour by" });
  if (walk.key !== `${id}|${step}`) {
    walk.key = `${id}|${step}`;
    const every = await listOf(id, step, () => {}).catch(() => ({ columns: { id: [0] } }));
    walk.order = every.columns.id.map((/** @type {any} */ _, /** @type {number} */ n) => n);
  }
  const place = walk.order.indexOf(index), near = (/** @type {number} */ by) => walk.order[place + by];
  const numbers = { reward: one.reward, score: one.score, ...Object.fromEntries(Object.entries(one.metrics || {})) };
  const when = h("div", { class: "when" });
  strip(id, step, one.id).then((made) => made && when.append(made), () => {});
  const siblings = one.siblings.length > 1 ? h("a", { class: "button", href: link("group", id, step, index) }, `${one.siblings.length} in its group`) : "";
  const again = isExport() || one.step === undefined ? "" : h("button", { type: "button", onclick: () => copy(command(id, one), "the command is copied") }, "Copy command");
  main.replaceChildren(h("h1", { class: "task" }, plain(one.task.id, 200)), h("dl", { class: "facts" }, fact("ended", h("span", { class: `state ${one.outcome.status}` }, plain(ending(one.outcome), 300))),
    Object.entries(numbers).map(([name, value]) => fact(plain(name, 60), num(value))), fact("tokens", num(one.listed.tokens?.[0])), fact("seconds", num(one.seconds)),
    one.answer === null || one.answer === undefined ? "" : fact("parsed answer", plain(one.answer, 200)), one.task.answer === null || one.task.answer === undefined ? "" : fact("wanted", plain(typeof one.task.answer === "string" ? one.task.answer : JSON.stringify(one.task.answer), 200))),
  h("div", { class: "tools" }, swap, colours, siblings, h("button", { type: "button", onclick: () => copy(JSON.stringify(one), "the episode is copied") }, "Copy JSON"), again), when, body);
  function draw() {
    swap.replaceChildren(...[["talk", "Conversation"], ["tokens", "Tokens"]].map(([as, word]) => h("button", { type: "button", "aria-pressed": String(shown.as === as), onclick: () => { shown.as = as; keep(); } }, word)));
    colours.hidden = shown.as !== "tokens";
    colours.replaceChildren(...COLOURS.map(([by, word]) => h("button", { type: "button", "aria-pressed": String(shown.by === by), onclick: () => { shown.by = by; keep(); } }, word)));
    body.replaceChildren(shown.as === "talk" ? conversation(one) : h("div", null, one.rows.map((/** @type {any} */ row, /** @type {number} */ n) => {
      const tokens = tokensOf(row, shown.by), tell = told(row, bar);
      tokens.addEventListener("pointerover", tell);
      tokens.addEventListener("click", tell);
      return h("section", null, one.rows.length > 1 ? h("h2", null, `Row ${n + 1}`) : "", tokens);
    }), bar));
  }
  function keep() {
    remember(new URLSearchParams({ as: shown.as, by: shown.by }));
    draw();
  }
  draw();
  const go = (/** @type {number | undefined} */ n) => { if (n !== undefined) location.hash = `${link("episode", id, step, n)}?as=${shown.as}&by=${shown.by}`; };
  return {
    j: () => go(near(1)), k: () => go(place > 0 ? near(-1) : undefined), g: () => { if (siblings) location.hash = link("group", id, step, index); },
    t: () => { shown.as = shown.as === "talk" ? "tokens" : "talk"; keep(); },
    c: () => { shown.as = "tokens"; shown.by = COLOURS[(COLOURS.findIndex(([by]) => by === shown.by) + 1) % COLOURS.length][0]; keep(); },
  };
}

/** What plays the task again. @param {string} id @param {any} one @returns {string} */
function command(id, one) {
  const quoted = (/** @type {string} */ text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  return `envgym rollout --config ${quoted(`${id}/config.yaml`)} --model ${quoted(id)} --task ${quoted(one.listed.key[0])} --out again.jsonl`;
}

/** The episodes of a group side by side. @param {HTMLElement} main @param {string} id @param {number} step @param {number} index @returns {Promise<void>} */
export async function group(main, id, step, index) {
  const one = await ask("episode", id, step, index);
  const told = await Promise.all(one.siblings.slice(0, 64).map((/** @type {number} */ n) => ask("episode", id, step, n).catch(() => null)));
  const prompt = one.messages.findIndex((/** @type {any} */ message) => message.role === "assistant");
  main.replaceChildren(h("h1", { class: "task" }, plain(one.task.id, 200)), h("div", { class: "talk" }, one.messages.slice(0, Math.max(prompt, 0)).map((/** @type {any} */ message) => turn(message, undefined))),
    h("div", { class: "group" }, told.map((each, n) => each === null ? h("article", null, "not in the file") : h("article", null, h("header", null, h("a", { href: link("episode", id, step, one.siblings[n]) }, `member ${each.member}`),
      h("span", { class: "n" }, `reward ${num(each.reward)}`), h("span", { class: `state ${each.outcome.status}` }, each.outcome.reason || each.outcome.status)), conversation({ ...each, messages: each.messages.slice(Math.max(prompt, 0)) })))));
}
