"""Loading the function that a command line names: `file.py:f`, `book.ipynb:f`, `package.module:f`.

Loading runs the file, so the command does it in a child process. Must not know what is done with
the function.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import linecache
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from regard.errors import OptionError, ProblemError, safe_text

MAX_BYTES = 2**24


def load(target: str) -> Any:
    """The function that `target` names.

    An OptionError is raised unless that is `place:name`, a ProblemError if it cannot be loaded.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise OptionError(
            f"{safe_text(target, 100)}: write path/to/file.py:function or package.module:function"
        )
    module = _loaded(place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            own = [n for n, one in vars(module).items() if callable(one) and n[0] != "_"]
            known = f"; it has {', '.join(sorted(own)[:8])}" if own else ""
            raise ProblemError(
                f"{safe_text(place, 100)} has no {safe_text(part, 60)}{safe_text(known, 200)}"
            )
        found = getattr(found, part)
    return found


def files_of(target: str) -> list[str]:
    """The files that loading a target reads: its own, and those of the packages around a module."""
    place = target.rpartition(":")[0]
    if is_file(place):
        return [place]
    found: list[str] = []
    where: Any = [os.getcwd(), *sys.path]
    parts = place.split(".")
    for end in range(1, len(parts) + 1):  # nothing is imported, and so nothing runs
        spec = PathFinder.find_spec(".".join(parts[:end]), where)
        if spec is None:
            break
        found += [spec.origin] if spec.origin else []
        where = spec.submodule_search_locations or []
    return found


def is_file(place: str) -> bool:
    """Whether a target's place is a file, not a module."""
    return place.endswith((".py", ".ipynb")) or os.sep in place


def _loaded(place: str) -> ModuleType:
    try:
        if place.endswith(".ipynb"):
            return _notebook(Path(place))
        if is_file(place):
            return _file(Path(place))
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except (ProblemError, OSError):
        raise
    except (Exception, SystemExit) as error:
        text = safe_text(f"{type(error).__name__}: {error}", 200)
        raise ProblemError(f"{safe_text(place, 100)} cannot be loaded: {text}") from None


class _Uncached(SourceFileLoader):
    """Reads code from the file itself: Python's cache misses a change within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        """The code that the file has now."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ProblemError(f"{safe_text(path, 100)}: no such file")
    sys.path.insert(0, str(path.resolve().parent))
    own = _Uncached(path.stem, str(path)) if path.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=own)
    if spec is None or spec.loader is None:
        raise ProblemError(f"{safe_text(path, 100)}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _notebook(path: Path) -> ModuleType:
    """The code cells of a notebook, run in order; a cell that fails is skipped."""
    module = ModuleType(path.stem)
    sys.path.insert(0, str(path.resolve().parent))
    for number, source in code_cells(path):
        place = f"{path.name}[{number}]"
        # Where the lines of code that no file has are looked for.
        linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
        try:
            exec(compile(source, place, "exec"), vars(module))
        except Exception as error:
            text = safe_text(f"{type(error).__name__}: {error}", 120)
            print(f"cell {number}: {text}", file=sys.stderr)
    return module


def code_cells(path: Path) -> list[tuple[int, str]]:
    """The position and the source of each code cell, without commands to IPython and the shell."""
    if not path.is_file():
        raise ProblemError(f"{safe_text(path, 100)}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ProblemError(f"{safe_text(path, 100)}: more than {MAX_BYTES} bytes")
    try:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        found = [
            (number, "".join(cell["source"]).split("\n"))
            for number, cell in enumerate(cells)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ProblemError(f"{safe_text(path, 100)}: is not a notebook") from None
    return [
        (number, "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines))
        for number, lines in found
    ]
