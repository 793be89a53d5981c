// The browser of trajectories: filters, a list of which only the visible rows exist, keyboard, theme.

const ROW = 84;     // height of a row in pixels, as in page.css
const SPARE = 6;    // rows drawn above and below what is visible
const SLICE = 12;   // milliseconds of searching before the page may breathe

const byId = id => document.getElementById(id);
const elements = name => [...document.querySelectorAll(`script[data-rows="${name}"]`)];
const parse = element => JSON.parse(element.textContent);

// Rows that lie in blocks; a block is parsed when a row of it is asked for, and the last few stay parsed.
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

const index = parse(elements("index")[0]), WHY = parse(elements("why")[0]);
const record = blocks("trajectories"), passage = blocks("passages");
const [list, rows, detail, browser] = ["list", "rows", "detail", "browser"].map(byId);
const filters = ["dataset", "outcome", "stop", "step"];
const OUTCOMES = {true: "right", false: "wrong", null: "not scored"};
const valueOf = {
  dataset: entry => entry.dataset || "no name",
  outcome: entry => OUTCOMES[entry.right],
  stop: entry => entry.stop,
  step: entry => entry.step === null ? "" : String(entry.step),
};

let shown = [];      // numbers of the trajectories that pass the filters, in order
let chosen = -1;     // number of the trajectory that is open
let generation = 0;  // of the filters: a search that is overtaken gives up

// ---- text search: everything of a trajectory in lower case, made once, when it is first searched

const hays = [], passagesOf = [], passageHays = [];

function texts(value) {
  if (typeof value === "string") return [value];
  return value && typeof value === "object" ? Object.values(value).flatMap(texts) : [];
}

function passageHolds(number, word) {
  passageHays[number] ??= passage(number).toLowerCase();
  return passageHays[number].includes(word);
}

function holds(number, word) {
  if (hays[number] === undefined) {
    const full = record(number);
    hays[number] = texts([index[number], full]).join("\n").toLowerCase();
    passagesOf[number] = full.turns.flatMap(turn => turn.searches.flatMap(search => search.passages.map(([one]) => one)));
  }
  return hays[number].includes(word) || passagesOf[number].some(one => passageHolds(one, word));
}

// Words, and phrases between quotes; all of them must be there. A quote that is not closed yet counts for nothing.
function termsOf(text) {
  return [...text.matchAll(/"([^"]+)"|([^\s"]+)/g)].map(match => match[1] ?? match[2]);
}

async function refresh() {
  const mine = ++generation;
  const wanted = filters.map(name => [name, byId(name).value]).filter(([, value]) => value);
  const terms = termsOf(byId("text").value.toLowerCase());
  let passing = [...index.keys()].filter(number => wanted.every(([name, value]) => valueOf[name](index[number]) === value));
  if (terms.length) {
    const candidates = passing;
    passing = [];
    let pause = performance.now() + SLICE;
    for (const [place, number] of candidates.entries()) {
      if (terms.every(term => holds(number, term))) passing.push(number);
      if (performance.now() > pause) {
        byId("count").textContent = `searching ${place + 1} of ${candidates.length} …`;
        await new Promise(resume => setTimeout(resume));
        if (mine !== generation) return;
        pause = performance.now() + SLICE;
      }
    }
  }
  shown = ordered(passing);
  byId("count").textContent = `${shown.length.toLocaleString("en")} of ${index.length.toLocaleString("en")} trajectories`;
  list.scrollTop = 0;
  if (shown.includes(chosen)) reveal();
  else choose(shown[0] ?? -1);
  draw();
}

function ordered(numbers) {
  const [field, direction] = byId("order").value.split(" ");
  if (!field) return numbers;
  const sign = direction === "up" ? 1 : -1;
  // A reward that is no number is spelt as a string; it comes last either way.
  const key = number => Number.isFinite(Number(index[number][field])) ? sign * index[number][field] : Infinity;
  return numbers.sort((a, b) => key(a) - key(b) || a - b);
}

// ---- the list

function draw() {
  rows.style.height = `${shown.length * ROW}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - SPARE);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + SPARE);
  rows.replaceChildren(...shown.slice(first, last).map((number, offset) => row(number, first + offset)));
  if (!shown.length) rows.replaceChildren(make("p", {class: "none"}, "No trajectory passes these filters."));
  // The row that is spoken of must exist; scrolled away by the mouse it does not.
  const active = byId(`row-${chosen}`);
  if (active) list.setAttribute("aria-activedescendant", active.id);
  else list.removeAttribute("aria-activedescendant");
}

function row(number, place) {
  const entry = index[number];
  const said = entry.stop === "answered" ? entry.answer : entry.stop.replaceAll("_", " ");
  const facts = `${entry.turns} turns · reward ${format(entry.reward)}` + (entry.step === null ? "" : ` · step ${entry.step}`);
  const element = make("div",
    {id: `row-${number}`, role: "option", class: "row", "aria-selected": String(number === chosen),
      "aria-posinset": place + 1, "aria-setsize": shown.length, "data-number": number},
    make("div", {class: "question", dir: "auto"}, entry.question),
    make("div", {class: "line"}, outcomeBadge(entry), " ", make("span", {class: "said", dir: "auto"}, said),
      make("span", {class: "facts"}, facts)));
  element.style.top = `${place * ROW}px`;
  return element;
}

function choose(number) {
  chosen = number;
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

// Scrolls the list so that the chosen row is visible, and draws it.
function reveal() {
  const top = shown.indexOf(chosen) * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  draw();
}

function step(by) {
  if (!shown.length) return;
  const place = Math.min(Math.max(shown.indexOf(chosen) + by, 0), shown.length - 1);
  choose(shown[place]);
  remember();
}

function toDetail() {
  if (chosen < 0) return;
  browser.classList.add("reading");
  detail.querySelector("h3").focus();
}

function toList() {
  browser.classList.remove("reading");
  reveal();
  list.focus();
}

// The address names the open trajectory, so that it can be sent to somebody who has the file.
function remember() {
  history.replaceState(null, "", `#t${chosen}`);
}

function openFromAddress() {
  const number = /^#t(\d+)$/.exec(location.hash)?.[1];
  if (number === undefined || number >= index.length) return;
  if (!shown.includes(Number(number))) return;
  choose(Number(number));
  byId("trajectories").scrollIntoView();
}

list.addEventListener("scroll", draw);
list.addEventListener("click", event => {
  const clicked = event.target.closest(".row");
  if (!clicked) return;
  choose(Number(clicked.dataset.number));
  remember();
  if (getComputedStyle(detail).display === "none") toDetail();
});
new ResizeObserver(draw).observe(list);
addEventListener("hashchange", openFromAddress);

// ---- keyboard

const page = () => Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
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

// A page that is opened as a file may be refused any storage: the switch works then, and is not remembered.
function stored(value) {
  try {
    if (value === undefined) return localStorage.getItem("theme") ?? "";
    localStorage.setItem("theme", value);
  } catch { /* not remembered */ }
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
