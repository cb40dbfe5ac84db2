// Several runs: their curves over each other, with one color per run, and the settings that differ.
import { ask } from "./api.js";
import { chart } from "./charts.js";
import { h, link, num, plain, setting, table } from "./dom.js";
import { INKS, sharedAxis } from "./plot.js";
import { CURVES } from "./run.js";

/** @param {HTMLElement} main @param {string[]} ids @returns {Promise<void>} */
export async function overlay(main, ids) {
  const runs = await Promise.all(ids.map(async (id) => ({ id, info: await ask("run", id), records: (await ask("metrics", id, 0)).records })));
  const axis = sharedAxis(), charts = CURVES.map(([title, lines]) => {
    const [{ name, points }] = lines.filter((/** @type {any} */ line) => runs.some((run) => run.records.some((/** @type {any} */ record) => typeof record[line.name] === "number"))).concat(lines);
    const curves = chart(title, runs.map((run) => ({ name: run.id, points })), axis, false);
    const steps = new Map();
    for (const run of runs) for (const record of run.records) if (typeof record[name] === "number") steps.set(record.step, { ...(steps.get(record.step) || { step: record.step }), [run.id]: record[name] });
    return { curves, records: [...steps.values()].sort((a, b) => a.step - b.step) };
  });
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.info.settings)))].filter((key) => new Set(runs.map((run) => JSON.stringify(run.info.settings[key]))).size > 1);
  const name = (/** @type {any} */ run, /** @type {number} */ n) => h("a", { href: link("run", run.id), class: "line-value", vars: { "--line-ink": `var(${INKS[n % INKS.length]})` } }, h("i", { class: "swatch" }), plain(run.id, 200));
  main.replaceChildren(h("h1", null, `${num(runs.length)} runs`), h("div", { class: "legend" }, runs.map(name)), h("div", { class: "charts" }, charts.map(({ curves }) => curves.element)), h("h2", null, "Settings that differ"),
    keys.length ? table(["setting", ...runs.map(name)], keys.map((key) => [plain(key, 200), ...runs.map((run) => setting(run.info.settings[key]))])) : h("p", null, "All settings are the same."));
  charts.forEach(({ curves, records }) => curves.set(records));
}
