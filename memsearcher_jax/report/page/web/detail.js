// One trajectory, from its question to its stop reason. Text from models and web pages becomes text nodes, never markup.

const SNIPPET_LENGTH = 160;  // characters of a passage in its summary

// An element with attributes and children; a string child is text, never markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null));
  return element;
}

function section(title, ...children) {
  return make("div", {class: "part"}, make("h5", {}, title), ...children);
}

function prose(text, style = "") {
  return make("div", {class: `prose ${style}`, dir: "auto"}, text);
}

function badge(text, style) {
  return make("span", {class: `badge ${style}`}, text);
}

function format(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// A stream has the accuracy of the answers to its questions.
function outcomeBadge(entry) {
  if (entry.accuracy !== null) return badge(`${Math.round(100 * entry.accuracy)} % right`, entry.accuracy === 1 ? "good" : "");
  if (entry.correct === null) return badge("not scored", "");
  return entry.correct ? badge("✓ correct", "good") : badge("✗ wrong", "bad");
}

function showTrajectory(entry, record, passage) {
  const parts = [
    make("h3", {tabindex: "-1", dir: "auto"}, entry.question),
    make("p", {class: "origin"}, origin(entry)),
    outcome(entry, record),
  ];
  if (record.questions.length) parts.push(showQuestions(entry, record));
  let memory = "";
  record.turns.forEach((turn, number) => {
    const before = turn.memory ?? memory;
    parts.push(showTurn(number + 1, turn, before, number ? memory : null, passage));
    memory = turn.new_memory;
  });
  if (record.tools.length) parts.push(section("Tools", ...record.tools.map(showTool)));
  if (record.transcript) parts.push(section("Transcript of the last context", prose(record.transcript, "mono")));
  return parts;
}

// A call of a tool of the run's own, in the order of the trajectory: the complete result, of which a turn may show a part.
function showTool(call) {
  const body = call.error ? make("p", {class: "alarm"}, call.error) : prose(call.text, "mono");
  return make("details", {class: "passage"},
    make("summary", {dir: "auto"}, make("b", {}, call.tool), " ", make("span", {class: "snippet"}, call.arguments)), body);
}

// Those of a stream, with their answers where the stream was read to its end.
function showQuestions(entry, record) {
  return section("Questions", prose(entry.answer || record.questions.join("\n"), "mono"));
}

function origin(entry) {
  const words = [entry.dataset, entry.id, entry.step === null ? "" : `step ${entry.step}, rollout ${entry.rollout}`];
  return [...words.filter(Boolean), counted(entry.turns, "turn"), counted(entry.tokens, "token")].join(" · ");
}

function outcome(entry, record) {
  const rows = [
    ...(record.questions.length ? [["questions", `${record.questions.length} `, outcomeBadge(entry)]] : [
      ["answer", entry.stop === "answered" ? make("strong", {dir: "auto"}, entry.answer) : "none", " ", outcomeBadge(entry)],
      ["golden", record.golden_answers.join(" | ") || "none"],
    ]),
    ["reward", `${format(entry.reward)}  ${record.reason}`.trim()],
    ["stop reason", make("code", {}, entry.stop), `: ${STOP_DESCRIPTIONS[entry.stop]}`],
  ];
  if (record.error) rows.push(["error", make("span", {class: "alarm"}, record.error)]);
  const scores = Object.entries(record.scores).map(([name, value]) => `${name} ${format(value)}`);
  if (scores.length) rows.push(["scores", scores.join(", ").replaceAll("_", " ")]);
  const counts = Object.entries(record.counts).map(([name, value]) => `${name} ${value}`);
  if (counts.length) rows.push(["counts", counts.join(", ").replaceAll("_", " ")]);
  return make("dl", {class: "outcome"}, ...rows.flatMap(([name, ...cells]) =>
    [make("dt", {}, name), make("dd", {dir: "auto"}, ...cells)]));
}

// `previous` is the memory that the previous turn wrote, null for the first turn.
function showTurn(number, turn, before, previous, passage) {
  const tokens = turn.tokens === null ? "" : counted(turn.tokens, "token");
  const parts = [make("h4", {}, `Turn ${number} `, make("small", {}, tokens))];
  if (turn.has_memory) {
    const emptied = previous && !before ? badge("the previous memory was not carried over", "warn") : null;
    parts.push(section("Memory at the start", before ? prose(before) : make("p", {class: "none"}, "empty"), emptied));
  }
  if (turn.thought) parts.push(section("Thought", prose(turn.thought, "thought")));
  if (turn.action) parts.push(section("Action", prose(turn.action, "mono")));
  parts.push(...turn.searches.map(search => showSearch(search, passage)));
  if (turn.observation) {
    parts.push(section("Observation", make("details", {},
      make("summary", {}, "results as the model saw them, clipped"), prose(turn.observation, "mono"))));
  }
  if (turn.new_memory) parts.push(section("Rewritten memory", changes(before, turn.new_memory), qualityBadges(turn)));
  else if (turn.rewrite) parts.push(section("Rewrite without a memory", prose(turn.rewrite, "mono")));
  return make("section", {class: "turn", "aria-label": `Turn ${number}`}, ...parts);
}

// The metrics of docs/evaluate.md for this rewrite. Spellings of one golden answer count as one.
function qualityBadges(turn) {
  const badges = [], {golden, supporting} = turn;
  if (golden?.shown) badges.push(badge(golden.shown.length ? "golden answer shown" : "golden answer not shown", ""));
  if (golden?.held) {
    const style = golden.held.length ? "good" : golden.shown?.length ? "bad" : "";
    badges.push(badge(golden.held.length ? "golden answer in the memory" : "golden answer not in the memory", style));
  }
  if (golden?.lost?.length && !golden.held.length) badges.push(badge("golden answer lost", "bad"));
  for (const name of supporting?.shown ?? []) {
    const kept = supporting.held?.includes(name);
    badges.push(badge(`${name} ${kept ? "shown and kept" : "shown, not kept"}`, kept ? "good" : "bad"));
  }
  for (const name of supporting?.lost ?? []) badges.push(badge(`${name} lost`, "bad"));
  if (turn.copied !== null) badges.push(badge(`${Math.round(100 * turn.copied)} % copied verbatim`, ""));
  return badges.length ? make("p", {class: "badges"}, ...badges.flatMap(one => [one, " "])) : null;
}

// The new memory with its changes marked; a first memory is shown as it is.
function changes(before, after) {
  if (!before.trim()) return prose(after);
  const tags = {same: "span", removed: "del", added: "ins"};
  const children = wordDiff(before, after).flatMap(([change, text], number) => {
    const space = text.match(/^\s*/)[0];
    // The first word of a text has no white space before it, and would join the preceding run.
    return [space || (number ? " " : ""), make(tags[change], {}, text.slice(space.length))];
  });
  return make("div", {class: "prose diff", dir: "auto"}, ...children);
}

function showSearch(search, passage) {
  const passages = search.passages.map(([number, score], rank) => {
    const contents = passage(number), cut = contents.indexOf("\n");
    const title = (cut < 0 ? contents : contents.slice(0, cut)).trim().replace(/^"(.*)"$/, "$1");
    const body = cut < 0 ? "" : contents.slice(cut + 1);
    const start = body.length > SNIPPET_LENGTH ? body.slice(0, SNIPPET_LENGTH).trimEnd() + " …" : body;
    return make("details", {class: "passage"},
      make("summary", {dir: "auto"}, `${rank + 1}. `, make("b", {}, title), " ", make("span", {class: "snippet"}, start)),
      prose(body), make("p", {class: "origin"}, `score ${format(score)}`));
  });
  const query = make("p", {class: "query", dir: "auto"}, make("b", {}, search.query), ` (top ${search.top_n})`);
  const error = search.error ? make("p", {class: "alarm"}, search.error) : null;
  return section("Search", query, error, ...passages);
}
