"""A plugin for pytest: `--regard-findings` lists what every assertion of a run has diagnosed.

Put ``pytest_plugins = ["regard.testing.plugin"]`` into conftest.py, or run pytest with
``-p regard.testing.plugin``. Must not know how anything is diagnosed.
"""

from __future__ import annotations

from typing import Any

import pytest

from regard import testing

_LINES = pytest.StashKey[list[str]]()
_KEY = "regard_findings"  # of the list that a worker of pytest-xdist sends


def pytest_addoption(parser: Any) -> None:
    """The option."""
    parser.getgroup("regard").addoption(
        "--regard-findings",
        action="store_true",
        help="list every attention that regard.testing has diagnosed, with all findings",
    )


def pytest_configure(config: Any) -> None:
    """Start an empty list; with pytest-xdist, take the lists of the workers when they end."""
    testing.diagnosed.clear()
    config.stash[_LINES] = []
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_Workers(config), "regard-workers")


class _Workers:
    """What pytest-xdist reports."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        self.config.stash[_LINES] += getattr(node, "workeroutput", {}).get(_KEY, [])


def pytest_sessionfinish(session: Any) -> None:
    """Hand over what was diagnosed here."""
    lines = [str(found) for found in testing.diagnosed]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = lines
    session.config.stash[_LINES] += lines


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print it, each with what is wrong, fragile or worth knowing."""
    if not config.getoption("--regard-findings"):
        return
    terminalreporter.section("regard")
    for text in config.stash[_LINES] or ["no attention was diagnosed"]:
        terminalreporter.write_line(text)
        terminalreporter.write_line("")
