"""How soon a page is on the screen, and how soon it follows an edit, in Debian's Chromium.

python benchmarks/page.py

For each page: its bytes, milliseconds to the first paint, and of an edit the least and the median
of thirty, the layout of the page included. The bars: 100 ms and 1 s to the first paint (a classroom
page, 500 tokens), 16 ms for an edit up to 60 tokens.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

import regard

EDIT = """(step) => Array.from({ length: 30 }, (_, k) => {
  const start = performance.now();
  regard.edit(step, [0, 0], k / 7);
  document.body.getBoundingClientRect();
  return performance.now() - start;
})"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def embedded(tokens: int, width: int, **more: object) -> regard.Explanation:
    rng = np.random.default_rng(tokens)
    words = [f"w{number}" for number in range(tokens)]
    given = {name: rng.normal(size=(width, width)) / 4 for name in ("W_q", "W_k", "W_v")}
    embeddings = rng.normal(size=(tokens, width))
    return regard.explain(
        regard.Problem(query_labels=words, embeddings=embeddings, **given, **more)
    )


PAGES = {
    "she likes coffee": lambda: regard.explain(regard.load_problem("she-likes-coffee")),
    "six words": lambda: embedded(6, 4),
    "six words, gradients": lambda: embedded(6, 4, target=np.ones((6, 4))),
    "40 tokens, causal": lambda: embedded(40, 32, causal=True),
    "60 tokens, causal": lambda: embedded(60, 16, causal=True),
    "500 tokens, causal": lambda: embedded(500, 64, causal=True),
}


def main() -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        print(f"{'page':24}{'bytes':>10}{'paint ms':>10}{'edit ms':>10}{'median':>10}")
        for name, make in PAGES.items():
            path = Path(folder) / "page.html"
            make().to_html(path, force=True)
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(path.as_uri())
            page.wait_for_timeout(500)
            edits = page.evaluate(EDIT, "embeddings")
            numbers = (page.evaluate(PAINT), min(edits), statistics.median(edits))
            shown = "".join(f"{number:>10.1f}" for number in numbers)
            print(f"{name:24}{path.stat().st_size:>10}{shown}")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
