"""The documentation: every page is in the site's menu, and every package has an API page."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]


def pages(entry):
    if isinstance(entry, str):
        return [entry]
    return [page for child in (entry.values() if isinstance(entry, dict) else entry) for page in pages(child)]


def test_the_menu_has_every_page():
    menu = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    docs = ROOT / "docs"
    assert sorted(menu) == sorted(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))


def test_every_package_has_an_api_page():
    packages = {path.parent.name for path in (ROOT / "memsearcher_jax").glob("*/__init__.py")}
    documented = {path.stem for path in (ROOT / "docs" / "api").glob("*.md")}
    assert packages == documented
    for name in packages:
        assert f"::: memsearcher_jax.{name}\n" in (ROOT / "docs" / "api" / f"{name}.md").read_text(encoding="utf-8")
