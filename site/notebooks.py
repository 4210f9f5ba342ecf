"""Pages with cells as notebooks to download: what a reader is to write is left open.

Must not execute anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from myst_nb.core.read import read_myst_markdown_notebook
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

# What a reader fills in: shown on the page, and a cell of the notebook.
OPEN = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
# What only Sphinx understands: the text of a link, and the link to the notebook itself.
DOWNLOAD = re.compile(r"^\{download\}.*\n", re.MULTILINE)
LINK = re.compile(r"\[(.*?)\]\([^)#]+\.(?:md|rst)(?:#[^)]*)?\)")


def is_notebook(text: str) -> bool:
    """Whether a page has cells."""
    return text.startswith("---\nfile_format: mystnb\n")


def notebook(text: str) -> str:
    """The page as the JSON of a notebook, with empty outputs and without the answers."""
    made = read_myst_markdown_notebook(text, add_source_map=False)
    cells = [cell for page in made.cells for cell in _cells(page)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # the same file from the same page
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    own = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(own, ensure_ascii=False, indent=1) + "\n"


def _cells(cell: NotebookNode) -> Iterator[NotebookNode]:
    if cell.cell_type == "code":
        if "answer" not in cell.metadata.get("tags", ()):
            yield new_code_cell(cell.source)
        return
    prose, *rest = OPEN.split(DOWNLOAD.sub("", cell.source))
    parts = [(prose, True), *((part, bool(number % 2)) for number, part in enumerate(rest))]
    for part, is_prose in parts:
        if part.strip() and is_prose:
            yield new_markdown_cell(LINK.sub(r"\1", part.strip()))
        elif part.strip():
            yield new_code_cell(part.strip())
