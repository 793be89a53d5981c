"""LongMemEval and LoCoMo: small files in the layout of the published ones."""

import json

import pytest

from memsearcher_jax.data.config import DataConfig
from memsearcher_jax.data.problems import load
from memsearcher_jax.data.readers import read_problems
from memsearcher_jax.jsonl import MalformedRow


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def longmemeval(**changes):
    """One question; the sessions are not sorted, as in the oracle file."""
    return {
        "question_id": "gpt4_1a2b",
        "question_type": "knowledge-update",
        "question": "Where do I work now?",
        "answer": "Marn Press",
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_session_ids": ["s2", "s1"],
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/04/10 (Mon) 17:50"],
        "haystack_sessions": [
            [turn("user", "I have moved to Marn Press.", has_answer=True), turn("assistant", "Well done!")],
            [turn("user", "I work for Dol Mills.", has_answer=True), turn("assistant", "I see.", has_answer=False)],
        ],
        "answer_session_ids": ["s1", "s2"],
    } | changes


LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ada",
        "speaker_b": "Bo",
        "session_10_date_time": "9:00 am on 9 May, 2023",
        "session_10": [{"speaker": "Ada", "dia_id": "D10:1", "text": "The cat is back."}],
        "session_2_date_time": "1:56 pm on 8 May, 2023",
        "session_2": [
            {"speaker": "Ada", "dia_id": "D2:1", "text": "I lost my cat.", "blip_caption": "a photo of a cat"},
            {"speaker": "Bo", "dia_id": "D2:2", "text": "Oh no."},
        ],
        "session_3_date_time": "a session without turns has only a date",
    },
    "qa": [
        {"question": "What did Ada lose?", "answer": "her cat", "category": 4, "evidence": ["D2:1"]},
        {"question": "In which year?", "answer": 2023, "category": 2, "evidence": ["D2:1; D10:1", "D99:1"]},
        {"question": "What did Bo lose?", "adversarial_answer": "his cat", "category": 5, "evidence": []},
    ],
}


def write(path, entries):
    path.write_text(json.dumps(entries))
    return path


def test_a_question_of_longmemeval_is_a_stream(tmp_path):
    (problem,) = read_problems(write(tmp_path / "longmemeval_oracle.json", [longmemeval()]))
    assert (problem.id, problem.stream.source) == ("longmemeval_oracle/gpt4_1a2b", "longmemeval")
    assert problem.stream.chunks == (
        "2023/04/10 (Mon) 17:50\nuser: I work for Dol Mills.\nassistant: I see.",
        "2023/05/20 (Sat) 02:21\nuser: I have moved to Marn Press.\nassistant: Well done!",
    )
    (question,) = problem.stream.questions
    assert question.text == "The date is 2023/06/01 (Thu) 10:00. Where do I work now?"
    assert (question.answer, question.kind) == ("Marn Press", "knowledge-update")
    assert question.evidence == ("I work for Dol Mills.", "I have moved to Marn Press.")


def test_questions_to_abstain_from_and_answers_that_are_numbers(tmp_path):
    entries = [longmemeval(question_id="7_abs"), longmemeval(question_id="8", answer=3)]
    first, second = read_problems(write(tmp_path / "s.json", entries))
    assert first.stream.questions[0].kind == "knowledge-update_abs" and second.stream.questions[0].answer == "3"


def test_a_conversation_of_locomo_is_a_stream(tmp_path):
    (problem,) = read_problems(write(tmp_path / "locomo10.json", [LOCOMO]))
    assert problem.id == "locomo/conv-1"
    assert problem.stream.chunks == (
        "1:56 pm on 8 May, 2023\nAda: I lost my cat. [shares an image: a photo of a cat]\nBo: Oh no.",
        "9:00 am on 9 May, 2023\nAda: The cat is back.",
    )
    assert [(one.answer, one.kind) for one in problem.stream.questions] == [
        ("her cat", "single-hop"),
        ("2023", "temporal"),
        ("Not mentioned", "adversarial"),
    ]
    lost, back = "Ada: I lost my cat. [shares an image: a photo of a cat]", "Ada: The cat is back."
    assert [one.evidence for one in problem.stream.questions] == [(lost,), (lost, back), ()]


def test_the_texts_of_a_conversation_are_as_a_tokenizer_takes_and_writes_them(tmp_path):
    """Without halves of surrogate pairs, composed."""
    text = "\ud800 A\u0308nn"
    turns = {"session_1_date_time": "May", "session_1": [{"speaker": "Bo", "dia_id": "D1:1", "text": text}]}
    asked = {"question": text, "answer": text, "category": 4, "evidence": ["D1:1"]}
    sessions = [[turn("user", text, has_answer=True)]]
    for entry in (
        longmemeval(question=text, answer=text, haystack_dates=["May"], haystack_sessions=sessions),
        {"sample_id": "1", "conversation": turns, "qa": [asked]},
    ):
        (problem,) = read_problems(write(tmp_path / "s.json", [entry]))
        (question,) = problem.stream.questions
        for read in (question.text, question.answer, *question.evidence, *problem.stream.chunks):
            assert read.endswith("? Änn")


def test_long_sessions_are_divided_between_turns_and_sentences(tmp_path):
    turns = [turn("user", "One two three. Four five six seven."), turn("assistant", "Eight."), turn("user", "Nine.")]
    file = write(tmp_path / "s.json", [longmemeval(haystack_dates=["May"], haystack_sessions=[turns])])
    for words, chunks in (
        (50, ["May\nuser: One two three. Four five six seven.\nassistant: Eight.\nuser: Nine."]),
        (5, ["May\nuser: One two three.", "May\nFour five six seven.", "May\nassistant: Eight.\nuser: Nine."]),
    ):
        problems = load(DataConfig(test=(str(file),), chunk_words=words), tmp_path / "data").test
        assert list(problems[0].stream.chunks) == chunks
        assert problems[0] == read_problems(file, chunk_words=words)[0], "evidence survives the dataset"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (longmemeval(haystack_dates=[]), "neither a question of LongMemEval nor a conversation of LoCoMo"),
        (longmemeval(haystack_sessions=[[turn("user", None)], []]), "TypeError: can only concatenate str"),
        (longmemeval(haystack_dates=[], haystack_sessions=[]), "has 0 chunks of text and 1 questions"),
        ({"sample_id": "1", "conversation": {}}, "KeyError: 'qa'"),
        (longmemeval(answer=None), r"LoCoMo \(TypeError: an answer is None\)"),
        (3, "a JSON object is needed, found int"),
    ],
)
def test_an_entry_of_another_layout_is_an_error_or_skipped(tmp_path, entry, message):
    file = write(tmp_path / "s.json", [longmemeval(), entry])
    with pytest.raises(MalformedRow, match=message) as error:
        read_problems(file)
    assert str(error.value).startswith(f"{file}, entry 2: ") and "\n" not in str(error.value)
    skipped = []
    assert len(read_problems(file, skipped.append)) == len(skipped) == 1


@pytest.mark.parametrize(("content", "message"), [("{", "not JSON"), ("[{", "not JSON"), ("[]", "no questions")])
def test_a_file_without_entries_is_an_error(tmp_path, content, message):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_problems(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("name", "file", "entry", "dataset"),
    [
        ("longmemeval", "longmemeval/longmemeval_s_cleaned.json", longmemeval(), "longmemeval_s"),
        ("longmemeval:m", "longmemeval/longmemeval_m.json", longmemeval(), "longmemeval_m"),
        ("longmemeval:oracle", "longmemeval/longmemeval_oracle.json", longmemeval(), "longmemeval_oracle"),
        ("locomo", "locomo/locomo10.json", LOCOMO, "locomo"),
    ],
)
def test_the_sets_are_read_by_name(tmp_path, name, file, entry, dataset):
    (tmp_path / file).parent.mkdir()
    write(tmp_path / file, [entry])
    (problem,) = load(DataConfig(test=(name,), root=str(tmp_path)), tmp_path / "data").test
    assert problem.metadata["source"] == problem.id.partition("/")[0] == dataset
    assert problem.stream.source == name.partition(":")[0]
