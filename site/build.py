"""Build the documentation site: `python site/build.py`, or `nox -s docs` in a fresh environment.

Owns the folder build/site: `source` is what Sphinx reads, laid out as the repository is, so that
links between pages are the same here and there; `html` is the site; `cache` has executed notebooks.
A cell that fails and every warning end the build. Must not know what a page says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from gallery import gallery  # noqa: E402
from generated import pages  # noqa: E402
from kept_by import linked, tests  # noqa: E402
from mistakes import mistakes  # noqa: E402
from notebooks import is_notebook, notebook  # noqa: E402
from problem_schema import problem_schema  # noqa: E402
from speed import speed  # noqa: E402

# What the site shares with readers of the repository, with its place in both.
SHARED = ("docs/*.md", "docs/*.png", "docs/*.py", "examples/*.toml")
SHARED += ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SHARED += ("src/regard/compute/kernels/cpp/README.md",)
PUBLISHED = "published"  # files that lie beside the start page


def main() -> int:
    """Lay out the source, run Sphinx, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="folder to fill")
    parser.add_argument("--fresh", action="store_true", help="execute everything again")
    given = parser.parse_args()
    folder = given.to.resolve()
    if given.fresh and folder.exists():
        shutil.rmtree(folder)
    lay_out(folder / "source")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q"]
    command += ["-c", str(HERE), "-d", str(folder / "doctrees")]
    command += ["-D", f"html_extra_path={folder / 'source' / PUBLISHED}"]
    command += [str(folder / "source"), str(folder / "html")]
    done = subprocess.run(command, env=os.environ | {"IPYTHONDIR": quiet_profile(folder)})
    if done.returncode == 0:
        print(f"the site is {folder / 'html' / 'index.html'}")
    return done.returncode


def quiet_profile(folder: Path) -> str:
    """Settings of the cells' kernels: not the user's own, and no warning that they use TCP."""
    profile = folder / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
    return str(profile.parent)


def lay_out(source: Path) -> None:
    """Write every page below `source`, and remove what belongs to no page any more."""
    wanted = dict(everything())
    for name, content in wanted.items():
        path = source / name
        if not path.exists() or path.read_bytes() != content:  # Sphinx reads changed files again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in source.rglob("*"):
        name = path.relative_to(source).as_posix()
        # What Sphinx writes itself, one page for each name of the API, is its own.
        if path.is_file() and name not in wanted and not name.startswith("reference/api/"):
            path.unlink()


def everything() -> Iterator[tuple[str, bytes]]:
    """Every file of the source with its content."""
    own = HERE / "pages"
    for path in sorted(own.rglob("*.*")):
        name = path.relative_to(own)
        yield name.as_posix(), path.read_bytes()
        if path.suffix == ".md" and is_notebook(text := path.read_text("utf-8")):
            yield f"notebooks/{'-'.join(name.with_suffix('.ipynb').parts)}", notebook(text).encode()
    shared = {}
    for pattern in SHARED:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix == ".md":
                shared[name] = path.read_text("utf-8")
            else:
                yield name, path.read_bytes()
    yield from ((name, linked(name, text).encode()) for name, text in shared.items())
    for name, text in (*pages(), *mistakes(), *tests(shared.values())):
        yield name, text.encode()
    yield from gallery()
    yield from speed()
    yield f"{PUBLISHED}/problem.schema.json", problem_schema().encode()


if __name__ == "__main__":
    sys.exit(main())
