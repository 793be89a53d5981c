import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from memsearcher_jax.data.world import WorldConfig, make_world
from memsearcher_jax.rl import small_tokenizer

FOLDER = small_tokenizer.packaged_folder()
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
CHAT = '<|im_start|>assistant\n<think>a</think>\n<tool_call>{"name": "x"}</tool_call><|im_end|>'


def test_the_packaged_files_are_what_the_module_makes(tmp_path):
    small_tokenizer.save(small_tokenizer.train(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), (
            "templates or world have changed: run python -m memsearcher_jax.rl.small_tokenizer"
        )


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text):
    normal = TOKENIZER.normalizer.normalize_str(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == normal


def test_chat_tokens():
    assert TOKENIZER.get_vocab_size() == small_tokenizer.VOCABULARY
    ids = {token: TOKENIZER.token_to_id(token) for token in (*small_tokenizer.SPECIAL, *small_tokenizer.MARKUP)}
    assert sorted(ids.values()) == list(range(small_tokenizer.VOCABULARY - len(ids), small_tokenizer.VOCABULARY))
    encoded = TOKENIZER.encode(CHAT).ids
    assert (encoded[0], encoded[-1], encoded[-2]) == (ids["<|im_start|>"], ids["<|im_end|>"], ids["</tool_call>"])
    assert TOKENIZER.decode(encoded) == CHAT.removeprefix("<|im_start|>").removesuffix("<|im_end|>")


def test_a_name_has_the_same_tokens_wherever_it_stands():
    """So that copying a name is copying ids."""
    world = make_world(WorldConfig(seed=0))
    for name in world.entities:
        alone = TOKENIZER.encode(name).ids
        for text in (
            f'"{name}"\n',
            f"Where is {name} based?",
            f"{name}'s",
            f'"query": "{name}"}}}}',
            f"\\boxed{{{name}}}.",
        ):
            ids = TOKENIZER.encode(text).ids
            assert any(ids[start : start + len(alone)] == alone for start in range(len(ids))), (name, text)


def test_the_fixed_parts_of_a_reply_are_single_tokens():
    reply = '<think>a</think>\n<tool_call>{"name": "wikipedia_search", "arguments": {"query": "b"}}</tool_call>'
    assert len(TOKENIZER.encode(reply).ids) == 9
    assert TOKENIZER.decode(TOKENIZER.encode(reply).ids) == reply


def test_speaks_the_world_in_few_tokens():
    """Measured: 42 tokens a passage, 13 a question, 2.7 a name, in a world that training did not see."""
    world = make_world(WorldConfig(seed=0))

    def mean(texts):
        return sum(len(TOKENIZER.encode(text).ids) for text in texts) / len(texts)

    assert mean([passage.contents for passage in world.passages]) < 46
    assert mean([problem.question for problem in world.test]) < 15
    assert 2 <= mean(world.entities) < 3
    vocabulary = {token.replace("Ġ", " ").strip() for token in TOKENIZER.get_vocab()}
    assert not vocabulary & set(world.entities), "a whole name as one token could only be learned by heart"


@pytest.mark.parity
def test_transformers_reads_it():
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(FOLDER)
    assert (theirs.eos_token, theirs.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for text in (CHAT, "Zoë 漢字 \U0001f600 don't  \n\n x 12"):
        assert theirs(text)["input_ids"] == TOKENIZER.encode(text).ids
        assert theirs.decode(theirs(text)["input_ids"]) == text
