"""A libtpu that JAX was not built for is one line, before anything is compiled."""

from importlib import metadata
from types import SimpleNamespace

import pytest

from memsearcher_jax.launch import cli, plan_tpu, preconditions


@pytest.fixture
def versions(monkeypatch):
    """Sets the installed version of libtpu, and what jax requires of it."""

    def install(installed: str, required: str) -> None:
        actual = metadata.version
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        package = SimpleNamespace(submodule_search_locations=["/venv/libtpu"])
        monkeypatch.setattr(preconditions.importlib.util, "find_spec", lambda name: package)
        monkeypatch.setattr(metadata, "requires", lambda name: ["jaxlib==1", f'libtpu{required}; extra == "tpu"'])
        monkeypatch.setattr(metadata, "version", lambda name: installed if name == "libtpu" else actual(name))

    return install


@pytest.mark.parametrize(
    ("installed", "required", "is_old"),
    [
        ("0.0.17", "==0.0.42.*", True),
        ("0.0.9", "==0.0.42.*", True),
        ("0.0.42.1", "==0.0.42.*", False),
        ("0.0.42", "==0.0.42.*", False),
        ("0.0.43", "==0.0.42.*", False),
        ("0.1", "==0.0.42.*", False),
        ("0.0.17", "", False),
    ],
)
def test_an_older_libtpu_than_jax_requires_is_found(installed, required, is_old, versions):
    versions(installed, required)
    assert preconditions.libtpu_fault().startswith(f"libtpu {installed} is too old, jax ") == is_old


def test_a_library_of_the_image_is_named(versions, monkeypatch):
    versions("0.0.42.1", "==0.0.42.*")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/lib/libtpu.so")
    assert preconditions.libtpu_fault().startswith("TPU_LIBRARY_PATH is /lib/libtpu.so, and jax ")
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/venv/libtpu/libtpu.so")  # as an import of libtpu sets it for its children
    assert not preconditions.libtpu_fault()


def test_a_plan_refuses_it_and_a_start_on_a_tpu_prints_it(versions, refused, monkeypatch, capsys):
    versions("0.0.17", "==0.0.42.*")
    assert "libtpu 0.0.17 is too old" in refused(plan_tpu.main, ["--config", "nano", "--topology", "v5e:1x1"])
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setattr("sys.argv", ["train"])
    cli.run(lambda argv: None)
    assert capsys.readouterr().err.startswith("libtpu 0.0.17 is too old")
