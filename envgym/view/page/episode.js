// One episode, as a conversation or as tokens; the episodes of its group next to each other.
import { ask, isExport, listOf } from "./api.js";
import { commandLine, copy, ending, fact, h, link, num, passOf, plain, quoted, stateOf, table } from "./dom.js";
import { strip } from "./lanes.js";
import { walk } from "./list.js";

export const COLORS = /** @type {[string, string][]} */ ([["role", "role"], ["weight", "loss weight"], ["logprob", "log-probability"], ["difference", "engine − trainer"],
  ["ratio", "ratio"], ["advantage", "advantage"], ["entropy", "entropy"], ["version", "policy version"]]);

const FIELDS = /** @type {Record<string, string>} */ ({ weight: "weights", logprob: "logprobs", ratio: "ratios", advantage: "advantages", entropy: "entropies", version: "versions" });

/** @param {any} row @param {number} n @param {string} mode @returns {number | null} */
function numberOf(row, n, mode) {
  const value = (/** @type {string} */ name) => row[name]?.[n] ?? null;
  if (mode === "difference") return value("trained") === null ? null : value("logprobs") - value("trained");
  return value(FIELDS[mode]);
}

/** The hue and the strength in [0, 1] of a number's tint. @param {number | null} value @param {string} mode @param {number} scale @returns {[string, number]} */
function tint(value, mode, scale) {
  if (value === null || value === undefined) return ["none", 0];
  if (mode === "logprob") return ["low", Math.min(1, -value / 5)];
  if (mode === "weight") return ["high", Math.min(1, value)];
  if (mode === "version") return [`v${((value % 6) + 6) % 6}`, 0.6];
  const size = mode === "ratio" ? Math.log(value) : value;
  return [size < 0 ? "low" : "high", Math.min(1, Math.abs(size) / (scale || 1))];
}

/** What the colors of a mode mean: a scale with its ends, or the values. @param {any} row @param {string} mode @param {number} scale @returns {HTMLElement} */
function legendOf(row, mode, scale) {
  const ramp = (/** @type {string} */ hues, /** @type {string[]} */ ...texts) => h("span", { class: "ramp" }, texts[0], h("i", { class: `scale ${hues}` }), texts[1]);
  const swatches = (/** @type {string} */ name, /** @type {any[]} */ values) => [...new Set(values)].filter((value) => value !== null).map((value) => h("span", null, h("i", { class: `${name}${name === "role-" ? value : value % 6}` }), name === "role-" ? (value === "action" ? "sampled" : value) : `version ${value}`));
  const edge = mode === "ratio" && scale < 1e-3 ? [`1 − ${num(scale)}`, `1 + ${num(scale)}`] : mode === "ratio" ? [num(Math.exp(-scale)), num(Math.exp(scale))] : [num(scale && -scale), num(scale)];
  const shown = mode === "role" ? swatches("role-", row.roles) : mode === "version" ? swatches("tint-v", row.versions) : mode === "weight" ? ramp("up", "0", "1") : mode === "entropy" ? ramp("up", "0", `${num(scale)} nats`)
    : mode === "logprob" ? ramp("down", "probability 1", "0.7% or less") : ramp("both", edge[0], edge[1]);
  return h("div", { class: "legend" }, shown, mode === "role" ? "" : h("span", { class: "tint-none" }, "no number"), row.weights.includes(0) ? h("span", null, h("i", { "data-masked": true }), "not in the loss") : "");
}

/** An image of a source; its size as text where that is not there. @param {string} id @param {any} image @returns {HTMLElement} */
function picture(id, image) {
  const label = image.width ? `[image ${num(image.width)} x ${num(image.height)}]` : "[image]";
  const element = /** @type {HTMLImageElement} */ (h("img", { alt: label, loading: "lazy" }));
  const fail = () => element.replaceWith(label);
  element.addEventListener("error", fail);
  const show = (/** @type {string} */ uri) => { if (uri.startsWith("data:image/")) element.src = uri; };
  if (isExport()) ask("image", id, image.sha256).then(show).catch(fail);
  else element.src = `/image?q=${encodeURIComponent(`${id}|${image.sha256}`)}`;
  return element;
}

/** @param {any} row @param {string} mode @param {string} id @returns {HTMLElement} */
function tokensOf(row, mode, id) {
  const images = new Map(row.images.map((/** @type {any} */ image) => [image.start, image]));
  const box = h("div", { class: "tokens", dir: "auto", tabindex: "0", role: "group", "aria-label": "Tokens: the arrow keys go from one to the next" });
  const numbers = mode === "role" ? [] : row.ids.map((/** @type {any} */ _, /** @type {number} */ n) => numberOf(row, n, mode));
  let scale = 0;
  for (const value of numbers) if (value !== null) scale = Math.max(scale, Math.abs(mode === "ratio" ? Math.log(value) : value));
  const fragment = document.createDocumentFragment();
  for (let n = 0; n < row.ids.length; n++) {
    const token = document.createElement("span");
    token.textContent = row.texts ? plain(row.texts[n], 400) || "∅" : `${row.ids[n]} `;
    token.dataset.n = String(n);
    if (row.weights[n] === 0) token.dataset.masked = "";
    if (mode === "role") token.className = `role-${row.roles[n]}`;
    else {
      const [hue, strength] = tint(numbers[n], mode, scale);
      token.className = `tint-${hue}`;
      if (strength) token.style.setProperty("--a", strength.toFixed(2));
    }
    const image = images.get(n);
    if (image) { // its placeholders are one box
      token.classList.add("image");
      token.replaceChildren(picture(id, image), `${num(image.length)} tokens`);
      n += image.length - 1;
    }
    fragment.append(token);
  }
  box.append(fragment);
  return h("div", null, legendOf(row, mode, scale), box);
}

/** Shows the numbers of the token that is pointed at, or moved to by the arrow keys. @param {any} row @param {HTMLElement} bar @returns {(event: any) => void} */
function tokenListener(row, bar) {
  return (event) => {
    let token = event.target.closest("[data-n]");
    if (event.type === "keydown") {
      const box = event.currentTarget.querySelector(".tokens"), current = box.querySelector(".current");
      const next = /** @type {Record<string, any>} */ ({ ArrowRight: current ? current.nextSibling : box.firstChild, ArrowLeft: current?.previousSibling, Home: box.firstChild, End: box.lastChild });
      if (!(token = next[event.key])) return;
      event.preventDefault();
      token.scrollIntoView({ block: "nearest" });
    }
    if (!token) return;
    event.currentTarget.querySelector(".current")?.classList.remove("current");
    token.classList.add("current");
    const index = token.dataset.n;
    const n = Number(index), value = (/** @type {string} */ mode) => num(numberOf(row, n, mode), 4);
    bar.textContent = `token ${n}: id ${row.ids[n]} ${row.texts ? JSON.stringify(plain(row.texts[n], 60)) : ""} · ${row.roles[n]} · weight ${value("weight")} · log-probability ${value("logprob")}${row.logprobs[n] === null ? "" : ` (probability ${num(Math.exp(row.logprobs[n]))})`} · difference ${value("difference")} · ratio ${value("ratio")} · advantage ${value("advantage")} · entropy ${value("entropy")} · version ${numberOf(row, n, "version") ?? "–"}`;
  };
}

/** A message; the first `common` characters of its text are quiet, as another episode has them too, and the others marked.
 * @param {any} message @param {any} reward @param {string} id @param {number} [common] @returns {HTMLElement} */
function turn(message, reward, id, common) {
  const calls = (message.tool_calls || []).map((/** @type {any} */ call) => {
    const args = call.function?.arguments;
    return h("details", { class: "call" }, h("summary", null, "calls ", h("b", null, plain(call.function?.name, 200)), call.error ? h("span", { class: "state failed" }, ` ${plain(call.error, 300)}`) : ""),
      h("pre", null, plain(typeof args === "string" ? args : JSON.stringify(args, null, 1))));
  });
  const text = plain(message.content);
  const isLong = message.role === "tool" && text.length > 400;
  const parts = (message.parts || []).map((/** @type {any} */ part) => (part.type === "image" ? picture(id, part) : plain(part.text)));
  const body = text || parts.length ? h("div", { class: "text", dir: "auto" }, parts.length ? parts : common === undefined ? text : [h("span", { class: "hint" }, text.slice(0, common)), common < text.length && h("mark", null, text.slice(common))].filter(Boolean)) : "";
  return h("section", { class: `turn ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "user"}` },
    h("header", null, plain(message.name ? `${message.role} ${message.name}` : message.role, 100), reward === undefined || reward === null ? "" : h("span", { class: "turn-reward" }, `reward ${num(reward)}`)),
    isLong ? h("details", null, h("summary", null, `${text.length.toLocaleString("en")} characters`), body) : body, calls);
}

/** @param {any} record @param {string} id @param {number} [common] @returns {HTMLElement} */
function conversation(record, id, common) {
  const rewards = record.rows.flatMap((/** @type {any} */ row) => row.turns.map((/** @type {any} */ rowTurn) => rowTurn.reward));
  const completions = record.messages.filter((/** @type {any} */ message) => message.role === "assistant").length;
  let index = rewards.length - completions; // negative for the assistant's turns in the prompt
  return h("div", { class: "talk" }, record.messages.map((/** @type {any} */ message, /** @type {number} */ n) => turn(message, message.role === "assistant" ? rewards[index++] : undefined, id, n ? undefined : common)));
}

/** @param {HTMLElement} main @param {string} id @param {number} step @param {number} index @param {URLSearchParams} query
 * @param {(query: URLSearchParams) => void} remember @returns {Promise<Record<string, () => void>>} */
export async function episode(main, id, step, index, query, remember) {
  const record = await ask("episode", id, step, index);
  const state = { view: query.get("as") || "talk", color: query.get("by") || "advantage" };
  if (state.color === "advantage" && !record.rows.some((/** @type {any} */ row) => row.advantages)) state.color = query.get("by") || "logprob";
  const body = h("div"), bar = h("div", { class: "bar", role: "status" }, "point at a token, or use the arrow keys");
  const viewButtons = h("div", { class: "choices", role: "group", "aria-label": "Show as" }), colorButtons = h("div", { class: "choices", role: "group", "aria-label": "Color by" });
  if (walk.key !== `${id}|${step}`) {
    walk.key = `${id}|${step}`;
    const listing = await listOf(id, step, () => {}).catch(() => ({ columns: { id: [0] } }));
    walk.order = listing.columns.id.map((/** @type {any} */ _, /** @type {number} */ n) => n);
  }
  const position = walk.order.indexOf(index), neighbor = (/** @type {number} */ offset) => walk.order[position + offset];
  const numbers = { reward: record.reward, score: record.score, ...Object.fromEntries(Object.entries(record.metrics || {})) };
  const timeline = h("div", { class: "timeline" });
  strip(id, step, record.id).then((lane) => lane && timeline.append(lane), () => {});
  const siblings = record.siblings.length > 1 ? h("a", { class: "button", href: link("group", id, step, index) }, `${record.siblings.length} in its group`) : "";
  const commands = h("div"), run = id.replace(/\/held_out$/, ""), history = run === id || isExport() ? "" : h("a", { class: "button", href: link("task", id, step, index) }, "This task over the run");
  if (!isExport()) ask("run", run).then((info) => commands.replaceChildren(...commandsOf(info, id, record).map(commandLine)), () => {});
  const button = (/** @type {string} */ text, /** @type {number | undefined} */ n) => h("button", { type: "button", disabled: n === undefined, onclick: () => go(n) }, text);
  main.replaceChildren(h("h1", { class: "task" }, plain(record.task.id, 200)), h("dl", { class: "facts" }, record.parent ? fact("branch of", `${plain(record.parent, 200)} after turn ${num(record.parent_turn)}`) : "", passOf(record.group) ? fact("pass", passOf(record.group)) : "", fact("outcome", h("span", { class: `state ${stateOf(record.outcome.status)}` }, plain(ending(record.outcome), 300))),
    Object.entries(numbers).map(([name, value]) => fact(plain(name, 60), num(value))), fact("tokens", num(record.listed.tokens?.[0])), fact("seconds", num(record.seconds)),
    record.answer === null || record.answer === undefined ? "" : fact("parsed answer", plain(record.answer, 200)), record.task.answer === null || record.task.answer === undefined ? "" : fact("reference answer", plain(typeof record.task.answer === "string" ? record.task.answer : JSON.stringify(record.task.answer), 200))),
  h("div", { class: "tools" }, button("‹ previous", position > 0 ? neighbor(-1) : undefined), button("next ›", neighbor(1)), h("span", { class: "hint" }, `${num(position + 1)} of ${num(walk.order.length)}`), viewButtons, colorButtons, siblings, history, h("button", { type: "button", onclick: () => copy(JSON.stringify(record), "the episode is copied") }, "Copy JSON")), timeline, body, commands);
  const go = (/** @type {number | undefined} */ n) => { if (n !== undefined) location.hash = `${link("episode", id, step, n)}?as=${state.view}&by=${state.color}`; };
  function draw() {
    viewButtons.replaceChildren(...[["talk", "Conversation"], ["tokens", "Tokens"]].map(([view, title]) => h("button", { type: "button", "aria-pressed": String(state.view === view), onclick: () => { state.view = view; update(); } }, title)));
    colorButtons.hidden = state.view !== "tokens";
    colorButtons.replaceChildren(...COLORS.map(([mode, title]) => h("button", { type: "button", "aria-pressed": String(state.color === mode), onclick: () => { state.color = mode; update(); } }, title)));
    body.replaceChildren(state.view === "talk" ? conversation(record, id) : h("div", null, record.rows.map((/** @type {any} */ row, /** @type {number} */ n) => {
      const tokens = tokensOf(row, state.color, id), listener = tokenListener(row, bar);
      tokens.addEventListener("pointerover", listener);
      tokens.addEventListener("click", listener);
      tokens.addEventListener("keydown", listener);
      return h("section", null, record.rows.length > 1 ? h("h2", null, `Token sequence ${n + 1}`) : "", tokens);
    }), bar));
  }
  function update() {
    remember(new URLSearchParams({ as: state.view, by: state.color }));
    draw();
  }
  draw();
  return {
    j: () => go(neighbor(1)), k: () => go(position > 0 ? neighbor(-1) : undefined), g: () => { if (siblings) location.hash = link("group", id, step, index); },
    t: () => { state.view = state.view === "talk" ? "tokens" : "talk"; update(); },
    ...Object.fromEntries(["ArrowLeft", "ArrowRight"].map((key) => [key, () => { // the tokens have no focus: the first ones get it
      const box = /** @type {HTMLElement | null} */ (body.querySelector(".tokens"));
      if (!box || body.querySelector(".tokens:focus")) return;
      box.focus();
      box.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }])),
    c: () => { state.view = "tokens"; state.color = COLORS[(COLORS.findIndex(([mode]) => mode === state.color) + 1) % COLORS.length][0]; update(); },
  };
}

/** The commands that print an episode, run its actions again, and sample its task again.
 * @param {any} info @param {string} id @param {any} record @returns {string[]} */
function commandsOf(info, id, record) {
  const name = quoted(info.run), isHeldOut = id.endsWith("/held_out"), task = quoted(record.listed.key[0]);
  if (info.kind !== "run") return [`envgym show ${quoted(id)} --task ${task}`];
  return [...(info.replays ? [`envgym show ${name} --step ${record.step} --task ${task}${isHeldOut ? " --eval" : ""}`] : []), ...(info.replays && !isHeldOut ? [`envgym replay ${name} --step ${record.step} --episode ${quoted(record.id)}`] : []),
    `envgym rollout --config ${name}/config.yaml --model ${quoted(info.id)} --task ${task}${isHeldOut ? " --split test" : ""} --out again.jsonl`];
}

/** The mean advantage of an episode's tokens; null if it was not trained on. @param {any} record @returns {number | null} */
function advantage(record) {
  const values = record.rows.flatMap((/** @type {any} */ row) => row.advantages || []).filter((/** @type {any} */ value) => value !== null);
  return values.length ? values.reduce((/** @type {number} */ sum, /** @type {number} */ value) => sum + value, 0) / values.length : null;
}

/** The tree of a group with branches, each below its parent, with links; nothing for a group without.
 * @param {string} id @param {number} step @param {any[]} members @param {number[]} indices @returns {HTMLElement | string} */
function tree(id, step, members, indices) {
  const shown = new Set(); // a file may hold any parents: each episode is listed once
  /** @type {(parent: string) => HTMLElement} */
  const children = (parent) => h("ul", null, members.map((member, n) => {
    if (member === null || (member.parent || "") !== parent || shown.has(n)) return "";
    shown.add(n);
    return h("li", null, h("a", { href: link("episode", id, step, indices[n]) }, `member ${num(member.member)}`), parent ? ` after turn ${num(member.parent_turn)}` : "", `: reward ${num(member.reward)}`, member.id ? children(member.id) : "");
  }));
  return members.some((member) => member?.parent) ? h("nav", { "aria-label": "Branches" }, children("")) : "";
}

/** The heading of an episode's page, and its prompt. @param {any} record @param {string} id @returns {HTMLElement[]} */
function promptOf(record, id) {
  const end = record.messages.findIndex((/** @type {any} */ message) => message.role === "assistant");
  return [h("h1", { class: "task" }, plain(record.task.id, 200)), h("div", { class: "talk" }, record.messages.slice(0, Math.max(end, 0)).map((/** @type {any} */ message) => turn(message, undefined, id)))];
}

/** The episodes of a group next to each other. @param {HTMLElement} main @param {string} id @param {number} step @param {number} index @returns {Promise<void>} */
export async function group(main, id, step, index) {
  const record = await ask("episode", id, step, index);
  const members = await Promise.all(record.siblings.slice(0, 64).map((/** @type {number} */ n) => ask("episode", id, step, n).catch(() => null)));
  main.replaceChildren(...promptOf(record, id), tree(id, step, members, record.siblings), sideBySide(id, members.map((member, n) => [member, step, record.siblings[n], `member ${member?.member}`])));
}

/** Episodes next to each other, with what differs in their first answers. @param {string} id @param {[any, number, number, string][]} members @returns {HTMLElement} */
function sideBySide(id, members) {
  const answers = members.map(([member]) => (member ? member.messages.slice(member.messages.findIndex((/** @type {any} */ message) => message.role === "assistant")) : []));
  const texts = answers.map((answer) => (answer.length ? plain(answer[0].content) : ""));
  const prefix = (/** @type {string} */ a, /** @type {string} */ b) => { let n = 0; while (n < a.length && n < 4000 && a[n] === b[n]) n++; return n < 4000 ? n : a.length; };
  const common = texts.map((text, n) => Math.max(0, ...texts.filter((_, other) => other !== n).map((other) => prefix(text, other))));
  const value = (/** @type {string} */ name, /** @type {any} */ shown) => (shown === null || shown === undefined ? "" : h("span", null, h("span", { class: "caption" }, `${name} `), shown));
  return h("div", { class: "group" }, members.map(([member, step, n, title], position) => (member === null ? h("article", null, "not in the file") : h("article", { tabindex: "0", "aria-label": title }, h("header", null, h("a", { href: link("episode", id, step, n) }, title),
    value("reward", num(member.reward)), value("advantage", advantage(member) === null ? null : num(advantage(member))), value("answered", member.answer === null ? null : plain(member.answer, 80)), value("tokens", num(member.listed.tokens?.[0])), h("span", { class: `state ${stateOf(member.outcome.status)}` }, member.outcome.reason || member.outcome.status)),
  conversation({ ...member, messages: answers[position] }, id, common[position])))));
}

/** A task's episodes over the steps of a run, of one pass, with a link to the other pass: the first and the last next to each other, and all in a table.
 * @param {HTMLElement} main @param {string} id @param {number} step @param {number} index @returns {Promise<void>} */
export async function task(main, id, step, index) {
  const [record, history] = await Promise.all([ask("episode", id, step, index), ask("history", id, step, index)]);
  const pass = passOf(record.group), lines = history.filter((/** @type {any} */ line) => passOf(line.group) === pass), other = history.findLast((/** @type {any} */ line) => passOf(line.group) !== pass);
  const ends = await Promise.all([lines[0], lines.at(-1)].map(async (line) => [await ask("episode", id, line.step, line.index), line.step, line.index, `step ${line.step}`]));
  main.replaceChildren(...promptOf(record, id),
    h("p", null, pass ? ["pass ", h("b", null, pass), other ? [" (", h("a", { href: link("task", id, other.step, other.index) }, `see ${passOf(other.group)}`), ")"] : "", " · "] : "", "wanted ", h("b", null, lines[0].beginning[2] || "–")), sideBySide(id, /** @type {any} */ (ends)),
    table(["step", "reward", "score", "answered", "completion"], lines.map((/** @type {any} */ line) => [h("a", { href: link("episode", id, line.step, line.index) }, `step ${line.step}`), num(line.reward), num(line.score), plain(line.beginning[3], 80), plain(line.beginning[1], 200)])));
}
