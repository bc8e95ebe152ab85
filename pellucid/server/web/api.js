// Requests to this server with the key of this tab, and the chat stream. Used by every other module.

const BASE = new URL(".", document.baseURI);
const STORED_KEY = "pellucid.api_key";

/** Dispatches "unauthorized" when the server answers 401, and "key" when another key is set. */
export const access = new EventTarget();

export const baseUrl = new URL("v1", BASE).href;

export function hasKey() {
  return sessionStorage.getItem(STORED_KEY) !== null;
}

export function setKey(key) {
  sessionStorage.setItem(STORED_KEY, key);
  access.dispatchEvent(new Event("key"));
}

export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (hasKey()) headers.set("Authorization", `Bearer ${sessionStorage.getItem(STORED_KEY)}`);
  const response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" }).catch((error) => {
    throw error instanceof TypeError ? new Error("The server cannot be reached.") : error;
  });
  if (response.status === 401) access.dispatchEvent(new Event("unauthorized"));
  return response;
}

/** The JSON of a GET; throws an Error with the server's message when it is refused. */
export async function getJson(path) {
  const response = await request(path);
  if (!response.ok) throw new Error(await refusal(response));
  return response.json();
}

/** The chunks of one chat completion. Throws an Error that can be shown, also when the answer is cut off. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  let finished = false;
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = parse(data);
    if (!chunk) break;
    if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
    finished ||= chunk.choices?.some((choice) => choice.finish_reason) ?? false;
    yield chunk;
  }
  if (!finished) throw new Error("The answer was cut off: the connection ended before it was complete.");
}

/** The JSON in `text`, null where it is none. */
function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

async function refusal(response) {
  const text = await response.text();
  // Not JSON where a proxy in between answers with a page of its own.
  const message = parse(text)?.error?.message ?? text;
  const after = response.headers.get("Retry-After");
  const again = response.status === 503 && after ? ` Try again in ${after} s.` : "";
  return `${message.slice(0, 500) || response.statusText || "No reason given."} (HTTP ${response.status})${again}`;
}

/** The data of each server-sent event. A connection that breaks ends it: what is missing tells. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    let data = [];
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      // A CR at the end may be half of a CRLF: it waits.
      const lines = (rest + (value ?? "")).split(done ? /\r\n|\n|\r/ : /\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      if (done && rest) lines.push(rest);
      if (done) lines.push("");
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
