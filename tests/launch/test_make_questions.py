"""Questions about passages of one's own, written by a service that answers by rules."""

import json
import re

import pytest

from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.launch import make_questions
from tests.questions.scripted_writer import running_writer

FILLER = "These words make it long enough for a question, as are the pages of most documents. " * 2
CHAINS = 40


@pytest.fixture
def passages(tmp_path):
    """Chains of three facts: ShipN was built by BuilderN, who was born in TownN, which lies on RiverN."""
    rows = []
    for number in range(CHAINS):
        facts = {
            f"Ship{number}": f"was built by Builder{number}",
            f"Builder{number}": f"was born in Town{number}",
            f"Town{number}": f"lies on River{number}",
        }
        for name, fact in facts.items():
            rows.append({"id": name, "contents": f'"{name}"\n{name} {fact}. {FILLER}'})
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def service():
    with running_writer() as (writer, address):
        yield writer, address


def run(passages, address, *words):
    out = passages.parent / "made"
    argv = ["--passages", str(passages), "--out", str(out), "--writer.url", address, "--writer.model", "m"]
    argv += ["--writer.max_concurrency", "4", "--writer.max_outage", "0", "--json", str(passages.parent / "j.json")]
    make_questions.main([*argv, *words])
    return json.loads((passages.parent / "j.json").read_text())


def log_of(passages):
    return [json.loads(line) for line in (passages.parent / "made" / "candidates.jsonl").read_text().splitlines()]


def test_questions_of_all_hops_are_made_and_read_as_data(passages, service, tmp_path, capsys):
    writer, address = service
    result = run(passages, address, "--count", "24", "--review", "5")
    made = tmp_path / "made"
    assert result["questions"] >= 24 and result["struck"] == {}
    assert all(count >= 4 for count in result["hops"].values())
    assert result["tokens"] == {
        "prompt_tokens": 10 * len(writer.requests),
        "completion_tokens": 2 * len(writer.requests),
    }
    entries = tuple(str(made / f"{split}.jsonl") for split in ("train", "tune", "test"))
    entries = tuple(entry for entry in entries if (made / entry).stat().st_size)
    problems = load(DataConfig(test=entries), tmp_path / "data").test
    assert len(problems) == result["questions"]
    ids_by_split: dict[str, set[str]] = {}
    for problem in problems:
        assert len(problem.supporting_titles) == problem.metadata["hops"]
        ids_by_split.setdefault(problem.metadata["source"], set()).update(problem.metadata["supporting_ids"])
    assert len(ids_by_split) > 1
    assert sum(map(len, ids_by_split.values())) == len(set().union(*ids_by_split.values()))
    sheet = (made / "review.md").read_text()
    assert sheet.count("- [ ] `") == 5
    assert f"{result['questions']} questions, of 1, 2 and 3 passages" in capsys.readouterr().out


def test_what_is_marked_on_the_sheet_is_struck_and_replaced(passages, service):
    _, address = service
    run(passages, address, "--count", "8", "--review", "3")
    made = passages.parent / "made"
    sheet = made / "review.md"
    sheet.write_text(sheet.read_text().replace("- [ ]", "- [x]", 1))
    struck = sheet.read_text().partition("- [x] `")[2].partition("`")[0]
    result = run(passages, address, "--count", "8", "--review", "3")
    assert result["struck"] == {"struck": 1} and result["questions"] >= 8
    assert all(struck not in (made / f"{split}.jsonl").read_text() for split in ("train", "tune", "test"))


def test_each_filter_that_asks_the_writer_strikes(passages, service):
    """Known without a search; answered from one of its passages; not found by the search."""
    writer, address = service

    def write(texts):
        question = writer.chain_question(texts)
        if len(texts) == 2:  # the second passage suffices
            question = writer.chain_question(texts[1:])
            question["question"] = f"Of two pages: {question['question']}"
        if len(texts) == 3:
            writer.known[question["question"]] = f"I think {question['answer']}."
        return question

    writer.write = write
    result = run(passages, address, "--count", "60", "--max_candidates", "30")
    assert result["struck"] == {"known": 10, "one_passage_suffices": 10}
    reasons = {(line["hops"], line["reason"]) for line in log_of(passages)}
    assert {(1, ""), (3, "known")} <= reasons and (2, "") not in reasons and (3, "") not in reasons


def test_progress_counts_candidates_so_that_it_ends_where_no_question_passes(passages, service, capsys):
    writer, address = service
    writer.write = lambda texts: {**writer.chain_question(texts), "question": "Which of the names is it?"}
    run(passages, address, "--count", "8", "--max_candidates", "16")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("candidates")]
    assert [line.split("  ")[:2] for line in lines] == [
        ["candidates 8/16", "questions 1"],
        ["candidates 16/16", "questions 1"],
    ]


def test_questions_that_ask_the_same_are_struck_but_the_first(passages, service):
    writer, address = service
    writer.write = lambda texts: {**writer.chain_question(texts), "question": "Which of the names is it?"}
    assert run(passages, address, "--count", "4", "--max_candidates", "4")["struck"] == {"alike": 3}


def test_questions_whose_pages_are_not_found_are_struck(passages, service, monkeypatch):
    _, address = service
    monkeypatch.setattr(
        "memsearcher_jax.retrieval.search.Searcher.search", lambda self, queries, top_n: [[] for _ in queries]
    )
    assert run(passages, address, "--count", "3", "--max_candidates", "9")["struck"] == {"not_found": 9}


def test_a_writer_of_garbage_costs_no_finished_question(passages, service):
    writer, address = service
    replies = iter(range(10_000))
    writer.write = lambda texts: "garbage" if next(replies) % 2 else writer.chain_question(texts)
    result = run(passages, address, "--count", "6")
    assert result["questions"] >= 6
    assert 0 < result["struck"]["unreadable"] == sum(line["reason"] == "unreadable" for line in log_of(passages))
    assert next(line for line in log_of(passages) if line["reason"] == "unreadable")["detail"] == "garbage"


def test_a_service_that_goes_down_keeps_what_is_finished(passages, service, capsys):
    writer, address = service
    run(passages, address, "--count", "6")
    finished = {line["key"]: line for line in log_of(passages)}
    questions = (passages.parent / "made" / "train.jsonl").read_text().splitlines()
    writer.status = 503
    with pytest.raises(SystemExit):
        run(passages, address, "--count", "40")
    assert "returned status 503" in capsys.readouterr().err
    assert set(questions) <= set((passages.parent / "made" / "train.jsonl").read_text().splitlines())
    writer.status = 200
    writer.requests.clear()
    result = run(passages, address, "--count", "40")
    assert result["questions"] >= 40 and "failed" not in result["struck"]
    assert all(line in log_of(passages) for line in finished.values())
    written = [user for system, user in writer.requests if system.startswith("You write")]
    assert len(written) == result["candidates"] - len(finished), "nothing that was finished is written again"


@pytest.mark.parametrize("fault", [pytest.param("slow", marks=pytest.mark.variant), "empty"])
def test_a_slow_or_silent_writer_costs_no_finished_question(passages, service, fault):
    """What it does not answer is counted, and the same command tries it again."""
    writer, address = service
    is_faulty = re.compile(r"^(Ship|Builder|Town)\d*[13579] ", re.MULTILINE).search
    if fault == "slow":
        writer.delay = lambda user: 2.0 if is_faulty(user) and "\n\nWrite one question" in user else 0.0
    else:
        writer.write = lambda texts: " " if is_faulty(texts[0]) else writer.chain_question(texts)
    result = run(passages, address, "--count", "60", "--max_candidates", "24", "--writer.timeout", "1")
    finished = {line["key"]: line for line in log_of(passages) if not line["reason"]}
    assert result["questions"] == len(finished) > 4 and result["struck"]["failed"] == 24 - len(finished) > 4
    writer.delay = lambda user: 0.0
    writer.write = writer.chain_question
    again = run(passages, address, "--count", "60", "--max_candidates", "24")
    assert again["questions"] == len(finished) + 24 and "failed" not in again["struck"]
    assert all(line in log_of(passages) for line in finished.values())


def test_a_log_that_was_cut_by_a_kill_continues(passages, service):
    _, address = service
    run(passages, address, "--count", "4")
    log = passages.parent / "made" / "candidates.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:40])
    assert run(passages, address, "--count", "4")["candidates"] == len(whole.splitlines())
    assert log.read_bytes() == whole


def test_questions_follow_documents_that_change(passages, service):
    """A changed passage loses its questions, a moved one keeps them under its new id."""
    _, address = service
    run(passages, address, "--count", "60")
    made = passages.parent / "made"
    before = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in passages.read_text().splitlines()]
    earlier = passages.read_text()
    for row in rows:
        row["id"] = f"new/{row['id']}"
    changed = before[0]["metadata"]["supporting_titles"][0]
    rows = [row for row in rows if row["contents"].partition("\n")[0].strip('"') != changed]
    passages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(passages, address, "--count", "1", "--max_candidates", "1")
    after = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    ids = {passage_id for row in after for passage_id in row["metadata"]["supporting_ids"]}
    lost = [row for row in before if changed in row["metadata"]["supporting_titles"]]
    assert len(after) == len(before) - len(lost) and result["struck"] == {"changed": len(lost)} and lost
    assert all(passage_id.startswith("new/") for passage_id in ids)
    passages.write_text(earlier)
    run(passages, address, "--count", "1", "--max_candidates", "1")
    assert before == [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]


def test_the_number_of_candidates_is_bounded(passages, service):
    writer, address = service
    writer.write = lambda texts: "garbage"
    result = run(passages, address, "--count", "5", "--max_candidates", "7")
    assert (result["candidates"], result["questions"]) == (7, 0) and len(writer.requests) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--writer.url", ""], "set --writer.url and --writer.model, or --writer.checkpoint"),
        (["--writer.backend", "none"], "--writer.backend none: a service or --writer.checkpoint writes"),
        (["--writer.checkpoint", "package:tiny"], "omit --writer.url and --writer.model"),
        (["--hops", "4"], "--hops: a question is of 1 to 3 passages"),
        (["--passages", "missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_mistakes_are_one_line(passages, capsys, words, message):
    argv = {"--passages": str(passages), "--out": str(passages.parent / "made"), "--writer.url": "http://x/v1"}
    argv |= {"--writer.model": "m", words[0]: words[1]}
    with pytest.raises(SystemExit):
        make_questions.main([word for pair in argv.items() for word in pair])
    assert message in capsys.readouterr().err
