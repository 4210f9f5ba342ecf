"""Makes docs/report.png, the picture in README: `python docs/picture.py`.

Needs chromium, and `pip install ".[browser]" pillow`. The page has the fonts of the system; the
picture was made where Inter is installed.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import regard
from regard.views import report

HERE = Path(__file__).parent
# From the output back to the word vectors: which operand of each number is opened.
WAY = ("O", 2), ("P", 0), ("Y", 0), ("A_s", 0), ("A", 2), ("Q", None)


def main() -> None:
    page_file = HERE / "report-picture.html"
    explanation = regard.load_problem("she-likes-coffee").explain()
    report.write(page_file, explanation, force=True)
    try:
        with sync_playwright() as playwright:
            program = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1440, "height": 1082})
            page.goto(page_file.as_uri() + "#cell=output:0,2")
            for _, operand in WAY:
                if operand is not None:
                    page.locator("#why .operand").nth(operand).click()
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
            page.wait_for_timeout(300)
            picture = Image.open(io.BytesIO(page.screenshot()))
            browser.close()
    finally:
        page_file.unlink()
    picture.convert("RGB").quantize(128).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
