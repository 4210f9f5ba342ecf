"""Problems on file: TOML and JSON to read and write by hand, NPZ for large arrays.

Owns which format a suffix means and whose file an error is about. Any file is read within stated
time and memory, or refused by one `ProblemError` on one line; nothing is ever unpickled.
"""

from __future__ import annotations

import difflib
import os
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.boundary import files, npz
from regard.boundary.files import MAX_TEXT_BYTES, about, decode, file_name
from regard.boundary.parse import shown
from regard.boundary.toml_json import Kind, parse, spell
from regard.errors import DtypeError, ProblemError, safe_text
from regard.problems.problem import Problem
from regard.problems.schema import mapping_from_problem, problem_from_mapping, target_from

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "about",
    "example_names",
    "example_text",
    "file_of",
    "load_problem",
    "mapping_from_problem",
    "parse_problem",
    "problem_from_mapping",
    "save_problem",
]

SUFFIXES = (".toml", ".json", ".npz")
_KINDS: dict[str, Kind] = {".toml": "toml", ".json": "json"}


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """A problem from a file (.toml, .json or .npz), or a packaged example by its name.

    Parameters
    ----------
    path : str or path
        Where the file is; or one of `example_names()`.

    Raises
    ------
    ProblemError
        If the file cannot be read or does not hold a problem: one line with the file, the key and
        how to fix it. Reading a file raises no other error.

    Examples
    --------
    >>> load_problem("she-likes-coffee").query_labels
    ('she', 'likes', 'coffee')
    """
    place = file_name(path)
    suffix = os.path.splitext(place)[1].lower()
    if suffix in SUFFIXES:
        with about(place):
            data = _read(place, suffix)
    elif not suffix and not os.path.dirname(place):
        text, place = example_text(place), f"{place}.toml"
        with about(place):
            data = parse(text, "toml")
    else:
        raise ProblemError(f"{safe_text(place, 200)}: {_unknown_suffix(suffix)}")
    return problem_from_mapping(data, place)


def load_target(problem: Problem, path: str | os.PathLike[str]) -> Problem:
    """A problem with the target in a file: its key `target`, or in JSON the numbers alone."""
    place = file_name(path)
    suffix = os.path.splitext(place)[1].lower()
    with about(place):
        if suffix not in SUFFIXES:
            raise ProblemError(_unknown_suffix(suffix))
        return problem.replace(target=target_from(_read(place, suffix), problem.query_labels))


def file_of(path: str | os.PathLike[str]) -> str:
    """The file that `load_problem` reads for a path, or for the name of an example."""
    place = file_name(path)
    if os.path.splitext(place)[1] or os.path.dirname(place):
        return place
    return str(_example_folder() / f"{place}.toml")


def parse_problem(text: str, kind: Kind, source: str = "") -> Problem:
    """A problem from TOML or JSON text; `source` names its origin in errors.

    >>> parse_problem('{"queries": [1], "keys": [[2]], "values": [[3]]}', "json")
    Problem
      given       queries (1,)  keys (1, 1)  values (1, 1)
    """
    if kind not in ("toml", "json"):
        raise ProblemError(f'kind is {shown(kind)}; it must be "toml" or "json"')
    source = source or f"{kind} text"
    with about(source):
        if not isinstance(text, str):
            raise ProblemError(f"text must be a string, not {shown(text)}")
        data = parse(text, kind)
    return problem_from_mapping(data, source)


def save_problem(problem: Problem, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a problem to a file whose suffix says the format; reading it gives the same problem.

    A file that is there already is replaced only with `force`, and only as a whole.
    """
    if not isinstance(problem, Problem):
        made_from = isinstance(getattr(problem, "problem", None), Problem)
        hint = "; pass its .problem" if made_from else "; make one: regard.Problem(…)"
        raise DtypeError(f"problem must be a Problem, not {type(problem).__name__}{hint}")
    place = file_name(path)
    suffix = os.path.splitext(place)[1].lower()
    with about(place):
        if suffix not in SUFFIXES:
            raise ProblemError(_unknown_suffix(suffix))
        data = mapping_from_problem(problem, tables=suffix != ".npz")
        content = b"" if suffix == ".npz" else spell(data, _KINDS[suffix]).encode()
    with files.write_file(place, force=force) as file, about(place):
        if suffix == ".npz":
            npz.write(file, data)
        else:
            file.write(content)


def example_names() -> tuple[str, ...]:
    """The names of the examples that come with the package."""
    folder = _example_folder()
    if not folder.is_dir():
        return ()
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def example_text(name: str) -> str:
    """The file of an example, comments included.

    >>> print(example_text("she-likes-coffee").splitlines()[0])
    # Self-attention over three words, small enough for a pencil.
    """
    names = example_names()
    if name not in names:
        start = name[:100].lower()
        near = [one for one in names if start and one.startswith(start)]
        near = near or difflib.get_close_matches(start, names, n=1)
        near = [one for one in (f"{name}{end}" for end in SUFFIXES) if os.path.isfile(one)] or near
        hint = f"did you mean {safe_text(near[0], 100)}? " if near else ""
        have = f"the examples are {', '.join(names)}" if names else "no examples are installed"
        raise ProblemError(
            f"{safe_text(name, 100)}: there is no example of this name; {hint}{have}; "
            f"a file ends in {', '.join(SUFFIXES)}"
        )
    place = f"{name}.toml"
    with about(place):
        return decode((_example_folder() / place).read_bytes())


# --- parts of them -------------------------------------------------------------------------------


def _read(place: str, suffix: str) -> Any:
    if suffix == ".npz":
        # Packing may add a little to what cannot be packed.
        with files.open_file(place, npz.MAX_BYTES + npz.FREE_BYTES) as file:
            return npz.read(file)
    return parse(decode(files.read_file(place, MAX_TEXT_BYTES)), _KINDS[suffix])


def _example_folder() -> Traversable:
    installed = package_files("regard") / "examples"
    # In a source tree the examples are beside src.
    source = Path(__file__).resolve().parents[2]
    if not installed.is_dir() and source.name == "src":
        return source.parent / "examples"
    return installed


def _unknown_suffix(suffix: str) -> str:
    return f"the suffix {shown(suffix)} says no format; it must be one of {', '.join(SUFFIXES)}"
