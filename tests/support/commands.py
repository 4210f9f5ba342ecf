"""The command line in this process, built once: typer's runner builds it again for every call."""

from __future__ import annotations

from functools import cache

import typer.testing
from typer.testing import CliRunner

__all__ = ["CliRunner"]

typer.testing._get_command = cache(typer.testing._get_command)
