// Two runs, checkpoints or evaluations on the same tasks.
import { ask } from "./api.js";
import { fact, h, link, num, passOf, plain } from "./dom.js";

/** @param {HTMLElement} main @param {string} a @param {number} stepA @param {string} b @param {number} stepB @returns {Promise<void>} */
export async function compare(main, a, stepA, b, stepB) {
  const results = await ask("compare", a, stepA, b, stepB);
  const name = (/** @type {string} */ id, /** @type {number} */ step) => (step ? `${id}, step ${step}` : id);
  const side = (/** @type {string} */ id, /** @type {number} */ step, /** @type {number[]} */ indices) => indices.slice(0, 8).map((n) => h("a", { href: link("episode", id, step, n) }, ` ${n}`));
  main.replaceChildren(h("h1", null, "B against A"), h("p", null, h("b", null, "A "), name(a, stepA), h("br"), h("b", null, "B "), name(b, stepB)), ...results.map((/** @type {any} */ result) => h("section", null,
    result.pass ? h("h2", null, `${passOf(result.pass)} episodes`) : "",
    h("dl", { class: "facts" }, fact(`${result.of}, B − A, 95% interval`, result.ci95 ? `${num(result.difference)} [${num(result.ci95[0])}, ${num(result.ci95[1])}]` : num(result.difference)), fact("shared tasks", num(result.n_tasks)), fact("B better", num(result.better)), fact("B worse", num(result.worse)), fact("equal", num(result.equal)),
      fact("p", num(result.p_value)), fact("tasks only in A", num(result.only_a)), fact("tasks only in B", num(result.only_b))),
    result.n_tasks ? "" : h("p", null, "A and B have no task in common, so they cannot be compared."),
    h("div", { class: "wide" }, h("table", null, h("thead", null, h("tr", null, ["task", "A", "B", "difference", "episodes of A", "episodes of B"].map((heading, n) => h("th", { class: n ? "n" : null }, heading)))),
      h("tbody", null, result.tasks.slice(0, 1000).map((/** @type {any} */ task) => h("tr", { class: Math.abs(task.b - task.a) >= 0.5 ? "flip" : null }, h("td", { class: "key" }, plain(task.key, 160)), h("td", { class: "n" }, num(task.a)),
        h("td", { class: "n" }, num(task.b)), h("td", { class: `n ${task.b > task.a ? "up" : task.b < task.a ? "down" : ""}` }, num(task.b - task.a)), h("td", { class: "n" }, side(a, stepA, task.episodes[0])), h("td", { class: "n" }, side(b, stepB, task.episodes[1]))))))))));
}
