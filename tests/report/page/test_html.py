"""The HTML of the report page: known values, and untrusted text."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsearcher_jax.logs.atomic_write import atomic_write
from memsearcher_jax.logs.metrics import MetricsWriter
from memsearcher_jax.logs.trajectories import compress_trajectories, step_path
from memsearcher_jax.report.comparison import compare_evaluations, read_evaluation
from memsearcher_jax.report.page.html import write_page
from memsearcher_jax.report.page.records import embedded_json
from memsearcher_jax.types import (
    Context,
    Passage,
    Problem,
    Query,
    SearchResult,
    StopReason,
    Stream,
    StreamQuestion,
    ToolResult,
    Turn,
)
from tests.samples import context, scored, write_shard

EVIL = [
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "<!-- <script> -->",
    '"><b onclick=alert(3)>',
    "&lt;i&gt; &amp;",
    "a\u2028b \u202eright-to-left \x1b[31m \x00 \ud800",
]


def evaluation(folder, trajectories, *, results=None, settings=None):
    write_shard(folder, trajectories)
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    (folder / "run.json").write_text(json.dumps(settings or {"agent": {"workflow": "memsearcher"}}))
    return folder


class Page(HTMLParser):
    """The parsed page: elements, text, data, table rows."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.data, self.raw, self.tables = [], [], {}, {}, {}
        self._rows, self._open, self.text = [], None, ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag in ("style", "script", "caption"):
            self._open = (tag, dict(attributes).get("data-rows"))
        if tag == "tr":
            self._rows.append([])
        if tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("style", "script", "caption"):
            self._open = None
        if tag == "table":
            self._rows = []

    def handle_data(self, text):
        match self._open:
            case ("caption", _):
                self._rows = self.tables[text] = []
            case ("script", str(name)):
                self.data.setdefault(name, []).append(json.loads(text))
            case (tag, None):
                self.raw[tag] = text
            case None:
                self.text += text
                if self._rows and self._rows[-1]:
                    self._rows[-1][-1] += text + " "


def page_of(folder, **options):
    out = folder.parent / "page.html"
    counts = write_page(folder, out, **options)
    return Page(out), counts


def rows(page, caption):
    return [[re.sub(r"\s+", " ", cell).strip() for cell in row] for row in page.tables[caption]]


def tips(page, title):
    """The tooltips of a plot, in the order in which they are drawn."""
    figure = page.source.partition(f"<b>{title}</b>")[2].partition("</figure>")[0]
    return [unescape(text) for text in re.findall(r"<title>(.*?)</title>", figure)]


def test_an_evaluation_with_known_numbers(tmp_path):
    turn = Turn("", "t</think> <tool_call>{}</tool_call>", new_memory="m", rewrite="m")
    trajectories = [
        scored(metadata={"hops": 1}),
        scored(False, metadata={"hops": 1}, answer="Bo"),
        scored(metadata={"hops": 2}, turns=(turn, Turn("m", "x"))),
        scored(False, metadata={"hops": 2}, turns=(turn, turn), stop=StopReason.MAX_TURNS, answer=""),
    ]
    results = {
        "checkpoint": "x/qwen",
        "step": 30,
        "metrics": {"exact_match": 0.5, "nq/f1": 0.25, "stop/fault": 0},
    }
    page, counts = page_of(evaluation(tmp_path / "ev", trajectories, results=results))
    assert counts == {"read": 4, "shown": 4}
    assert "Evaluation of qwen, step 30. 4 trajectories." in page.text
    assert rows(page, "Metrics") == [*(["metric", "value"], ["EM", "50.0 %"], ["nq/f1", "25.0 %"])]
    hops = rows(page, "Accuracy by hops")
    assert [row[0] for row in hops] == ["hops", "1", "2"]
    assert [row[1] for row in hops[1:]] == ["50.0 % 9.5 to 90.5, n 2"] * 2
    assert [row[0] for row in rows(page, "Accuracy by turns")] == ["turns", "1", "2"]
    assert tips(page, "Tokens by turn") == ["all, n 4: 10 at 1", "all, n 2: 20 at 2"]
    stops = rows(page, "Stop reasons")
    assert [[row[0].split()[0], row[1]] for row in stops[1:]] == [["answered", "75.0 % 3"], ["max_turns", "25.0 % 1"]]
    assert [entry["correct"] for entry in page.data["index"][0]] == [True, False, True, False]


def test_a_page_has_what_the_evaluation_printed(tmp_path):
    score = {"mean": 0.5, "low": 0.25, "high": 0.75}
    group = {"questions": 2, "scores": {"accuracy": score}, "types": {"multi-session": score | {"streams": 1}}}
    group |= {"turns": 3.0}
    judge = {"questions": 3, "unjudged": 1, "accuracy": score, "agreement_with_exact_match": 1.0}
    results = {
        "evaluation": {
            "benchmarks": {"nq": group, "<b>": group | {"types": {}}},
            "by_length": {},
            "averages": {"macro": group["scores"]},
        },
        "judge": {"nq": judge | {"calibration_error": None}, "popqa": {"questions": 2, "unjudged": 2}},
    }
    page, _ = page_of(evaluation(tmp_path / "ev", [scored()], results=results))
    cell = "50.0 25.0 to 75.0"
    assert rows(page, "Benchmarks")[1:] == [["nq", "2", cell], ["<b>", "2", cell], ["average", "", cell]]
    assert rows(page, "Types of questions of nq")[1:] == [["multi-session", "1", cell]]
    assert rows(page, "Cost") == [["benchmark", "turns"], ["nq", "3"], ["<b>", "3"]]
    assert rows(page, "Answers, judged")[1:] == [["nq", "2", cell, "100.0", "–"], ["popqa", "0", *"–––"]]


def test_a_training_run_has_curves_and_compares_first_and_last_steps(tmp_path):
    run = tmp_path / "run"
    with MetricsWriter(run) as writer:
        for step in range(8):
            writer.write(step, {"reward": step / 10, "kl": math.nan if step == 7 else 0.5, "time/rollout": 1.0})
    for step in range(8):
        atomic_write(step_path(run, step), compress_trajectories([scored(step >= 6), scored(step >= 4)]))
    page, _ = page_of(run)
    assert rows(page, "Metrics of 8 steps")[1:3] == [
        ["reward", "0", "0.7", "0.35", "0", "0.7"],
        ["kl", "0.5", "nan", "0.5", "0.5", "0.5"],
    ]
    folded = page.source.partition('<details class="metrics"><summary>Seconds of each phase</summary>')[2]
    assert folded.partition("</details>")[0].count("time/rollout") == 1
    assert 'http-equiv="refresh"' not in page.source
    assert "1 not finite" in page.text
    assert rows(page, "Accuracy by turns")[0] == ["turns", "steps 0 to 1", "steps 6 to 7"]
    assert [cell.split()[0] for cell in rows(page, "Accuracy by turns")[1][1:]] == ["0.0", "100.0"]
    assert tips(page, "Reward") == [f"reward: {step / 10:.6g} at {step}" for step in range(8)]
    assert {entry["step"] for entry in page.data["index"][0]} == set(range(8))


def test_a_dataset_without_scores_keeps_the_columns_of_the_others(tmp_path):
    """Faults of the machinery may take all of its questions."""
    lost = scored(metadata={"source": "popqa"}, stop=StopReason.SEARCH_FAILED, answer="", reward=math.nan)
    page, _ = page_of(evaluation(tmp_path / "ev", [scored(metadata={"source": "nq"}), replace(lost, scores={})]))
    head, nq, popqa = rows(page, "Results by dataset")
    assert head[:6] == ["benchmark", "n", "EM", "F1", "cover-EM", "reward"]
    assert nq[:6] == ["nq", "1", "100.0 %", "100.0 %", "100.0 %", "1"]
    assert popqa[:7] == ["popqa", "0", *"–––––"]
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.source))
    assert tiles["answered"] == "100.0 %" and "Means over 1 trajectories: all." in page.text


def test_streams_have_an_accuracy_and_their_questions(tmp_path):
    read = Stream("squad", ("text",), (StreamQuestion("Who?", "Ada"), StreamQuestion("Where?", "Bern")))
    outcome = {"stop": StopReason.STREAM_READ, "counts": {"stream_tokens": 100, "memory_tokens": 20, "own": math.nan}}
    one = scored(turns=(), problem=Problem.of_stream("s", read), **outcome, scores={"accuracy": 0.5}, reward=1.5)
    page, _ = page_of(evaluation(tmp_path / "ev", [one, replace(one, scores={"accuracy": math.nan})]))
    tiles = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.source)
    assert tiles[:2] == [("accuracy", "50.0 %"), ("reward", "1.5")] and ("compression", "80.0 %") in tiles
    assert not {"answered", "searches", "EM"} & {name for name, _ in tiles}
    assert [entry["accuracy"] for entry in page.data["index"][0]] == [0.5, None]
    assert page.data["trajectories"][0][0]["questions"] == ["Who?", "Where?"]


def test_tokens_of_two_workflows_are_compared(tmp_path):
    turns = (Turn("", "a"), Turn("m", "b"), Turn("m", "c"))
    history = Context(tuple(range(9)), (0.0,) * 9, tuple(map(bool, (0, 0, 1, 0, 0, 1, 1, 0, 1))))
    evaluation(tmp_path / "a", [scored(turns=turns, contexts=(context(4), context(5), context(4)))])
    evaluation(tmp_path / "b", [scored(turns=turns, contexts=(history,))], settings={"agent": {"workflow": "react"}})
    page, _ = page_of(tmp_path / "a", compare=tmp_path / "b")
    tokens = {"memsearcher (a)": (4, 5, 4), "react (b)": (3, 7, 9)}
    expected = [f"{run}, n 1: {count} at {turn}" for run in tokens for turn, count in enumerate(tokens[run], 1)]
    assert tips(page, "Tokens by turn") == expected
    settings = rows(page, "Settings, differences first")
    assert settings[1] == ["agent.workflow", "memsearcher", "react"]
    assert len(page.data["index"][0]) == 1, "the browser is about the run alone"


def test_two_evaluations_of_the_same_questions_have_paired_intervals(tmp_path):
    """Differences have the direction of compare.py RUN OTHER: the other minus the run."""
    exact = {"a": (0, 0, 0, 1), "b": (1, 1, 0, 1)}
    for name, values in exact.items():
        trajectories = [scored(bool(value), id=f"q{number}") for number, value in enumerate(values)]
        results = {"questions": 4, "metrics": {"exact_match": sum(values) / 4}}
        evaluation(tmp_path / name, trajectories, results=results)
        (tmp_path / name / "weights.json").write_text("{}")
    page, _ = page_of(tmp_path / "a", compare=tmp_path / "b")
    labels = ["memsearcher (a)", "memsearcher (b)", "memsearcher (b) − memsearcher (a)"]
    assert rows(page, "Metrics") == [["metric", *labels], ["EM", "25.0 %", "75.0 %", "50.0 %"]]
    paired = rows(page, "Paired comparison over the questions of both")
    assert paired[0] == ["metric", "n", *labels, "interval", "p"]
    expected = compare_evaluations(read_evaluation(tmp_path / "a"), read_evaluation(tmp_path / "b"))
    interval = expected["metrics"]["exact_match"]["difference"]
    low, high = f"{100 * interval['low']:.1f} %", f"{100 * interval['high']:.1f} %"
    assert interval["mean"] == 0.5 and paired[1] == [
        "EM",
        "4",
        "25.0 %",
        "75.0 %",
        "+50.0 %",
        f"{low} to {high}",
        "0.5000",
    ]


def test_a_page_says_why_it_has_no_paired_intervals(tmp_path):
    for name in "ab":
        evaluation(tmp_path / name, [scored(id=name)], results={"questions": 1, "metrics": {"f1": 1}})
        (tmp_path / name / "weights.json").write_text("{}")
    page, _ = page_of(tmp_path / "a", compare=tmp_path / "b")
    assert "No paired comparison: " in page.text and "share no question" in page.text


def test_the_results_of_tools_are_on_the_page(tmp_path):
    """Complete, also where a turn shows a part; errors, too. A huge one is cut, and says so."""
    results = (
        ToolResult("shop", {"item": "tea", "<b>": 1}, text="3 </script> left"),
        ToolResult("shop", {}, error="no answer after 30 s"),
        ToolResult("dump", {}, text="x" * 20_010),
    )
    page, _ = page_of(evaluation(tmp_path / "ev", [scored(tool_results=results), scored(id="q2")]))
    with_tools, without = page.data["trajectories"][0]
    assert without["tools"] == []
    assert with_tools["tools"][0] == {
        "tool": "shop",
        "arguments": '{"item": "tea", "<b>": 1}',
        "text": "3 </script> left",
        "error": "",
    }
    assert with_tools["tools"][1]["error"] == "no answer after 30 s"
    cut = with_tools["tools"][2]["text"]
    assert cut == "x" * 20_000 + "\n… 10 more characters: the trajectory file has them"
    assert "record.tools.map(showTool)" in page.raw["script"]


def hostile(number):
    """A trajectory with the same untrusted text in every field."""
    text = EVIL[number]
    passage = Passage("1", f'"{text}"\n{text} body', 0.5)
    found = (SearchResult((passage,), text),)
    searched = Turn("", f"{text}</think>{text}", (text,), (Query(text, 1),), found, text, text, text)
    texts = {"question": text, "answer": text, "golden": (text,), "reason": text, "metadata": {"source": text}}
    return scored(turns=(searched, Turn(text, text, rewrite=text)), id=f"{number}", **texts)


def test_untrusted_text_is_escaped(tmp_path):
    settings = {"agent": {"workflow": EVIL[0], EVIL[1]: EVIL[2]}}
    results = {"checkpoint": EVIL[0], "metrics": {EVIL[1]: 1.0, f"of/{EVIL[0]}": 2}}
    folder = evaluation(tmp_path / "ev", [hostile(n) for n in range(len(EVIL))], results=results, settings=settings)
    page, _ = page_of(folder, compare=folder)
    tame = evaluation(tmp_path / "tame", [scored(), scored(metadata={"source": "nq"})], results={"metrics": {"f1": 1}})
    plain, _ = page_of(tame, compare=tame)
    assert set(page.tags) <= set(plain.tags) | {"mark"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.tags.count("script") == 5  # stop_descriptions, index, trajectories, passages, and the script itself
    (index,), (records,), (passages,) = page.data["index"], page.data["trajectories"], page.data["passages"]
    assert [entry["question"] for entry in index[:5]] == EVIL[:5]
    assert index[5]["question"] == "a\u2028b \\u202eright-to-left \\x1b[31m \\x00 \\ud800", "they are visible"
    for text, record, passage in zip(EVIL[:5], records, passages, strict=False):
        first = record["turns"][0]
        assert (first["thought"], first["action"], first["new_memory"]) == (text, text, text)
        assert first["searches"] == [{"query": text, "top_n": 1, "error": text, "passages": [[EVIL.index(text), 0.5]]}]
        assert passage == f'"{text}"\n{text} body'
    assert EVIL[1] in page.text and "</script><script>" not in page.source


@given(st.recursive(st.text() | st.sampled_from(EVIL), lambda inner: st.dictionaries(st.text(), inner), max_leaves=5))
def test_embedded_json_round_trips_and_cannot_end_its_element(value):
    text = embedded_json(value)
    assert json.loads(text) == value
    assert not set(text) & set("<>&\u2028\u2029")
    text.encode("utf-8")


def test_the_page_is_self_contained_and_its_policy_allows_only_its_script(tmp_path):
    page, _ = page_of(evaluation(tmp_path / "ev", [scored()]))
    links = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "action", "xlink:href")]
    assert links and all(value.startswith("#") for value in links)
    assert not re.search(r"@import|url\(|https?:", page.raw["style"] + page.raw["script"])
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not [name for _, name, _ in page.attributes if name == "style"], "the policy blocks it"


def test_each_text_is_stored_once(tmp_path):
    found = (SearchResult((Passage("1", '"T"\nlong text'),)),)
    turns = (
        Turn("", "a", ("c",), (Query("q", 1),), found, 'shown: "T"\nlong text', "<memory>m</memory>", "m"),
        Turn("m", "b", ("c",), (Query("q", 1),), found, "shown: lo", "nothing", ""),
        Turn("n", "c", ("c", "add"), (Query("q", 1),), found, 'shown: "T"\nlong text, sum: 42'),
    )
    page, _ = page_of(evaluation(tmp_path / "ev", [scored(turns=turns), scored(turns=turns)]))
    first, second, third = page.data["trajectories"][0][0]["turns"]
    assert page.data["passages"] == [['"T"\nlong text']]
    assert [turn["memory"] for turn in (first, second, third)] == [None, None, "n"], "not that of the turn before"
    assert (first["observation"], second["observation"]) == ("", "shown: lo"), "a clipped observation is stored"
    assert third["observation"].endswith("sum: 42"), "the result of a tool that is no search"
    assert (first["rewrite"], second["rewrite"]) == ("", "nothing")
    assert "transcript" in page.data["trajectories"][0][0]


def test_memory_metrics_are_those_of_memory_quality(tmp_path):
    wrote = {"rewrite": "<memory>m</memory>"}
    turns = (
        Turn("", "a", observation="By Ada Lovelace, of Ockham", new_memory="Ada wrote it in Ockham", **wrote),
        Turn("Ada wrote it in Ockham", "b", observation="no news", new_memory="it was Ockham", **wrote),
    )
    page, _ = page_of(evaluation(tmp_path / "ev", [scored(turns=turns, metadata={"supporting_titles": ["Ockham"]})]))
    first, second = page.data["trajectories"][0][0]["turns"]
    assert first["golden"] == {"shown": ["Ada"], "held": ["Ada"], "lost": []} and first["copied"] == 0.0
    assert second["golden"] == {"shown": [], "held": [], "lost": ["Ada"]}
    quality = {row[0]: row[1:] for row in rows(page, "Memory quality")}
    assert quality["golden answers: in the new memory"] == ["50.0 % n 2", "0.0 % n 1"]


def test_an_evaluation_that_was_killed_has_a_page_of_its_complete_trajectories_up_to_a_limit(tmp_path):
    folder = evaluation(tmp_path / "ev", [scored(id=str(number)) for number in range(10)])
    file = folder / "trajectories" / "host_0000.jsonl.gz"
    file.write_bytes(file.read_bytes() + compress_trajectories([scored()])[:-20])
    page, counts = page_of(folder, max_trajectories=4)
    assert counts == {"read": 10, "shown": 4} and "The evaluation is not finished" in page.text
    assert "The browser contains 4 of 10 trajectories, evenly spaced; tables and plots use all." in page.text
    (folder / "results.json").write_text(json.dumps({"metrics": {"f1": 1.0}}))
    with pytest.raises(ValueError, match="compressed data is damaged"):
        page_of(folder)


def test_an_invalid_folder_keeps_the_old_page(tmp_path):
    out = tmp_path / "page.html"
    out.write_text("older")
    folder = evaluation(tmp_path / "ev", [scored()])
    for text, error in (("{", r"results\.json: not JSON"), ('{"evaluation": {"macro": {}}}', "of another version")):
        (folder / "results.json").write_text(text)
        with pytest.raises(ValueError, match=error):
            write_page(folder, out)
    assert out.read_text() == "older" and sorted(path.name for path in tmp_path.iterdir()) == ["ev", "page.html"]


def test_runs_without_trajectories_or_without_steps_have_a_page(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(0, {"reward": 0.5})
    page, counts = page_of(tmp_path / "run")
    assert counts == {"read": 0, "shown": 0}
    assert page.data["index"] == [[]]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert "Training run. 0 trajectories." in page_of(tmp_path / "new")[0].text
