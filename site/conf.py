"""How Sphinx builds the site; `python site/build.py` lays out what it reads, and calls it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import regard  # noqa: E402

project = "regard"
author = copyright = "the regard developers"
version = release = regard.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_design",
    "frames",
]
exclude_patterns = ["examples", "notebooks", "published"]
default_role = "py:obj"
nitpicky = False

# Docstrings
autosummary_generate = True
autodoc_typehints = "none"  # numpydoc says the types in words
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "transformers"]  # gigabytes, of which only names are needed
napoleon_google_docstring = False
napoleon_use_rtype = False

# Pages: cells run once, and again when one of them changes. A cell that fails ends the build.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "error"  # a warning of a cell ends the build too
nb_code_prompt_show = "Show one answer"  # only answers are folded away
nb_code_prompt_hide = "Hide it"

# Nothing is loaded from a network when the site is read: the one file of MathJax lies beside it.
_mathjax = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
html_static_path = ["static", str(_mathjax / "tex-svg-full.js")]
mathjax_path = "tex-svg-full.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "pydata_sphinx_theme"
html_title = "regard"
html_css_files = ["site.css"]
html_js_files = ["keyboard.js"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": []}
html_theme_options = {
    "logo": {"text": "regard"},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_prev_next": True,
    "collapse_navigation": True,
    "footer_start": ["copyright"],
    "footer_end": [],
    # A report wants the width that a list of three headings would take.
    "secondary_sidebar_items": {
        pages: ["page-toc"] for pages in ("docs/*", "reference/*", "[A-Z]*")
    },
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
