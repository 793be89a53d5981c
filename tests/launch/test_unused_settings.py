"""A setting that a command does not read is refused with the name of the one that it reads, or printed as left out."""

import ast
import dataclasses
import inspect
import sys
import typing
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.launch import (
    ask,
    build_index,
    cli,
    evaluate,
    job_output,
    serve_agent,
    serve_search,
    sft,
    sweep,
    tpu_train,
)
from memsearcher_jax.launch.unused_settings import CONDITIONS, UNUSED, given_settings, refuse_unused
from memsearcher_jax.runs.run_dir import located, read_run_config
from tests.launch.command_flags import COMMANDS, flags_of
from tests.support import SMALL_RUN

TINY = str(located("package:tiny"))
ROOT = Path(__file__).resolve().parents[2]
NO_READERS = {
    str(ROOT / file)
    for file in (
        "launch/cli.py",
        "launch/unused_settings.py",
        "memsearcher_jax/checks.py",
        "memsearcher_jax/config.py",
        "memsearcher_jax/jsonl.py",
        "memsearcher_jax/runs/hub.py",
        "memsearcher_jax/runs/inputs.py",
        "memsearcher_jax/runs/path_settings.py",
        "memsearcher_jax/training/config.py",  # rules of the learning rate
    )
}
"""Files whose functions pass over all settings."""


@pytest.mark.parametrize("main", [evaluate.main, ask.main, serve_agent.main])
@pytest.mark.parametrize(
    ("setting", "used"),
    [("agent.max_turns", "evaluation.max_turns"), ("sampling.temperature", "evaluation.temperature")],
)
def test_a_setting_of_training_is_refused_where_evaluation_has_its_own(main, setting, used, refused):
    line = refused(main, ["--config", "tiny", "--checkpoint", TINY, f"--{setting}", "2"])
    assert line == f"error: --{setting} has no effect on this command: set --{used}"


def test_a_sweep_of_evaluations_does_not_compare_equal_rows(refused, tmp_path):
    words = [
        "--setting",
        "agent.max_turns=2,4",
        "--out",
        tmp_path / "out",
        "--",
        "--config",
        "tiny",
        "--checkpoint",
        TINY,
    ]
    assert "set --evaluation.max_turns" in refused(sweep.main, ["--evaluate", *words])


@pytest.mark.parametrize("section", ["judge", "answerer"])
def test_an_address_without_its_backend_is_refused(section, refused):
    words = ["--config", "tiny_memalpha", f"--{section}.url", "http://127.0.0.1:9/v1"]
    backend = cli.load_preset("tiny_memalpha").judge.backend if section == "judge" else "initial_policy"
    assert refused(tpu_train.main, words) == (
        f"error: --{section}.url is of a service, and {section}.backend is {backend}: set --{section}.backend openai"
    )


def test_what_is_left_out_is_printed(capsys):
    words = ["--config", "tiny", "--checkpoint", TINY, "--rl.steps", "3", "--training.seq_len=384", "--sft.epochs=2"]
    cli.parse(evaluate.Evaluate, words)
    assert capsys.readouterr().err == "left out, because this command does not use it: --rl.steps, --sft.epochs\n"
    cli.parse(
        tpu_train.Train, ["--config", "tiny", "--rl.steps", "3", "--answerer.timeout", "9", "--memalpha.core_tokens=9"]
    )
    line = "left out, because this command does not use it: --answerer.timeout, --memalpha.core_tokens\n"
    assert capsys.readouterr().err == line


@hypothesis_settings(max_examples=300)
@given(st.sampled_from(sorted(UNUSED)), st.sampled_from(sorted(settings(RunConfig()))))
def test_a_setting_that_is_not_read_is_never_accepted_in_silence(command, setting):
    unused = UNUSED[command]
    try:
        left_out = refuse_unused(command, given_settings([f"--{setting}=1"]), RunConfig())
    except ValueError as error:
        assert setting in unused.instead or "is of a service" in str(error)
        return
    assert setting not in unused.instead
    assert not unused.has(setting) or left_out == [setting]
    assert set(UNUSED) == {kind.__name__ for kind in COMMANDS.values() if issubclass(kind, cli.Command)} - {
        "Export"
    } | {"AuditCorpus"}, "an export stores every setting"


def test_the_table_names_commands_settings_and_what_is_used_instead():
    known = set(settings(RunConfig()))
    commands = {kind.__name__ for kind in COMMANDS.values()}
    assert set(UNUSED) <= commands | {"AuditCorpus"}
    for condition in CONDITIONS:
        assert all(any(setting.startswith(name) for setting in known) for name in condition.names)
    for unused in UNUSED.values():
        for name in (*unused.names, *unused.but):
            assert name in known or any(setting.startswith(name) for setting in known if name.endswith("."))
        for name, used in unused.instead.items():
            assert {name, used} <= known and not unused.has(used)


def test_a_word_of_a_setting_is_found_in_any_form():
    words = ["--config", "a", "--rl.steps=3", "--agent.max-turns", "4", "question", "--out", "x"]
    assert given_settings(words) == ["rl.steps", "agent.max_turns"]


@pytest.fixture
def settings_read(monkeypatch):
    """The settings that the code reads, apart from functions that pass over all of them."""
    found: set[str] = set()

    def record(kind, prefixes):
        names = {field.name for field in dataclasses.fields(kind)}

        def read(config, name):
            reader = sys._getframe(1).f_code.co_filename
            if name in names and reader.startswith(str(ROOT)) and reader not in NO_READERS:
                found.update(f"{prefix}.{name}" for prefix in prefixes)
            return object.__getattribute__(config, name)

        monkeypatch.setattr(kind, "__getattribute__", read, raising=False)

    sections: dict[type, list[str]] = {}
    for section, kind in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(kind):
            sections.setdefault(kind, []).append(section)
    for kind, prefixes in sections.items():
        record(kind, prefixes)
    return found


def accepted_in_silence(use, config, read):
    """The settings that a command of this use accepts without a line, and does not read with this config."""
    found = set()
    for setting in settings(RunConfig()):
        try:
            is_left_out = refuse_unused(use, [setting], config) != []
        except ValueError:
            continue
        if not is_left_out and setting not in read:
            found.add(setting)
    return found


READ_BY_ALL_OF_THE_CONFIG = {"seed", "published_model", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.cpu_devices"}
READ_BY_RULES = {"training.seq_len", "training.logit_chunk", "rl.advantage_scope", "rl.carry_over"}
OF_THE_ENCYCLOPEDIA = {name for name in settings(RunConfig()) if name.startswith("data.encyclopedia.")}
OF_ROPE_SCALING = {name for name in settings(RunConfig()) if name.startswith("model.rope_scaling.")}
OF_CALLS = {f"agent.{name}" for name in ("carry_memory", "default_top_n", "max_top_n", "on_search_error")}
OF_ANSWERS = {"reward.metric", "reward.wrong_answer", "reward.require_format"}
OF_FILES = {"data.test", "data.root", "data.chunk_words", "data.malformed"}
OF_AN_INDEX = {
    f"retrieval.{name}"
    for name in ("encoder_prompts", "max_query_tokens", "max_passage_tokens", "embedding_dtype", "target_recall")
}
OF_A_SAMPLER = {f"sampling.{name}" for name in ("weights", "prefill_buckets", "top_k", "top_p")}
"""What the code reads under other settings than those of the tests, or where a policy calls a tool and answers."""


def test_an_evaluation_reads_nothing_that_it_leaves_out(finished, tmp_path, settings_read):
    evaluate.main(["--checkpoint", str(finished), "--out", str(tmp_path / "out")])
    assert {"evaluation.max_turns", "model.layers"} <= settings_read
    assert {name for name in settings_read if UNUSED["Evaluate"].has(name)} <= {"teacher.path"}  # which is empty


@pytest.mark.slow
def test_an_evaluation_reads_what_it_accepts(finished, tmp_path, settings_read):
    """A new setting is read, left out, or named here."""
    jax.clear_caches()  # a compiled program reads no settings
    evaluate.main(["--checkpoint", str(finished), "--out", str(tmp_path / "out")])
    unread = accepted_in_silence("Evaluate", read_run_config(finished), settings_read)
    read_by_a_policy_that_knows_its_task = OF_CALLS | OF_ANSWERS | {"agent.rewrite_tokens"}
    with_other_settings = OF_FILES | OF_THE_ENCYCLOPEDIA | OF_AN_INDEX | OF_A_SAMPLER | OF_ROPE_SCALING
    by_others = READ_BY_ALL_OF_THE_CONFIG | {"training.seq_len", "training.logit_chunk"}
    assert unread <= read_by_a_policy_that_knows_its_task | with_other_settings | by_others


def test_asking_reads_nothing_that_it_leaves_out(finished, settings_read):
    ask.main(["--checkpoint", str(finished), "Who?"])
    assert {"evaluation.max_turns", "model.layers"} <= settings_read
    read_by_the_check_of_the_data = {"data.train", "data.test", "data.encyclopedia"}
    assert {name for name in settings_read if UNUSED["Ask"].has(name)} <= {
        "teacher.path"
    } | read_by_the_check_of_the_data


@pytest.mark.slow
def test_supervised_learning_reads_what_it_accepts(finished, tmp_path, settings_read):
    """Apart from the settings of agents, tools and the sampler, which the run stores for its evaluation."""
    jax.clear_caches()
    words = ["--sft.trajectories", str(finished), "--sft.min_reward", "-1", "--out", str(tmp_path / "out")]
    sft.main([*SMALL_RUN.split(), *words])
    unused = UNUSED["SFT"]
    # The first two are replaced by open_state, the last one is read by the check of the data.
    without_effect = {"training.kl_coefficient", "training.old_logprobs", "data.train"}
    assert {name for name in settings_read if unused.has(name)} <= without_effect
    unread = accepted_in_silence("SFT", read_run_config(finished), settings_read)
    of_an_evaluation = ("agent.", "data.", "evaluation.", "retrieval.", "reward.", "sampling.")
    refused = {"training.train_on", "teacher.path", "teacher.top_k", "teacher.on", "teacher.coefficient"}
    by_the_optimizer = {"training.learning_rate", "training.warmup_steps", "training.decay_steps"}
    by_others = READ_BY_ALL_OF_THE_CONFIG | READ_BY_RULES | OF_ROPE_SCALING | {"model.max_positions", "model.adapter"}
    assert {name for name in unread if not name.startswith(of_an_evaluation)} <= refused | by_the_optimizer | by_others


def test_an_index_reads_what_it_accepts(corpus, tmp_path, settings_read):
    words = ["--config", "nano", "--retrieval.corpus", str(corpus), "--retrieval.index_type", "exact"]
    build_index.main([*words, "--out", str(tmp_path / "out")])
    config = cli.parse(build_index.BuildIndex, words).run
    by_rules = READ_BY_RULES | {"model.max_positions", "sampling.context_tokens", "published_model"}
    by_rules |= {"rl.search_timeout", "rl.max_search_outage"}
    unread = accepted_in_silence("BuildIndex", config, settings_read)
    assert unread <= by_rules | {"retrieval.max_passage_tokens"}
    read_by_checks = {name for name in settings_read if name.startswith("agent.")}
    read_by_checks |= {"data.train", "data.test", "sampling.weights", "sampling.kv"}
    assert {name for name in settings_read if UNUSED["BuildIndex"].has(name)} <= read_by_checks


@hypothesis_settings(max_examples=100)
@given(st.sampled_from(sorted(UNUSED)), st.data())
def test_a_setting_without_its_condition_is_never_accepted_in_silence(use, data):
    condition = data.draw(st.sampled_from(CONDITIONS))
    setting = data.draw(st.sampled_from([name for name in settings(RunConfig()) if name.startswith(condition.names)]))
    config = with_settings(
        RunConfig(),
        {
            "agent.workflow": data.draw(st.sampled_from(("memsearcher", "react", "direct", "compact", "memagent"))),
            "agent.harness": data.draw(st.sampled_from(("", "mine.py"))),
            "agent.tools": data.draw(st.sampled_from(((), ("mine.py",)))),
            "data.synthetic": data.draw(st.sampled_from(("encyclopedia", "streams", "documents"))),
            "model.lora_rank": data.draw(st.sampled_from((0, 4))),
            "retrieval.url": data.draw(st.sampled_from(("", "http://a"))),
            "retrieval.method": data.draw(st.sampled_from(("dense", "bm25"))),
            "retrieval.index_type": data.draw(st.sampled_from(("scann", "exact"))),
            "rl.epochs": data.draw(st.sampled_from((0, 2))),
        },
    )
    if setting in UNUSED[use].instead:
        return
    is_accepted = refuse_unused(use, [setting], config) == []
    assert is_accepted == (condition.is_met(config) and not UNUSED[use].has(setting))


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("--agent.workflow react --agent.carry_memory False --agent.memory_tokens 9", "carry_memory, --agent.memory_t"),
        ("--agent.history_tokens 9 --agent.harness_timeout 9", "agent.history_tokens, --agent.harness_timeout"),
        ("--agent.workflow direct --agent.max_turns 3", "agent.max_turns"),
        ("--data.streams.train_streams 3", "data.streams.train_streams"),
        ("--retrieval.timeout 3 --model.lora_alpha 3", "retrieval.timeout, --model.lora_alpha"),
        ("--retrieval.method bm25 --retrieval.target_recall .9", "retrieval.target_recall"),
        ("--rl.epochs 1 --rl.steps 9", "rl.steps"),
    ],
)
def test_a_setting_without_its_condition_is_printed(words, left_out, capsys):
    cli.parse(tpu_train.Train, ["--config", "nano", *words.split()])
    line = capsys.readouterr().err
    assert line.startswith("left out, because this command does not use it: --") and left_out in line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_read(command):
    """By its module, by those of its base classes, or by a module that gets all of its flags."""
    kinds = [kind for kind in COMMANDS[command].__mro__ if kind is not object]
    files = {Path(inspect.getsourcefile(kind) or "") for kind in kinds}
    if command in ("train", "sft"):
        files.add(Path(job_output.__file__))
    attributes = {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }
    slots_of_a_template = {name for name in ("image", "max_restarts", "grace_seconds") if command == "jobset"}
    assert {flag.name for flag in flags_of(command)} - attributes <= slots_of_a_template


@pytest.mark.parametrize("main", [serve_agent.main, serve_search.main])
def test_a_service_has_no_result_to_write(main, tmp_path, refused):
    line = refused(main, ["--config", "tiny", "--checkpoint", TINY, "--json", tmp_path / "result.json"])
    assert line == "error: --json writes the result of a command, and a service has none: omit it"
