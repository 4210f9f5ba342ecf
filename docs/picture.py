"""Makes the pictures of README and docs: `python docs/picture.py`, or `… picture.py diagnosis`.

Needs chromium, and `pip install ".[browser]" pillow`. The pages have the fonts of the system; the
pictures were made where Inter is installed.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import regard
from regard.views import report

HERE = Path(__file__).parent
COMMAND = "regard diagnose docs/my_attention.py:attention"
COLUMNS = 98
# Black, red, green, yellow, blue, magenta, cyan and white, as dark pages of regard have them.
COLOURS: list[tuple[int, int, int]] = [
    *((0x17, 0x18, 0x1B), (0xFF, 0x8F, 0x9D), (0x7F, 0xD4, 0x9B), (0xF2, 0xB3, 0x5E)),
    *((0x9D, 0xC1, 0xFF), (0xFF, 0xB8, 0x77), (0x9D, 0xC1, 0xFF), (0xEB, 0xE8, 0xE1)),
]
THEME = TerminalTheme(COLOURS[0], COLOURS[7], COLOURS)
TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 22px 26px; width: max-content; }}
body {{ background: {background}; color: {foreground}; }}
pre {{ margin: 0; font: 15px/1.42 "JetBrains Mono", "DejaVu Sans Mono", monospace; }}
</style><pre>{code}</pre>"""


def main() -> None:
    pictures: dict[str, Callable[[Any], bytes]] = {"report": of_report, "diagnosis": of_terminal}
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in sys.argv[1:] or pictures:
            picture = Image.open(io.BytesIO(pictures[name](browser))).convert("RGB")
            method = Image.Quantize.MAXCOVERAGE if name == "diagnosis" else None
            picture.quantize(128, method).save(HERE / f"{name}.png", optimize=True)
        browser.close()


def of_report(browser: Any) -> bytes:
    """The report with one number opened."""
    page_file = HERE / "report-picture.html"
    report.write(page_file, regard.explain(regard.load_problem("she-likes-coffee")), force=True)
    try:
        page = browser.new_page(viewport={"width": 1440, "height": 800})
        page.goto(page_file.as_uri() + "#cell=scores:2,2")
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(300)
        return page.screenshot()
    finally:
        page_file.unlink()


def of_terminal(browser: Any) -> bytes:
    """What the command prints in a terminal with colours."""
    done = subprocess.run(
        [sys.executable, "-m", *COMMAND.split()],
        cwd=HERE.parent,
        capture_output=True,
        encoding="utf-8",
        check=False,  # a mistake is exit code 1
        env={**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PYTHONUTF8": "1"},
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text.assemble(("$ ", "dim"), (COMMAND, "bold")))
    console.print(Text.from_ansi(done.stdout.rstrip()))
    page = browser.new_page(device_scale_factor=2)
    page.set_content(console.export_html(theme=THEME, inline_styles=True, code_format=TERMINAL))
    return page.locator("body").screenshot()


if __name__ == "__main__":
    main()
