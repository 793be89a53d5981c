"""The documentation: its size, menu and links; every command that it shows exists, with its flags and presets."""

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
from collections import defaultdict
from pathlib import Path

import pytest

from memsearcher_jax.config import RunConfig, settings
from memsearcher_jax.launch import cli, evaluate, tpu_train

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {
    page: page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
COMMANDS = defaultdict(list)  # arguments by program
for text in TEXTS.values():
    joined = re.sub(r"-m examples\.warmstart\.(\w+)", r"examples/warmstart/\1.py", re.sub(r" *\\\n *", " ", text))
    for name, words in re.findall(r"(?:python (?=\S*/)|`(?=\w+\.py \S))([\w/]+\.py)([^`\n]*)", joined):
        paths = [ROOT / folder / name for folder in ("", "launch", "benchmarks", "examples/warmstart")]
        COMMANDS[next((path for path in paths if path.is_file()), name)].append(words.split("  #")[0].strip())


def anchors(text):
    """Of its headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@functools.cache
def known_flags(module):
    """Of a command: those on its help page, and the settings if it takes any."""
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit):
        importlib.import_module(f"memsearcher_jax.launch.{module}").main(["--help"])
    flags = set(re.findall(r"--[\w.]+", output.getvalue()))
    return flags | {f"--{name}" for name in settings(RunConfig()) if "--SECTION.NAME" in flags}


def test_pages_can_be_read_as_text():
    without_diagrams = [re.sub(r"```mermaid.*?```", "", text, flags=re.DOTALL) for text in TEXTS.values()]
    prose = [line for text in without_diagrams for line in text.splitlines() if line[:1] not in "| !"]
    assert not [line for line in prose if len(line) > 120]
    assert not [line for line in prose if re.match(r"(pip|python|memsearcher) ", line)]  # commands are indented


def test_the_menu_has_every_page_and_every_package():
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(menu) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    packages = {path.parent.name for path in (ROOT / "memsearcher_jax").glob("*/__init__.py")}
    assert packages == {page.stem for page, text in TEXTS.items() if f"::: memsearcher_jax.{page.stem}\n" in text}


def test_links_lead_to_pages_headings_and_images():
    images = set()
    for page, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(TEXTS[path]), f"{page.name}: {target}#{anchor}"
            images |= {path} if path.suffix == ".png" else set()
    assert images == set((ROOT / "docs").rglob("*.png"))


def test_files_that_the_page_on_how_it_works_names_exist():
    files = set(re.findall(r"(?:<code>|`)(\w[\w/]*/\w+\.py)", TEXTS[ROOT / "docs" / "how_it_works.md"]))
    folders = (ROOT, ROOT / "memsearcher_jax")
    assert len(files) > 10
    assert not [file for file in files if not any((folder / file).is_file() for folder in folders)]


def test_a_pytest_command_selects_tests():
    text = " ".join(word for page in TEXTS.values() for word in page.split())
    for file, word in re.findall(r"pytest [^`#]*?(tests/\S+\.py)(?: -k (\w+))?", text):
        assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8")), f"{file} -k {word}"


@pytest.mark.parametrize("program", COMMANDS, ids=lambda path: Path(path).name)
def test_a_program_exists_with_the_flags_and_presets_of_its_commands(program):
    assert isinstance(program, Path), f"there is no {program}"
    for words in COMMANDS[program]:
        for preset in re.findall(r"--config ([a-z]\w+)(?= |$)", words):
            cli.load_preset(preset)
        flags = set(re.findall(r"(?<!\S)--[\w.]*\w", words))
        if program.parent.name != "launch":  # its own flags are not settings
            assert {flag[2:] for flag in flags if "." in flag} <= set(settings(RunConfig()))
        else:
            assert flags <= known_flags(program.stem) | (known_flags("tpu_train") if " -- " in words else set()), words


@pytest.mark.parametrize("words", COMMANDS[ROOT / "launch" / "sweep.py"])
def test_sweeps_have_valid_values(words):
    own, _, rest = words.partition(" -- ")
    name, _, values = re.findall(r"--setting (\S+)", own)[0].partition("=")
    command = evaluate.Evaluate if "--evaluate" in own else tpu_train.Train
    for value in values.split(","):
        cli.parse(command, [*shlex.split(re.sub(r"--checkpoint \S+|…", "", rest)), f"--{name}", value])


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_python_examples_compile_and_import_what_exists(page):
    for block in re.findall(r"^(    (?:from|import|#) .*\n(?:(?:    .*)?\n)*)", TEXTS[page], flags=re.MULTILINE):
        for node in ast.walk(ast.parse("\n".join(line[4:] for line in block.splitlines()))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("memsearcher_jax"):
                assert all(hasattr(importlib.import_module(node.module), alias.name) for alias in node.names)
