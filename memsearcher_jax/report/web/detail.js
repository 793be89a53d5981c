// One trajectory, read from its question to why it ended. Text of models and pages becomes text nodes, never markup.

const SNIPPET = 160;  // characters of a passage beside its title

// An element with attributes and children; a string child is text. There is no way to hand it markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

function part(title, ...children) {
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

function outcomeBadge(entry) {
  if (entry.right === null) return badge("not scored", "");
  return entry.right ? badge("✓ right", "right") : badge("✗ wrong", "wrong");
}

function showTrajectory(entry, record, passage) {
  const parts = [
    make("h3", {tabindex: "-1", dir: "auto"}, entry.question),
    make("p", {class: "where"}, whereFrom(entry)),
    ending(entry, record),
  ];
  let memory = "";
  record.turns.forEach((turn, number) => {
    const before = turn.memory ?? memory;
    parts.push(showTurn(number + 1, turn, before, number ? memory : null, passage));
    memory = turn.kept;
  });
  if (record.transcript) parts.push(part("Transcript of the last context", prose(record.transcript, "mono")));
  return parts;
}

function whereFrom(entry) {
  const words = [entry.dataset, entry.id, entry.step === null ? "" : `step ${entry.step}, rollout ${entry.rollout}`];
  return [...words.filter(Boolean), `${entry.turns} turns`, `${entry.tokens.toLocaleString("en")} tokens`].join(" · ");
}

function ending(entry, record) {
  const rows = [
    ["answer", entry.stop === "answered" ? make("strong", {dir: "auto"}, entry.answer) : "none", " ", outcomeBadge(entry)],
    ["golden", record.golden.join(" | ") || "none"],
    ["reward", `${format(entry.reward)}  ${record.reason}`.trim()],
    ["ended", make("code", {}, entry.stop), `: ${WHY[entry.stop]}`],
  ];
  if (record.error) rows.push(["error", make("span", {class: "alarm"}, record.error)]);
  const scores = Object.entries(record.scores).map(([name, value]) => `${name} ${format(value)}`);
  if (scores.length) rows.push(["scores", scores.join(", ").replaceAll("_", " ")]);
  const counts = Object.entries(record.counts).map(([name, value]) => `${name} ${value}`);
  if (counts.length) rows.push(["counted", counts.join(", ").replaceAll("_", " ")]);
  return make("dl", {class: "ending"}, ...rows.flatMap(([name, ...cells]) =>
    [make("dt", {}, name), make("dd", {dir: "auto"}, ...cells)]));
}

// `kept` is what the turn before wrote, null for the first turn: a memory that starts otherwise is worth a word.
function showTurn(number, turn, before, kept, passage) {
  const tokens = turn.tokens === null ? "" : `${turn.tokens.toLocaleString("en")} tokens`;
  const head = make("h4", {}, `Turn ${number} `, make("small", {}, tokens));
  const parts = [head];
  if (turn.remembers) {
    const emptied = kept && !before ? badge("what the turn before kept was not handed on", "warn") : null;
    parts.push(part("Memory at the start", before ? prose(before) : make("p", {class: "none"}, "empty"), emptied));
  }
  if (turn.think) parts.push(part("Think", prose(turn.think, "think")));
  if (turn.act) parts.push(part("Act", prose(turn.act, "mono")));
  parts.push(...turn.searches.map(search => showSearch(search, passage)));
  if (turn.observation) {
    parts.push(part("What the model was shown", make("details", {},
      make("summary", {}, "clipped or changed on its way to the model"), prose(turn.observation, "mono"))));
  }
  if (turn.kept) parts.push(part("Memory rewritten", changes(before, turn.kept), qualityBadges(turn)));
  else if (turn.rewrite) parts.push(part("Reply without a memory", prose(turn.rewrite, "mono")));
  return make("section", {class: "turn", "aria-label": `Turn ${number}`}, ...parts);
}

// What docs/memory_quality.md measures of this rewrite. Spellings of one golden answer count as one.
function qualityBadges(turn) {
  const badges = [], {golden, supporting} = turn;
  if (golden?.shown) badges.push(badge(golden.shown.length ? "golden answer shown" : "golden answer not shown", ""));
  if (golden?.held) {
    const style = golden.held.length ? "right" : golden.shown?.length ? "wrong" : "";
    badges.push(badge(golden.held.length ? "golden answer in the memory" : "golden answer not in the memory", style));
  }
  if (golden?.lost?.length && !golden.held.length) badges.push(badge("golden answer lost", "wrong"));
  for (const name of supporting?.shown ?? []) {
    const kept = supporting.held?.includes(name);
    badges.push(badge(`${name} ${kept ? "shown and kept" : "shown, not kept"}`, kept ? "right" : "wrong"));
  }
  for (const name of supporting?.lost ?? []) badges.push(badge(`${name} lost`, "wrong"));
  if (turn.copied !== null) badges.push(badge(`${Math.round(100 * turn.copied)} % copied word for word`, ""));
  return badges.length ? make("p", {class: "badges"}, ...badges.flatMap(one => [one, " "])) : null;
}

// The new memory with its changes; a first memory is all new and shown plain.
function changes(before, kept) {
  if (!before.trim()) return prose(kept);
  const tags = {same: "span", removed: "del", added: "ins"};
  const children = wordDiff(before, kept).flatMap(([change, text], number) => {
    const space = text.match(/^\s*/)[0];
    // The first word of a text has no white space before it, and would touch the run in front of it.
    return [space || (number ? " " : ""), make(tags[change], {}, text.slice(space.length))];
  });
  return make("div", {class: "prose diff", dir: "auto"}, ...children);
}

function showSearch(search, passage) {
  const found = search.passages.map(([number, score], rank) => {
    const contents = passage(number), cut = contents.indexOf("\n");
    const title = (cut < 0 ? contents : contents.slice(0, cut)).trim().replace(/^"+|"+$/g, "");
    const body = cut < 0 ? "" : contents.slice(cut + 1);
    const start = body.length > SNIPPET ? body.slice(0, SNIPPET).trimEnd() + " …" : body;
    return make("details", {class: "passage"},
      make("summary", {dir: "auto"}, `${rank + 1}. `, make("b", {}, title), " ", make("span", {class: "snippet"}, start)),
      prose(body), make("p", {class: "where"}, `score ${format(score)}`));
  });
  const query = make("p", {class: "query", dir: "auto"}, make("b", {}, search.query), ` (top ${search.top_n})`);
  const error = search.error ? make("p", {class: "alarm"}, search.error) : null;
  return part("Search", query, error, ...found);
}
