// Data of the page: from the server or, in an exported file, from the file itself.

/** @type {Record<string, any> | null} */
let stored = null;

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

/** The server's answer to a question, given as its parts in order.
 * @param {...(string | number)} parts @returns {Promise<any>} */
export async function ask(...parts) {
  const path = parts.join("|");
  if (isExport()) {
    stored = stored || (await unpack());
    if (path in stored && stored[path].error) throw new Error(stored[path].error);
    if (path in stored) return stored[path];
    const hints = { episode: "this episode is not in the file: export with more --episodes",
      list: "the episodes of this step are not in the file: export with more --megabytes" };
    throw new Error(hints[/** @type {"episode" | "list"} */ (parts[0])] || "this is not in the file");
  }
  const response = await fetch(`/api?q=${encodeURIComponent(path)}`);
  const answer = await response.json().catch(() => ({ error: `the server responded with status ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}


const CHUNK = 10000;

/** All episodes of a step, as columns; `onPart` is called with the episodes loaded so far.
 * @param {string} id @param {number} step @param {(list: any) => void} onPart @returns {Promise<any>} */
export async function listOf(id, step, onPart) {
  const list = await ask("list", id, step, 0, 2000);
  onPart(list);
  while (!isExport() && list.columns.id.length < list.total) {
    const chunk = await ask("list", id, step, list.columns.id.length, CHUNK);
    if (!chunk.columns.id.length) break;
    for (const name of Object.keys(list.columns)) for (const value of chunk.columns[name]) list.columns[name].push(value);
    onPart(list);
  }
  return list;
}
