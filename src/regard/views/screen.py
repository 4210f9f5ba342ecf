"""Where tables and stories are printed: a stream, and what the environment says of its terminal.

rich reads the same variables, but some values end it with a traceback or make it print without end;
those count as not set. Must not know what is printed.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """Standard output, or standard error, for rich."""
    from rich.console import Console

    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES") or re.fullmatch("[0-9]{1,4}", value)
    }
    # NO_COLOR asks for no colour; rich would still print bold and dim.
    console = Console(
        stderr=stderr,
        markup=False,
        highlight=False,
        emoji=False,
        color_system=None if environment.get("NO_COLOR") else "auto",
        _environ=environment,
    )
    if console.width < 1:  # COLUMNS=0 means unknown; rich would leave out every word
        console.width = 80
    return console
