"""Files of a user's own that import files beside them."""

import pytest

from memsearcher_jax.python_files import CodeName, imported_files, load


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "agent.py").write_text(
        "import helpers\nfrom helpers import SECRET\n\n\ndef late():\n    import other\n    return other.NAME\n"
    )
    (tmp_path / "helpers.py").write_text("import json, more\nSECRET = more.VALUE + json.dumps([1])\n")
    (tmp_path / "more.py").write_text("import agent\nVALUE = 'one'\n")
    (tmp_path / "other.py").write_text("NAME = 'late'\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('a library is replaced')\n")
    (tmp_path / "unused.py").write_text("raise RuntimeError('nobody imports it')\n")
    return tmp_path


def test_a_file_imports_those_beside_it(folder):
    module = load(folder / "agent.py", "agent.workflow")
    assert (module.SECRET, module.late(), module.helpers.SECRET) == ("one[1]", "late", "one[1]")
    names = {file.name for file in imported_files(folder / "agent.py")}
    assert names == {"agent.py", "helpers.py", "more.py", "other.py"}
    assert load(folder / "agent.py", "reward.function") is module, "one module, whatever it is used for"


def test_an_import_that_changed_is_executed_again(folder):
    before = load(folder / "agent.py", "agent.workflow")
    (folder / "more.py").write_text("VALUE = 'two'\n")
    assert load(folder / "agent.py", "agent.workflow").SECRET == "two[1]"
    assert before.SECRET == "one[1]"


def test_files_of_one_name_in_two_folders_are_two_modules(folder, tmp_path_factory):
    second = tmp_path_factory.mktemp("second")
    (second / "agent.py").write_text("import helpers\nSECRET = helpers.SECRET\n")
    (second / "helpers.py").write_text("SECRET = 'of the second'\n")
    assert load(second / "agent.py", "agent.tools").SECRET == "of the second"
    assert load(folder / "agent.py", "agent.tools").SECRET == "one[1]"


def test_an_error_in_an_import_names_its_line(folder):
    (folder / "more.py").write_text("\n\n1 / 0\n")
    with pytest.raises(ValueError, match=r"agent\.workflow .*agent\.py: ZeroDivisionError.* \(more\.py, line 3\)"):
        load(folder / "agent.py", "agent.workflow")
    (folder / "more.py").write_text("import nowhere\n")
    with pytest.raises(ValueError, match=r"No module named 'nowhere' \(more\.py, line 1\)"):
        load(folder / "agent.py", "agent.workflow")


def test_what_a_setting_names():
    assert CodeName.of("a/shop.py:Shop") == ("a/shop.py", "Shop")
    assert CodeName.of("a/shop.py") == ("a/shop.py", "") and str(CodeName("shop.py", "Shop")) == "shop.py:Shop"
    for value in ("memsearcher", "shop.py:", "shop.py:3", "mcp:http://host/mcp"):
        assert CodeName.of(value) == ("", "")
