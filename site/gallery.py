"""The gallery: each example file as a page, with a picture of its weights for the overview.

Owns the order of the examples. Must not know what is in one.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import regard

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOK = (
    "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n  display_name: Python 3\n---\n\n"
)


def gallery() -> Iterator[tuple[str, bytes]]:
    """The name and the content of every file of the gallery."""
    cards, names = "", [path.stem for path in sorted(EXAMPLES.glob("*.toml"))]
    for name in names:
        problem = regard.load_problem(EXAMPLES / f"{name}.toml")
        words = f"{problem.note}\n\n" if problem.note else ""
        cards += (
            f":::{{grid-item-card}} {problem.title}\n:link: {name}\n:link-type: doc\n"
            f":img-bottom: {name}.svg\n:img-alt: the weights as a picture\n\n{words}:::\n\n"
        )
        explanation = regard.explain(problem)
        yield f"gallery/{name}.svg", _picture(explanation)
        sheet = explanation.to_worksheet(gradients="loss" in explanation.steps)
        yield f"published/worksheets/{name}.html", sheet.encode()
        yield f"gallery/{name}.md", _page(name, problem.title, words).encode()
    listed = "\n".join(("plots", *names))
    yield (
        "gallery/index.md",
        (
            "# Gallery\n\nEvery example that comes with `regard`. Each is a small file of text; "
            "`regard explain NAME` shows it in a terminal, and `regard explain NAME --html "
            "OUT.html --open` as the page below its picture. [Plots and pages](plots.md) shows "
            "what else an explanation and a diagnosis can be drawn as.\n\n"
            f"::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{cards}::::\n\n"
            f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
        ).encode(),
    )


def _page(name: str, title: str, words: str) -> str:
    return (
        f"{NOTEBOOK}# {title}\n\n{words}"
        f'```{{code-cell}} ipython3\nimport regard\n\nregard.explain(regard.load_problem("{name}"))'
        "\n```\n\n## The file\n\n"
        f"`regard explain {name}` shows it in a terminal. It can be copied and changed: "
        f"`regard examples {name} > own.toml`. [Problem files](../docs/problem-files.md) says what "
        "each key means.\n\n"
        f'<a href="../worksheets/{name}.html">A worksheet</a> to print and to fill in by hand, '
        "with the answers.\n\n"
        f"```{{literalinclude}} ../examples/{name}.toml\n:language: toml\n```\n"
    )


def _picture(explanation: regard.Explanation) -> bytes:
    head = 0 if explanation.heads else None
    return as_svg(explanation.plot("weights", head=head).figure)


def as_svg(figure: Any) -> bytes:
    """A figure as a file that is the same each time, so that Sphinx need not read it again."""
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "regard", "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
    matplotlib.pyplot.close(figure)
    return file.getvalue()
