// The server's endpoints, and nothing of the page. The key, where one is needed, stays in this tab.

const KEY = "headwater-key";

export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key.trim());

function headersOf(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return { ...(key ? { authorization: `Bearer ${key}` } : {}), ...more };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error);
}

export async function call(method, path, body) {
  const response = await checked(
    await fetch(path, {
      method,
      headers: headersOf(body === undefined ? {} : { "content-type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
    }),
  );
  return response.status === 204 ? null : response.json();
}

export async function download(path) {
  return (await checked(await fetch(path, { headers: headersOf() }))).blob();
}

const at = (name) => `/api/sessions/${encodeURIComponent(name)}`;
export const sessionAt = at;

// Says the messages; calls `heard` with every piece, and returns what the end said.
export async function converse({ request, session, whole, signal, began, heard }) {
  const named = session === null ? {} : { "x-headwater-session": encodeURIComponent(session) };
  if (session !== null && whole) named["x-headwater-history"] = "whole";
  const response = await checked(
    await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headersOf({ "content-type": "application/json", ...named }),
      body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  );
  began({
    session: decodeURIComponent(response.headers.get("x-headwater-session")),
    how: response.headers.get("x-headwater-how"),
    fed: Number(response.headers.get("x-headwater-fed")),
  });
  const end = { headwater: null, usage: null, reason: null };
  for await (const event of events(response.body)) {
    if (event.error) throw new Refused(500, event.error);
    const choice = event.choices[0];
    if (choice?.delta.content) heard(choice.delta.content);
    if (choice?.finish_reason) end.reason = choice.finish_reason;
    end.headwater = event.headwater ?? end.headwater;
    end.usage = event.usage ?? end.usage;
  }
  return end;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const parts = waiting.split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}
