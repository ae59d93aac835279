"""GET /: one self-contained page to talk to the model and see what the cache saved."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

__all__ = ["page"]

# All text of the model and of the user enters the page as textContent, never as markup.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Phloem</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  :root { color-scheme: light dark; }
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1rem;
         min-height: 100vh; box-sizing: border-box; display: flex; flex-direction: column; }
  header, form { display: flex; gap: .6rem; align-items: baseline; flex-wrap: wrap; }
  h1 { font-size: 1.2rem; margin: 0; } main { flex: 1; padding: 1rem 0; }
  small, a { color: GrayText; } a { margin-right: .5rem; }
  .turn { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; padding: .5rem .8rem;
          border-radius: .5rem; border: 1px solid color-mix(in srgb, GrayText 30%, transparent); }
  .user { background: color-mix(in srgb, Highlight 18%, transparent); margin-left: 3rem; }
  .error { border-color: crimson; }
  textarea { flex: 1; font: inherit; padding: .4rem; resize: vertical; }
  button, input { font: inherit; }
</style></head><body>
<header><h1>Phloem</h1><small id="model">...</small><span style="flex:1"></span>
  <a href="/docs">API</a><a href="/metrics">metrics</a><a href="/health">health</a>
  <button id="fresh" type="button">new chat</button></header>
<main id="talk" aria-live="polite"></main>
<form id="form">
  <textarea id="text" rows="2" placeholder="Write a message (Enter sends)" autofocus></textarea>
  <button id="send">send</button>
  <input id="key" type="password" placeholder="API key" autocomplete="off" hidden>
</form>
<script>
"use strict";
const $ = id => document.getElementById(id);
let messages = [], running = null;
const headers = () => ({"content-type": "application/json",
  ...($("key").value ? {"authorization": "Bearer " + $("key").value} : {})});
function show(kind, text) {
  const turn = document.createElement("div");
  turn.className = "turn " + kind; turn.textContent = text;
  $("talk").append(turn); turn.scrollIntoView(); return turn;
}
function note(text) {
  const line = document.createElement("small");
  line.textContent = text; $("talk").append(line);
}
async function failure(answer) {
  if (answer.status === 401) $("key").hidden = false;
  try { return (await answer.json()).error.message; } catch { return "HTTP " + answer.status; }
}
async function models() {
  const answer = await fetch("/v1/models", {headers: headers()});
  $("model").textContent = answer.ok ? (await answer.json()).data[0].id : await failure(answer);
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\\n\\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.slice(6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
async function ask() {
  const start = performance.now();
  let first = 0, text = "", turn = null;
  running = new AbortController(); $("send").textContent = "stop";
  try {
    const answer = await fetch("/v1/chat/completions", {method: "POST", headers: headers(),
      signal: running.signal, body: JSON.stringify({messages, stream: true,
      stream_options: {include_usage: true}})});
    if (!answer.ok) throw new Error(await failure(answer));
    turn = show("assistant", "");
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta.content;
      if (piece) { first ||= performance.now(); text += piece; turn.textContent = text;
                   turn.scrollIntoView({block: "end"}); }
      if (event.usage) {
        const u = event.usage, all = (performance.now() - start) / 1000;
        note(`${u.prompt_tokens_details.cached_tokens} of ${u.prompt_tokens} prompt tokens ` +
          `cached; first text after ${((first || start) - start).toFixed(0)} ms; ` +
          `${u.completion_tokens} tokens in ${all.toFixed(1)} s`);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  }
  if (text) messages.push({role: "assistant", content: text}); else messages.pop();
  running = null; $("send").textContent = "send"; models();
}
$("form").onsubmit = event => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value.trim();
  if (!text) return;
  $("text").value = ""; show("user", text);
  messages.push({role: "user", content: text}); ask();
};
$("text").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault(); $("form").requestSubmit();
  }
};
$("fresh").onclick = () => {
  if (running) running.abort();
  messages = []; $("talk").replaceChildren(); $("text").focus();
};
$("key").onchange = models; models();
</script></body></html>
"""


async def page(_: Request) -> Response:
    """The page; it holds no secret, so it needs no key, and asks for one if the API does."""
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})


_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
