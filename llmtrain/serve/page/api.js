// The server's API: requests, streams of events, refusals, and tokens as the page wants them. Knows nothing of the page.

import { say } from "./words.js";

/** A failure that the page can show: one sentence, and the status if the server gave one. */
export class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

export async function call(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refusal(say("noServer"));
  });
  if (response.ok) return response;
  if (response.status === 401) throw new Refusal(say("needKey"), 401);
  const body = await response.json().catch(() => null);
  const sentence = sentenceOf(body?.error) ?? say("notOurs", response.status);
  const wait = response.headers.get("Retry-After");
  throw new Refusal(wait ? say("busy", sentence, wait) : sentence, response.status);
}

/** The API's error as one sentence, or nothing where there is none. */
function sentenceOf(error) {
  const text = String(error?.message ?? "").trim();
  return text ? text[0].toUpperCase() + text.slice(1) + (/[.!?。！？]$/.test(text) ? "" : ".") : undefined;
}

/** The JSON documents of a stream of server-sent events, until `[DONE]`. */
export async function* documents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Refusal(say("cut"));
    });
    if (done) throw new Refusal(say("cut"));
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((each) => each.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const document = JSON.parse(data);
      if (document.error) throw new Refusal(sentenceOf(document.error) ?? say("cut"));
      yield document;
    }
  }
}

/** The tokens of one choice as `{token, bytes, logprob, candidates}`: chats and completions write them differently. */
export function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({ ...readToken(each), candidates: (each.top_logprobs ?? []).map(readToken) }));
  }
  return (logprobs.tokens ?? []).map((token, number) => ({
    ...readToken({ token, logprob: logprobs.token_logprobs[number] }),
    candidates: Object.entries(logprobs.top_logprobs?.[number] ?? {}).map(([name, logprob]) => readToken({ token: name, logprob })),
  }));
}

/** Completions write half a character as `bytes:\xe4\xb8`; chats give the bytes themselves. */
function readToken({ token, logprob, bytes }) {
  const escaped = /^bytes:((?:\\x[0-9a-f]{2})+)$/i.exec(token);
  if (!bytes && escaped) bytes = escaped[1].split("\\x").slice(1).map((hex) => parseInt(hex, 16));
  return { token, logprob, bytes: Uint8Array.from(bytes ?? new TextEncoder().encode(token)) };
}
