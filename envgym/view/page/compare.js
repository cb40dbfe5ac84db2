// Two runs, checkpoints or evaluations on the same tasks.
import { ask } from "./api.js";
import { fact, h, link, num, plain } from "./dom.js";

/** @param {HTMLElement} main @param {string} a @param {number} stepA @param {string} b @param {number} stepB @returns {Promise<void>} */
export async function compare(main, a, stepA, b, stepB) {
  const told = await ask("compare", a, stepA, b, stepB);
  const name = (/** @type {string} */ id, /** @type {number} */ step) => (step ? `${id}, step ${step}` : id);
  const side = (/** @type {string} */ id, /** @type {number} */ step, /** @type {number[]} */ own) => own.slice(0, 8).map((n) => h("a", { href: link("episode", id, step, n) }, ` ${n}`));
  const interval = told.ci95 ? `${num(told.difference)} [${num(told.ci95[0])}, ${num(told.ci95[1])}]` : num(told.difference);
  main.replaceChildren(h("h1", null, "B against A"), h("p", null, h("b", null, "A "), name(a, stepA), h("br"), h("b", null, "B "), name(b, stepB)),
    h("dl", { class: "facts" }, fact(`${told.of}, B − A, 95% interval`, interval), fact("tasks of both", num(told.n_tasks)), fact("B better", num(told.better)), fact("B worse", num(told.worse)), fact("equal", num(told.equal)),
      fact("p", num(told.p_value)), fact("of A alone", num(told.only_a)), fact("of B alone", num(told.only_b))),
    told.n_tasks ? "" : h("p", null, "They have no task in common: nothing can be compared."),
    h("div", { class: "wide" }, h("table", null, h("thead", null, h("tr", null, ["task", "A", "B", "difference", "episodes of A", "episodes of B"].map((word, n) => h("th", { class: n ? "n" : null }, word)))),
      h("tbody", null, told.tasks.slice(0, 1000).map((/** @type {any} */ task) => h("tr", { class: Math.abs(task.b - task.a) >= 0.5 ? "flip" : null }, h("td", { class: "key" }, plain(task.key, 160)), h("td", { class: "n" }, num(task.a)),
        h("td", { class: "n" }, num(task.b)), h("td", { class: `n ${task.b > task.a ? "up" : task.b < task.a ? "down" : ""}` }, num(task.b - task.a)), h("td", { class: "n" }, side(a, stepA, task.episodes[0])), h("td", { class: "n" }, side(b, stepB, task.episodes[1]))))))));
}
