"""What the tests of pages in a browser have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WIDTHS = (1440, 768, 390)
PATIENCE = 120_000  # milliseconds: a shared machine may stand still for a while

PAYLOADS = [
    "</script><img src=x onerror=pwned=1>",
    "</script x",
    "<!--<script>",
    '"><b onmouseover=pwned=1>',
    "' onclick='pwned=1",
    "{{ 7 * 7 }}{% raw %}",
    "${pwned=1}`",
    "a\u2028b\u2029c",
    "\u202egnihtemos\u2066",
    "&lt;b&gt; &amp;",
    "x" * 10_000,
    "👩‍👩‍👧 ́́́",
    "שלום עולם",
    "\x00\x1b[31m",
    "]]>",
]

# Every element with the names of its attributes. How much of a station's own title is written
# depends on the room that labels leave; it has no text from outside.
ELEMENTS = """() =>
  [...document.querySelectorAll("*:not(.station h2 *, .word, .word *)")].map((one) =>
    [one.tagName, ...[...one.attributes].map(({ name }) => name)
      .filter((name) => name !== "data-pad").sort()].join(" "))"""
WORDS = """() => [...document.querySelectorAll(".word")].map((one) =>
  one.children.length === 1 && one.firstChild.tagName === "BDI"
    && !one.firstChild.children.length)"""


def violations(page: Any) -> list[Any]:
    import axe_core_python

    axe = Path(axe_core_python.__file__).with_name("axe.min.js").read_text("utf-8")
    page.evaluate(axe)
    return [
        (one["id"], one["impact"], node["html"], node.get("failureSummary"))
        for one in page.evaluate("axe.run()")["violations"]
        for node in one["nodes"][:3]
    ]
