"""Reports that cells show become files of the site, so that a page stays small.

A notebook shows an explanation as an <iframe> whose `srcdoc` is the whole report. Here each report
is written once, beside the pages, and the frame names it and loads it when it comes into view. Must
not know what a report says.
"""

from __future__ import annotations

import hashlib
import re
from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

FRAME = re.compile(r'(?P<before><iframe [^>]*?)srcdoc="(?P<page>[^"]*)"(?P<after>[^>]*></iframe>)')
FOLDER = "_reports"


def to_files(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Write every framed page of this document to a file, and frame the file."""
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / FOLDER
    up = "../" * page.count("/")

    def written(found: re.Match[str]) -> str:
        report = unescape(found["page"]).encode()
        name = hashlib.sha256(report).hexdigest()[:16] + ".html"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(report)
        place = f"{up}{FOLDER}/{name}"
        frame = f'{found["before"]}class="report" loading="lazy" src="{place}"{found["after"]}'
        return f'{frame}<p class="report-alone"><a href="{place}">This page alone</a></p>'

    for node in doctree.findall(nodes.raw):
        if "html" in node.get("format", "").split() and "<iframe" in (text := node.astext()):
            node.children = []
            node.rawsource = FRAME.sub(written, text)
            node += nodes.Text(node.rawsource)


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-resolved", to_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
