// A run: its curves, alerts and steps, updated while it is running.
import { ask, isExport } from "./api.js";
import { alarmText, chart } from "./charts.js";
import { commandLine, fact, h, lasting, link, notify, num, plain, quoted, scored, section, setting, table } from "./dom.js";
import { sharedAxis } from "./plot.js";

export const CURVES = /** @type {[string, any[]][]} */ ([
  ["held-out score", [{ name: "eval/score", low: "eval/low", high: "eval/high", points: true }]],
  ["held-out accuracy", [{ name: "eval/accuracy", points: true }]], ["held-out margin", [{ name: "eval/margin", points: true }]], ["held-out loss", [{ name: "eval/loss", points: true }]],
  ["score", [{ name: "score/mean" }]], ["reward", [{ name: "reward/mean", low: "reward/low", high: "reward/high" }]],
  ["loss", [{ name: "loss" }]], ["entropy", [{ name: "policy/entropy" }]], ["KL to the reference", [{ name: "policy/kl" }]],
  ["mismatch, nats", [{ name: "mismatch/max" }]], ["gradient norm", [{ name: "grad_norm" }]], ["tokens per episode", [{ name: "length/mean" }]],
  ["clipped share", [{ name: "policy/clip_fraction" }]], ["failed share", [{ name: "failures/share" }]],
  ["tokens per second", [{ name: "tokens/per_second" }]], ["accuracy", [{ name: "preference/accuracy" }, { name: "step/accuracy" }]],
]);
const PHASES = ["start", "save", "other", "rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint"]; // in the order of their colors

/** The seconds of each phase: of a run that ended those of its last lines in the terminal, else those so far.
 * @param {any} summary @param {any[]} records @returns {[string, number][]} */
function phaseSeconds(summary, records) {
  const { total, ...ended } = summary.seconds || {};
  const sums = total ? Object.entries(ended) : PHASES.map((name) => [name, records.reduce((sum, record) => sum + (record[`seconds/${name}`] || 0), 0)]);
  const parts = /** @type {[string, number][]} */ (sums.filter(([, seconds]) => typeof seconds === "number" && seconds > 0));
  const other = (total || 0) - parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  return other > 0 ? [...parts, ["other", other]] : parts;
}

/** The settings of a run: those that differ from its recipe's, and all of them, folded. @param {any} info @returns {any[]} */
function settingsOf(info) {
  const all = Object.entries(info.settings).map(([key, value]) => [plain(key, 200), setting(value)]);
  return [info.changed ? table(["differs from the recipe", "here", `in ${setting(info.settings.recipe)}`], info.changed.map((/** @type {any} */ [key, value, usual]) => [plain(key, 200), setting(value), setting(usual ?? undefined)])) : "",
    all.length ? h("details", null, h("summary", null, `all ${all.length} settings`), table(["setting", "value"], all)) : ""];
}

/** @param {HTMLElement} main @param {string} id @returns {Promise<() => void>} */
export async function run(main, id) {
  const info = await ask("run", id);
  if (info.kind !== "run") { location.replace(link("list", id, info.steps.at(-1) || 0)); return () => {}; }
  const from = /** @type {HTMLInputElement} */ (h("input", { type: "number", "aria-label": "First step of the curves" })), to = /** @type {HTMLInputElement} */ (h("input", { type: "number", "aria-label": "Last step of the curves" }));
  const axis = sharedAxis((range) => { [from.value, to.value] = range ? range.map(String) : ["", ""]; whole.disabled = range === null; });
  const whole = /** @type {HTMLButtonElement} */ (h("button", { type: "button", disabled: true, onclick: () => axis.zoom(null) }, "All steps"));
  axis.pick = (step, name) => {
    const [source, recorded] = name.startsWith("eval/") ? [`${id}/held_out`, info.evaluated] : [id, info.steps];
    if (recorded.includes(step)) location.hash = link("list", source, step);
    else notify(`the episodes of step ${step} are not recorded`);
  };
  const onRange = () => axis.zoom(from.value || to.value ? [Number(from.value || 0), Number(to.value || Infinity)] : null);
  from.addEventListener("change", onRange);
  to.addEventListener("change", onRange);
  const boxes = h("div", { class: "charts" }), charts = /** @type {Map<string, any>} */ (new Map());
  for (const [title, lines] of CURVES) addChart(title, lines);
  /** @param {string} title @param {any[]} lines */
  function addChart(title, lines) {
    const curves = chart(title, lines, axis);
    for (const line of lines) charts.set(line.name, curves);
    boxes.append(curves.element);
  }
  const bar = h("div", { class: "phases", role: "img" }), legend = h("div", { class: "legend" }), alarms = h("ul", { class: "alarms" }), logs = h("div"), checkpoints = h("ul");
  const steps = h("div", { class: "steps" }), evaluated = h("div", { class: "steps" }), settings = h("div", null, settingsOf(info)), commands = h("div");
  const hint = h("span", { class: "hint" }), state = h("span", { class: `state ${info.state}` }, info.state), facts = h("dl", { class: "facts" });
  main.replaceChildren(h("h1", null, id, " ", state), facts, alarms, h("div", { class: "tools" }, h("span", { class: "hint" }, "steps"), from, h("span", { class: "hint" }, "to"), to, whole, hint), boxes,
    section("Settings", settings), section("Time by phase", h("div", null, bar, legend)), section("Held-out evaluations", evaluated), section("Steps", steps), section("Checkpoints", checkpoints), section("Commands", commands), section("Logs", logs));
  /** @type {any[]} */
  let records = [];
  let offset = 0, isOver = false;
  function draw() {
    const evals = info.summary.eval || {}, judges = ["score", "accuracy", "margin", "loss"].map((name) => [name, records.filter((record) => typeof record[`eval/${name}`] === "number")]).filter(([, evaluations]) => evaluations.length);
    facts.replaceChildren(fact("environment", setting(info.settings["env.name"])), fact("recipe", setting(info.settings.recipe)), fact("learner", setting(info.settings["learner.name"])), fact("model", setting(info.settings.model)),
      fact("steps", `${num(records.length ? records.at(-1).step : 0)} of ${num(info.settings.steps)}`), fact("duration", lasting(info.summary.seconds?.total) || "–"),
      ...(evals.after?.score !== undefined && evals.before ? [fact("held-out score", `${scored(evals.before)} → ${scored(evals.after)}`)] : judges.map(([name, evaluations]) => fact(`held-out ${name}`, `${num(evaluations[0][`eval/${name}`])} → ${num(evaluations.at(-1)[`eval/${name}`])}`))), fact("seed", setting(info.settings.seed)));
    for (const record of records) {
      const spread = (record["reward/std"] ?? NaN) * 1.96 / Math.sqrt(record.episodes || NaN);
      if (Number.isFinite(spread)) { record["reward/low"] = record["reward/mean"] - spread; record["reward/high"] = record["reward/mean"] + spread; }
      const interval = record["eval/ci95"];
      if (Array.isArray(interval)) [record["eval/low"], record["eval/high"]] = interval;
    }
    for (const alarm of info.alarms) if (!charts.has(alarm.metric)) addChart(alarm.metric, [{ name: alarm.metric }]);
    const alerts = info.alarms.map((/** @type {any} */ alarm) => ({ ...alarm, href: info.steps.includes(alarm.step) ? link("list", id, alarm.step) : null }));
    for (const curves of new Set(charts.values())) curves.set(records, alerts.filter((/** @type {any} */ alarm) => charts.get(alarm.metric) === curves));
    alarms.replaceChildren(...alerts.slice(-12).map((/** @type {any} */ alarm) => h("li", null, alarmText(alarm))));
    const parts = phaseSeconds(info.summary, records), total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1, share = (/** @type {number} */ seconds) => `${Math.round((seconds * 100) / total)}%`;
    bar.setAttribute("aria-label", parts.map(([name, seconds]) => `${name} ${share(seconds)}`).join(", "));
    bar.replaceChildren(...parts.map(([name, seconds]) => h("span", { class: `phase p${PHASES.indexOf(name)}`, vars: { "--w": `${(seconds * 100) / total}%` } })));
    legend.replaceChildren(...parts.map(([name, seconds]) => h("span", null, h("i", { class: `p${PHASES.indexOf(name)}` }), `${plain(name, 40)} ${share(seconds)}, ${num(seconds, 1)} s`)));
    const recordOf = new Map(records.map((record) => [record.step, record]));
    evaluated.replaceChildren(...info.evaluated.slice().reverse().map((/** @type {number} */ step) => h("a", { href: link("list", `${id}/held_out`, step), class: "step" },
      h("b", null, String(step)), h("span", null, `score ${num((recordOf.get(step) || {})["eval/score"])}`))));
    steps.replaceChildren(...info.steps.slice().reverse().slice(0, 400).map((/** @type {number} */ step) => {
      const record = recordOf.get(step) || {};
      return h("a", { href: link("list", id, step), class: "step" }, h("b", null, String(step)), h("span", null, `reward ${num(record["reward/mean"])}`), h("span", null, `${num(record.episodes)} episodes`));
    }));
    hint.textContent = info.steps.length ? "or drag over a curve; click a step for its episodes" : "or drag over a curve";
    checkpoints.replaceChildren(...info.checkpoints.map((/** @type {string} */ name) => h("li", null, plain(name, 100))));
    const unfolded = [...logs.querySelectorAll("[open] summary")].map((title) => title.textContent);
    logs.replaceChildren(...info.logs.map((/** @type {any} */ log) => h("details", { open: unfolded.includes(plain(log.name, 100)) }, h("summary", null, plain(log.name, 100)), h("pre", { tabindex: "0", "aria-label": `Last lines of ${plain(log.name, 100)}` }, plain(log.text)))));
    const name = quoted(info.run), last = info.steps.at(-1);
    commands.replaceChildren(...[`envgym train --resume ${name}`, `envgym eval --config ${name}/config.yaml --model ${quoted(id)}`, ...(info.replays && last ? [`envgym show ${name} --step ${last}`, `envgym replay ${name} --step ${last}`] : [])].map(commandLine));
    for (const part of main.querySelectorAll(".part")) /** @type {HTMLElement} */ (part).hidden = !part.querySelector("h2 + *")?.textContent;
  }
  async function load() {
    const now = isExport() ? info : await ask("run", id); // before the records: those of a run that ended are all there
    const asked = offset, update = await ask("metrics", id, asked);
    if (asked !== offset) return; // another call has these records
    records = records.concat(update.records);
    offset = update.offset;
    if (!update.records.length && JSON.stringify(now) === JSON.stringify(info)) return;
    Object.assign(info, now);
    state.textContent = info.state;
    state.className = `state ${info.state}`;
    draw();
  }
  await load();
  if (!records.length) draw();
  const timer = setInterval(() => { if (!isOver && !document.hidden && info.state === "running" && !isExport()) load().catch(() => {}); }, 2000);
  return () => { isOver = true; clearInterval(timer); };
}
