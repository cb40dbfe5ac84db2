// What the page asks for: from the server or, in an exported file, from what it holds.

/** @type {Record<string, any> | null} */
let held = null;

/** True in an exported file. @returns {boolean} */
export function isExport() {
  return document.getElementById("held") !== null;
}

/** @returns {Promise<Record<string, any>>} */
async function unpack() {
  const packed = atob(/** @type {HTMLElement} */ (document.getElementById("held")).textContent || "");
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** The answer to a question, whose parts stand in an order that the server knows.
 * @param {...(string | number)} parts @returns {Promise<any>} */
export async function ask(...parts) {
  const path = parts.join("|");
  if (isExport()) {
    held = held || (await unpack());
    if (path in held && held[path].error) throw new Error(held[path].error);
    if (path in held) return held[path];
    const more = { episode: "this episode is not in the file: export with more --episodes",
      list: "the episodes of this step are not in the file: export with more --megabytes" };
    throw new Error(more[/** @type {"episode" | "list"} */ (parts[0])] || "this is not in the file");
  }
  const response = await fetch(`/api?q=${encodeURIComponent(path)}`);
  const answer = await response.json().catch(() => ({ error: `the server answers ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

/** Whether an answer can be had. @param {...(string | number)} parts @returns {Promise<boolean>} */
export async function has(...parts) {
  if (!isExport()) return true;
  held = held || (await unpack());
  return parts.join("|") in held;
}

const CHUNK = 10000;

/** All episodes of a step, column by column; `onPart` is called with what has come so far.
 * @param {string} id @param {number} step @param {(list: any) => void} onPart @returns {Promise<any>} */
export async function listOf(id, step, onPart) {
  const list = await ask("list", id, step, 0, 2000);
  onPart(list);
  while (!isExport() && list.columns.id.length < list.total) {
    const more = await ask("list", id, step, list.columns.id.length, CHUNK);
    if (!more.columns.id.length) break;
    for (const name of Object.keys(list.columns)) for (const value of more.columns[name]) list.columns[name].push(value);
    onPart(list);
  }
  return list;
}
