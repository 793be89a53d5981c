// The trajectory browser: filters, a virtual list, keyboard, theme.

const ROW_HEIGHT = 84;  // pixels, as in page.css
const OVERSCAN = 6;     // rows rendered above and below the visible ones
const TIME_SLICE = 12;  // milliseconds of search before control returns to the browser

const byId = id => document.getElementById(id);
const elements = name => [...document.querySelectorAll(`script[data-rows="${name}"]`)];
const parse = element => JSON.parse(element.textContent);

// Rows in blocks; a block is parsed when a row of it is requested, and the most recent blocks are cached.
function blocks(name) {
  const all = elements(name), parsed = new Map();
  const size = all.length ? parse(all[0]).length : 1;
  return row => {
    const number = Math.floor(row / size);
    if (!parsed.has(number)) {
      if (parsed.size >= 20) parsed.delete(parsed.keys().next().value);
      parsed.set(number, parse(all[number]));
    }
    return parsed.get(number)[row % size];
  };
}

const index = parse(elements("index")[0]), STOP_DESCRIPTIONS = parse(elements("stop_descriptions")[0]);
const record = blocks("trajectories"), passage = blocks("passages");
const [list, rows, detail, browser] = ["list", "rows", "detail", "browser"].map(byId);
const filters = ["dataset", "outcome", "stop", "step"];
const OUTCOMES = {true: "correct", false: "wrong", null: "not scored"};
const outcomeOf = entry => entry.accuracy === null ? OUTCOMES[entry.correct]
  : entry.accuracy === 1 ? "all right" : entry.accuracy ? "some right" : "none right";
const valueOf = {
  dataset: entry => entry.dataset || "unnamed",
  outcome: outcomeOf,
  stop: entry => entry.stop,
  step: entry => entry.step === null ? "" : String(entry.step),
};

let shown = [];     // indices of the trajectories that pass the filters, in order
let selected = -1;  // index of the open trajectory
let version = 0;    // of the filters: an outdated search stops

// ---- text search: the lower-case text of a trajectory, cached when it is first searched

const trajectoryTexts = [], passagesOf = [], passageTexts = [];

function texts(value) {
  if (typeof value === "string") return [value];
  return value && typeof value === "object" ? Object.values(value).flatMap(texts) : [];
}

function passageContains(number, word) {
  passageTexts[number] ??= passage(number).toLowerCase();
  return passageTexts[number].includes(word);
}

function contains(number, word) {
  if (trajectoryTexts[number] === undefined) {
    const full = record(number);
    trajectoryTexts[number] = texts([index[number], full]).join("\n").toLowerCase();
    passagesOf[number] = full.turns.flatMap(turn => turn.searches.flatMap(search => search.passages.map(([one]) => one)));
  }
  return trajectoryTexts[number].includes(word) || passagesOf[number].some(one => passageContains(one, word));
}

// Words, and phrases in quotes; all must occur. An unclosed quote is ignored.
function termsOf(text) {
  return [...text.matchAll(/"([^"]+)"|([^\s"]+)/g)].map(match => match[1] ?? match[2]);
}

async function refresh() {
  const mine = ++version;
  const wanted = filters.map(name => [name, byId(name).value]).filter(([, value]) => value);
  const terms = termsOf(byId("text").value.toLowerCase());
  let passing = [...index.keys()].filter(number => wanted.every(([name, value]) => valueOf[name](index[number]) === value));
  if (terms.length) {
    const candidates = passing;
    passing = [];
    let pause = performance.now() + TIME_SLICE;
    for (const [position, number] of candidates.entries()) {
      if (terms.every(term => contains(number, term))) passing.push(number);
      if (performance.now() > pause) {
        byId("count").textContent = `searching ${position + 1} of ${candidates.length} …`;
        await new Promise(resume => setTimeout(resume));
        if (mine !== version) return;
        pause = performance.now() + TIME_SLICE;
      }
    }
  }
  shown = ordered(passing);
  byId("count").textContent = `${shown.length.toLocaleString("en")} of ${index.length.toLocaleString("en")} trajectories`;
  list.scrollTop = 0;
  if (shown.includes(selected)) reveal();
  else select(shown[0] ?? -1);
  render();
}

function ordered(numbers) {
  const [field, direction] = byId("order").value.split(" ");
  if (!field) return numbers;
  const sign = direction === "up" ? 1 : -1;
  // A non-finite reward is a string; it is sorted last in either direction.
  const key = number => Number.isFinite(Number(index[number][field])) ? sign * index[number][field] : Infinity;
  return numbers.sort((a, b) => key(a) - key(b) || a - b);
}

// ---- the list

function render() {
  rows.style.height = `${shown.length * ROW_HEIGHT}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - OVERSCAN);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + OVERSCAN);
  rows.replaceChildren(...shown.slice(first, last).map((number, offset) => row(number, first + offset)));
  if (!shown.length) rows.replaceChildren(make("p", {class: "none"}, "No trajectory matches these filters."));
  // The active descendant must exist; a row that is scrolled out of view does not.
  const active = byId(`row-${selected}`);
  if (active) list.setAttribute("aria-activedescendant", active.id);
  else list.removeAttribute("aria-activedescendant");
}

function row(number, position) {
  const entry = index[number];
  const answer = entry.stop === "answered" ? entry.answer : entry.stop.replaceAll("_", " ");
  const summary = `${counted(entry.turns, "turn")} · reward ${format(entry.reward)}` + (entry.step === null ? "" : ` · step ${entry.step}`);
  const element = make("div",
    {id: `row-${number}`, role: "option", class: "row", "aria-selected": String(number === selected),
      "aria-posinset": position + 1, "aria-setsize": shown.length, "data-number": number},
    make("div", {class: "question", dir: "auto"}, entry.question),
    make("div", {class: "line"}, outcomeBadge(entry), " ", make("span", {class: "answer", dir: "auto"}, answer),
      make("span", {class: "summary"}, summary)));
  element.style.top = `${position * ROW_HEIGHT}px`;
  return element;
}

function select(number) {
  selected = number;
  detail.replaceChildren();
  if (number < 0) {
    browser.classList.remove("reading");
    return;
  }
  const back = make("button", {type: "button", class: "back"}, "← Back to the list");
  back.addEventListener("click", toList);
  detail.append(back, ...showTrajectory(index[number], record(number), passage));
  detail.scrollTop = 0;
  reveal();
}

// Scrolls the list to the selected row and renders it.
function reveal() {
  const top = shown.indexOf(selected) * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
  render();
}

function step(by) {
  if (!shown.length) return;
  const position = Math.min(Math.max(shown.indexOf(selected) + by, 0), shown.length - 1);
  select(shown[position]);
  updateAddress();
}

function toDetail() {
  if (selected < 0) return;
  browser.classList.add("reading");
  detail.querySelector("h3").focus();
}

function toList() {
  browser.classList.remove("reading");
  reveal();
  list.focus();
}

// The address identifies the open trajectory, so that it can be shared with the file.
function updateAddress() {
  history.replaceState(null, "", `#t${selected}`);
}

function openFromAddress() {
  const number = Number(/^#t(\d+)$/.exec(location.hash)?.[1]);  // NaN without one
  if (!shown.includes(number)) return;
  select(number);
  byId("trajectories").scrollIntoView();
}

list.addEventListener("scroll", render);
list.addEventListener("click", event => {
  const clicked = event.target.closest(".row");
  if (!clicked) return;
  select(Number(clicked.dataset.number));
  updateAddress();
  if (getComputedStyle(detail).display === "none") toDetail();
});
new ResizeObserver(render).observe(list);
addEventListener("hashchange", openFromAddress);

// ---- keyboard

const page = () => Math.max(1, Math.floor(list.clientHeight / ROW_HEIGHT) - 1);
const LIST_KEYS = {
  ArrowDown: () => step(1), ArrowUp: () => step(-1), PageDown: () => step(page()), PageUp: () => step(-page()),
  Home: () => step(-shown.length), End: () => step(shown.length), Enter: toDetail, ArrowRight: toDetail,
};

list.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !LIST_KEYS[event.key]) return;
  event.preventDefault();
  LIST_KEYS[event.key]();
});

detail.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") toList();
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    event.preventDefault();
    step(event.key === "ArrowLeft" ? -1 : 1);
    toDetail();
  }
});

document.addEventListener("keydown", event => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  byId("text").focus();
});

// ---- filters and theme

function fillFilter(name) {
  const counts = new Map();
  for (const entry of index) counts.set(valueOf[name](entry), (counts.get(valueOf[name](entry)) ?? 0) + 1);
  const values = [...counts].sort(([a], [b]) => a.localeCompare(b, "en", {numeric: true}));
  byId(name).append(make("option", {value: ""}, "all"),
    ...values.map(([value, count]) => make("option", {value}, `${value} (${count.toLocaleString("en")})`)));
  byId(name).parentElement.hidden = values.length < 2;
}

let typing;
filters.forEach(fillFilter);
[...filters, "order"].forEach(name => byId(name).addEventListener("change", refresh));
byId("text").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(refresh, 150);
});
byId("text").addEventListener("keydown", event => {
  if (event.key === "ArrowDown") { event.preventDefault(); list.focus(); }
});
byId("filters").addEventListener("submit", event => event.preventDefault());
byId("filters").addEventListener("reset", () => setTimeout(refresh));

// A browser may refuse storage to a page that is opened as a file; the theme is then not stored.
function stored(value) {
  try {
    if (value === undefined) return localStorage.getItem("theme") ?? "";
    localStorage.setItem("theme", value);
  } catch { /* not stored */ }
  return value ?? "";
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").value = name;
}

byId("theme").addEventListener("change", event => setTheme(stored(event.target.value)));
setTheme(stored());
await refresh();
openFromAddress();
