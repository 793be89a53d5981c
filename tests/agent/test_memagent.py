"""The MemAgent workflow: a context shows the question, the memory and one chunk; the last one the memory alone."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from memsearcher_jax.agent.config import RewardConfig
from memsearcher_jax.agent.memagent import chunks_of, parse_answer
from memsearcher_jax.agent.reward import trajectory_reward
from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.data.synthetic.documents import DocumentConfig, make_documents
from memsearcher_jax.data.synthetic.encyclopedia import EncyclopediaConfig
from memsearcher_jax.types import Problem, StopReason, Stream, StreamQuestion
from tests.agent.conftest import WordCounter, agent_of, run_script

EXACT = RewardConfig(metric="exact_match", wrong_answer=0.0, require_format=False)


def problem(*texts):
    return Problem("q", "who?", ("Ada",), stream=Stream("s", texts, ()))


def run(script, *texts, **settings):
    agent = agent_of("memagent", observation_tokens=4, **settings)
    return run_script(agent.start(problem(*texts), WordCounter()), script)


def test_a_memory_is_rewritten_after_each_chunk_and_answers_alone():
    played = run(["Ann wrote it", " Ada did ", "So \\boxed{Ada}"], "one two three four five", "six")
    first, second, last = (context.prompt for context in played.contexts)
    assert "one two three four\n</section>" in first and "No memory yet" in first and "five" not in first
    assert (
        "five\n\nsix\n</section>" in second
        and "<memory>\nAnn wrote it\n</memory>" in second
        and "one two" not in second
    )
    assert "<memory>\nAda did\n</memory>" in last and "section" not in last.partition("user")[2]
    assert all("<problem>\nwho?\n</problem>" in prompt and "<think>" not in prompt for prompt in (first, second, last))
    outcome = played.outcome
    assert (outcome.stop, outcome.answer) == (StopReason.ANSWERED, "Ada")
    assert [turn.memory for turn in outcome.turns] == ["", "Ann wrote it", "Ada did"]
    for golden, value in (("Ada", 1.0), ("Ann", 0.0)):
        assert trajectory_reward(outcome, played.transcript, [golden], EXACT, parse_answer).value == value


@pytest.mark.parametrize(
    ("script", "stop", "turns"),
    [
        ([("a memory that is cut off", "length"), "\\boxed{x}"], StopReason.ANSWERED, 2),
        (["", "no box"], StopReason.NO_ANSWER, 2),
        (["m", ("\\boxed{x}", "length")], StopReason.CUT_OFF, 2),
        ([("m", "im_start")], StopReason.FORGED_TURN, 0),
        (["m", None], StopReason.CONTEXT_FULL, 1),
        ([None], StopReason.CONTEXT_FULL, 0),
    ],
)
def test_how_a_trajectory_ends(script, stop, turns):
    outcome = run(script, "text").outcome
    assert (outcome.stop, len(outcome.turns)) == (stop, turns)


def test_a_memory_over_its_budget_is_cut_and_counted():
    outcome = run(["one two three", "\\boxed{x}"], "text", memory_tokens=2).outcome
    assert outcome.turns[1].memory == "one two" and outcome.counts == {"memory_cuts": 1, "memory_tokens": 2}


def test_chunks_hold_whole_texts_where_they_fit_and_join_to_the_text():
    text = " ".join(f"word{number}" for number in range(100)) + "\n"
    pieces = list(chunks_of([text], 7, WordCounter()))
    assert "".join(pieces) == text and max(map(WordCounter().count, pieces)) <= 7 and len(pieces) == 15
    texts = ["a b c", "d e", "f g h i j k l", "m", "n o p q r"]
    assert list(chunks_of(texts, 5, WordCounter())) == ["a b c\n\nd e", "f g h i j", " k l\n\nm", "n o p q r"]


def test_problems_without_a_text_are_refused():
    agent = agent_of("memagent")
    agent.check_problems([problem("text")], WordCounter().count, has_judge=False)
    with pytest.raises(ValueError, match="problem 'q' has no text: "):
        agent.check_problems([Problem("q", "who?", ("Ada",))], WordCounter().count, has_judge=False)
    with pytest.raises(ValueError, match="problem 'q' has no questions about its text: "):
        agent_of("memalpha").check_problems([problem("text")], WordCounter().count, has_judge=True)


@pytest.mark.parametrize("workflow", ["memagent", "memsearcher"])
def test_streams_with_questions_are_refused(workflow):
    conversation = Problem.of_stream("locomo/1", Stream("locomo", ("text",), (StreamQuestion("who?", "Ada"),)))
    with pytest.raises(
        ValueError, match=rf'"locomo/1" is a stream with questions, .*workflow {workflow} does not read'
    ):
        agent_of(workflow).check_problems([conversation], WordCounter().count, has_judge=False)


def test_the_published_files_are_read(tmp_path):
    """By length: the source of an evaluation file names it."""
    rows = [{"index": 3, "input": "who?", "context": "long text", "answers": ["Ada"], "num_docs": 50}]
    (tmp_path / "eval_50.json").write_text(json.dumps(rows))
    (evaluated,) = read_problems(tmp_path / "eval_50.json")
    source = {"source": "ruler_hqa_50"}
    stream = Stream("ruler_hqa_50", ("long text",), ())
    assert evaluated == Problem("ruler_hqa_50/3", "who?", ("Ada",), source, stream)
    trained = {
        "prompt": [[{"role": "user", "content": "who?"}]],
        "context": ["long text"],
        "data_source": ["hotpotqa"],
        "reward_model": [{"ground_truth": ["Ada"], "style": "rule"}],
        "extra_info": [{"index": 7}],
    }
    parquet.write_table(pa.table(trained), tmp_path / "hotpotqa_train_32k.parquet")
    (read,) = load(DataConfig(train=(str(tmp_path / "hotpotqa_train_32k.parquet"),)), tmp_path / "data").train
    assert (read.question, read.golden_answers, read.stream.chunks) == ("who?", ("Ada",), ("long text",))


def test_synthetic_documents_hold_what_their_question_needs():
    config = EncyclopediaConfig(train_people=16, test_people=16, other_people=0, train_questions=4, test_questions=4)
    made = make_documents(config, DocumentConfig(train_passages=5, test_passages=(6, 300)))
    assert [len(one.stream.chunks) for one in made["train"]] == [5] * 4
    assert [len(one.stream.chunks) for one in made["test"]] == [6, 300] * 2
    assert [one.metadata["source"] for one in made["test"]] == ["documents_6", "documents_300"] * 2
    for one in (*made["train"], *made["test"]):
        titles = {text.partition("\n")[0].strip('"') for text in one.stream.chunks}
        assert titles >= set(one.supporting_titles)
