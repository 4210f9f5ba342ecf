"""The command line in this process, built once: typer's own runner builds it for every call."""

from __future__ import annotations

from functools import cache
from typing import Any

import typer.testing
from typer.main import get_command

built = cache(get_command)


class CliRunner(typer.testing.CliRunner):
    """Calls commands as typer's does."""

    def invoke(self, app: typer.Typer, *words: Any, **more: Any) -> Any:
        return super(typer.testing.CliRunner, self).invoke(built(app), *words, **more)
