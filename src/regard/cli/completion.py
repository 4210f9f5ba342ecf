"""What the shell offers to complete: sources, steps and kernels."""

from __future__ import annotations

import os

from regard.errors import safe_text


def complete_source(incomplete: str) -> list[str]:
    """Examples, and files that may hold a problem."""
    from regard.problems.files import SUFFIXES, example_names

    folder, _, start = incomplete.rpartition("/")
    found = [name for name in example_names() if name.startswith(incomplete)]
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return found
    for entry in entries:
        path = f"{folder}/{entry.name}" if "/" in incomplete else entry.name
        if entry.name.startswith(start) and safe_text(path) == path:
            if entry.is_dir():
                found.append(f"{path}/")
            elif entry.name.endswith(SUFFIXES):
                found.append(path)
    return found


def complete_step(incomplete: str) -> list[str]:
    """The names of the steps."""
    from regard.views.all_steps import declared

    return [name for name in declared() if name.startswith(incomplete)]


def complete_kernel(incomplete: str) -> list[str]:
    """The names of the kernels."""
    from regard.compute.dispatch import kernel_names

    return [name for name in kernel_names() if name.startswith(incomplete)]
