"""Writes the docstrings of Python packages as Markdown, one file for each public name: documents for a corpus.

python examples/docstrings.py optax flax.linen --out documents
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path


def pages(module_name: str) -> dict[str, str]:
    """The Markdown of each public class and function that has a docstring, by its name."""
    module = importlib.import_module(module_name)
    found = {}
    for name, member in inspect.getmembers(module, callable):
        text = inspect.getdoc(member)
        if text and not name.startswith("_"):
            title = f"{module_name}.{name}"
            found[title] = f"# {title}\n\n{name}{signature(member)}\n\n{text}\n"
    return found


def signature(member: object) -> str:
    """The parameters with their defaults, without types; "" for what has none."""
    try:
        described = inspect.signature(member)
    except (TypeError, ValueError):  # of some classes and of functions in C
        return ""
    empty = inspect.Parameter.empty
    parameters = [parameter.replace(annotation=empty) for parameter in described.parameters.values()]
    return str(described.replace(parameters=parameters, return_annotation=empty))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the docstrings of Python packages as Markdown.")
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="such as optax or flax.linen")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets a folder for each module")
    flags = parser.parse_args()
    for module_name in flags.modules:
        folder = flags.out / module_name
        folder.mkdir(parents=True, exist_ok=True)
        written = pages(module_name)
        for title, text in written.items():
            (folder / f"{title}.md").write_text(text, encoding="utf-8")
        print(f"{folder}: {len(written)} pages")


if __name__ == "__main__":
    main()
