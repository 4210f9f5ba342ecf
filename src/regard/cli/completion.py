"""What the shell offers to complete: sources, steps and kernels."""

from __future__ import annotations

import os
from glob import escape, glob

from regard.errors import safe_text


def complete_example(incomplete: str) -> list[str]:
    """The names of the examples."""
    from regard.problems.files import example_names

    return [name for name in example_names() if name.startswith(incomplete)]


def complete_source(incomplete: str) -> list[str]:
    """Examples, and files that may hold a problem."""
    from regard.problems.files import SUFFIXES

    found = complete_example(incomplete)
    for path in sorted(glob(f"{escape(incomplete)}*")):
        if os.path.isdir(path):
            path += "/"
        if path.endswith(("/", *SUFFIXES)) and safe_text(path) == path:
            found.append(path)
    return found


def complete_step(incomplete: str) -> list[str]:
    """The names of the steps, those of the loss and the gradients too."""
    from regard.problems.parts import backward_axes
    from regard.views.all_steps import declared

    return [name for name in (*declared(), *backward_axes()) if name.startswith(incomplete)]


def complete_kernel(incomplete: str) -> list[str]:
    """The names of the kernels."""
    from regard.compute.dispatch import kernel_names

    return [name for name in kernel_names() if name.startswith(incomplete)]
