// A run: its curves, alerts and steps, updated while it is running.
import { ask, isExport } from "./api.js";
import { chart } from "./charts.js";
import { fact, h, link, num, setting } from "./dom.js";

export const CURVES = /** @type {[string, any[]][]} */ ([
  ["held-out score", [{ name: "eval/score", low: "eval/low", high: "eval/high", points: true }]],
  ["held-out accuracy", [{ name: "eval/accuracy", points: true }]], ["held-out margin", [{ name: "eval/margin", points: true }]], ["held-out loss", [{ name: "eval/loss", points: true }]],
  ["score", [{ name: "score/mean" }]], ["reward", [{ name: "reward/mean", low: "reward/low", high: "reward/high" }]],
  ["loss", [{ name: "loss" }]], ["entropy", [{ name: "policy/entropy" }]], ["KL to the reference", [{ name: "policy/kl" }]],
  ["mismatch, nats", [{ name: "mismatch/max" }]], ["gradient norm", [{ name: "grad_norm" }]], ["tokens per episode", [{ name: "length/mean" }]],
  ["clipped share", [{ name: "policy/clip_fraction" }]], ["failed share", [{ name: "failures/share" }]],
  ["tokens per second", [{ name: "tokens/per_second" }]], ["accuracy", [{ name: "preference/accuracy" }, { name: "step/accuracy" }]],
]);
const PHASES = ["rollout", "score", "prepare", "learn", "sync", "eval", "checkpoint"];

/** @param {HTMLElement} main @param {string} id @returns {Promise<() => void>} */
export async function run(main, id) {
  const info = await ask("run", id);
  const charts = CURVES.map(([title, lines]) => chart(title, lines));
  const phases = h("div", { class: "phases", role: "img" }), alarms = h("ul", { class: "alarms" }), steps = h("div", { class: "steps" }), evaluated = h("div", { class: "steps" });
  const state = h("span", { class: `state ${info.state}` }, info.state), facts = h("dl", { class: "facts" });
  main.replaceChildren(h("h1", null, id, " ", state), facts, alarms, h("div", { class: "charts" }, charts.map((curves) => curves.element)),
    h("h2", null, "Time by phase"), phases, h("h2", null, "Steps"), steps, h("h2", null, "Held-out evaluations"), evaluated);
  /** @type {any[]} */
  let records = [];
  let offset = 0, isOver = false;
  function draw() {
    const evals = info.summary.eval || {};
    facts.replaceChildren(fact("environment", setting(info.settings["env.name"])), fact("learner", setting(info.settings["learner.name"])), fact("model", setting(info.settings.model)),
      fact("steps", `${num(records.length ? records.at(-1).step : 0)} of ${num(info.settings.steps)}`),
      fact("held-out score", evals.after ? `${num(evals.before?.score)} → ${num(evals.after?.score)}` : "–"), fact("seed", setting(info.settings.seed)));
    for (const record of records) {
      const spread = (record["reward/std"] ?? NaN) * 1.96 / Math.sqrt(record.episodes || NaN);
      if (Number.isFinite(spread)) { record["reward/low"] = record["reward/mean"] - spread; record["reward/high"] = record["reward/mean"] + spread; }
      const interval = record["eval/ci95"];
      if (Array.isArray(interval)) [record["eval/low"], record["eval/high"]] = interval;
    }
    charts.forEach((curves) => curves.set(records));
    alarms.replaceChildren(...info.alarms.slice(-12).map((/** @type {any} */ alarm) => h("li", null, h("b", null, `step ${alarm.step}`), ` ${alarm.text}`)));
    const sums = PHASES.map((name) => records.reduce((sum, record) => sum + (record[`seconds/${name}`] || 0), 0)), total = sums.reduce((a, b) => a + b, 0) || 1;
    phases.setAttribute("aria-label", PHASES.map((name, n) => `${name} ${Math.round((sums[n] * 100) / total)}%`).join(", "));
    phases.replaceChildren(...PHASES.map((name, n) => sums[n] / total < 0.005 ? "" : h("span", { class: `phase p${n}`, vars: { "--w": `${(sums[n] * 100) / total}%` }, title: `${name}: ${num(sums[n], 1)} s` }, sums[n] / total < 0.06 ? "" : `${name} ${Math.round((sums[n] * 100) / total)}%`)));
    const recordOf = new Map(records.map((record) => [record.step, record]));
    evaluated.replaceChildren(...info.evaluated.slice().reverse().map((/** @type {number} */ step) => h("a", { href: link("list", `${id}/held_out`, step), class: "step" },
      h("b", null, String(step)), h("span", null, `score ${num((recordOf.get(step) || {})["eval/score"])}`))));
    steps.replaceChildren(...info.steps.slice().reverse().slice(0, 400).map((/** @type {number} */ step) => {
      const record = recordOf.get(step) || {};
      return h("a", { href: link("list", id, step), class: "step" }, h("b", null, String(step)), h("span", null, `reward ${num(record["reward/mean"])}`), h("span", null, `${num(record.episodes)} episodes`));
    }));
  }
  async function load() {
    const update = await ask("metrics", id, offset);
    if (update.records.length || update.state !== info.state) {
      records = records.concat(update.records);
      offset = update.offset;
      const now = isExport() ? info : await ask("run", id);
      Object.assign(info, { steps: now.steps, evaluated: now.evaluated, state: now.state, summary: now.summary, alarms: now.alarms });
      state.textContent = info.state;
      state.className = `state ${info.state}`;
      draw();
    }
  }
  await load();
  if (!records.length) draw();
  const timer = setInterval(() => { if (!isOver && !document.hidden && info.state === "running" && !isExport()) load().catch(() => {}); }, 2000);
  return () => { isOver = true; clearInterval(timer); };
}

