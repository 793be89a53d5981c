"use strict";
const $ = (id) => document.getElementById(id);
let model = null, running = null;

/** A new element with text; what comes from the agent is never parsed as HTML. */
function add(parent, tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

/** The text under a heading in a turn's card, made when it is first needed. */
function part(card, heading, className) {
  let found = card.querySelector(`.${className}`);
  if (!found) {
    add(card, "h3", "", heading);
    found = add(card, "p", `text ${className}`, "");
  }
  return found;
}

function passage(parent, { id, contents }) {
  const [title, ...lines] = contents.split("\n");
  const details = add(parent, "details", "", "");
  add(add(details, "summary", "", `${title.replace(/^"|"$/g, "")} `), "small", "", id);
  add(details, "p", "text", lines.join("\n"));
}

function showTurn(event) {
  const card = add($("turns"), "li", "", "");
  card.reply = "";
  add(card, "h2", "", event.turn ? `Turn ${event.turn}` : "Before the first turn");
  if (event.memory) part(card, "Memory", "memory").textContent = event.memory;
}

const SHOW = {
  reply(event, card, text) {
    card.reply += text;
    const [thought, ...action] = card.reply.split(/<\/think>|(?=✿FUNCTION✿)/);
    part(card, "Thought", "thought").textContent = thought.replace(/^\s*<think>/, "").trim();
    if (action.join("").trim()) part(card, "Action", "action").textContent = action.join("").trim();
  },
  search(event, card) {
    for (const query of event.queries) {
      add(card, "h3", "", "Search");
      add(card, "p", "text query", query);
    }
  },
  results(event, card) {
    for (const result of event.results) {
      if (result.error) add(card, "p", "text error", result.error);
      for (const one of result.passages) passage(card, one);
    }
  },
  call(event, card) {
    add(card, "h3", "", event.tool);
    add(card, "p", "text query", JSON.stringify(event.arguments));
  },
  result(event, card) { add(card, "p", event.error ? "text error" : "text", event.error || event.text); },
  rewrite(event, card, text) { part(card, "New memory", "rewritten").textContent += text; },
  memory(event, card) { part(card, "New memory", "rewritten").textContent = event.text || "none"; },
  end(event, card, text, answer) {
    $("answer").hidden = false;
    add($("answer"), "p", "", answer || `No answer: ${event.reason}.`);
    if (event.sources.length) add($("answer"), "h3", "", "Sources");
    for (const source of event.sources) passage($("answer"), source);
    const seconds = ((performance.now() - running.began) / 1000).toFixed(1);
    setStatus(`${$("turns").children.length} turns in ${seconds} s; seed ${event.seed}`);
  },
};

function setStatus(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "error" : "";
}

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) $("key-label").hidden = false;
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error?.message ?? body.detail ?? `status ${response.status}`);
  throw Object.assign(error, { status: response.status });
}

async function loadModel() {
  [model] = (await (await request("/v1/models")).json()).data;
  $("model").textContent = model.id;
  $("text-label").hidden = !model.reads_texts;
}

function show(chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const delta = chunk.choices[0]?.delta, event = delta?.memsearcher?.[0];
  if (!event) return;
  if (event.type === "turn" || !$("turns").lastElementChild) showTurn(event);
  SHOW[event.type]?.(event, $("turns").lastElementChild, delta.reasoning_content, delta.content);
}

async function ask() {
  const messages = [{ role: "user", content: $("question").value }];
  if (model.reads_texts) messages.unshift({ role: "user", content: $("text").value });
  const body = JSON.stringify({ model: model.id, messages, stream: true });
  const response = await request("/v1/chat/completions", { method: "POST", body, signal: running.signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) show(JSON.parse(line.slice(6)));
    }
  }
}

$("form").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  if (running) return;
  const controller = new AbortController();
  running = { signal: controller.signal, stop: () => controller.abort(), began: performance.now() };
  $("turns").replaceChildren();
  $("answer").replaceChildren();
  $("answer").hidden = $("ask").disabled = true;
  $("stop").disabled = false;
  setStatus("The agent is at work …");
  try {
    if (!model) await loadModel();
    await ask();
  } catch (error) {
    setStatus(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  running = null;
  $("ask").disabled = false;
  $("stop").disabled = true;
});
$("stop").addEventListener("click", () => running?.stop());
function start() {
  loadModel().then(() => setStatus("")).catch((error) => {
    const needsKey = error.status === 401 && !$("key").value;
    setStatus(needsKey ? "Enter the API key." : error.message, !needsKey);
  });
}
start();
$("key").addEventListener("change", start);
