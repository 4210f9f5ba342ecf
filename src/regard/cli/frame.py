"""What all commands share: exit codes, error messages and checks of options and files.

Owns exit codes and the one line that an error becomes. Must not know any command.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from regard.compute import native
from regard.errors import OptionError, ProblemError, RegardError, Setting, safe_text
from regard.views.screen import console

if TYPE_CHECKING:
    from regard.compute.blocks import Progress

BAD_INPUT = (RegardError, OSError, MemoryError)
DIFFERS, BAD, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


class Commands(TyperGroup):
    """All commands: every error becomes one line and an exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is named; an interrupt says what it ended."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # A terminal shows ^C on the line that the cursor is on. Files appear when they are
            # complete (`boundary.files`), so none is left half written.
            left = str(interrupt) or "no unfinished file is left"
            typer.echo(f"\nregard: {ctx.invoked_subcommand} was interrupted; {left}", err=True)
            raise

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, and exit with the code."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        options["standalone_mode"] = False
        try:
            code = super().main(*args, **options)
            _flush()
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        except (BrokenPipeError, SystemExit) as error:  # the reader closed the pipe
            # rich turns the first into the second.
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            _let_go_of_output()
            sys.exit(PIPE_CLOSED)
        except BAD_INPUT as error:
            _let_go_of_output()  # what could not be written must not be tried again at the end
            _complain(_in_words(error))
            sys.exit(BAD)
        except Exception as error:
            # What typer raises for a wrong option; the class moved between its versions.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "regard"
            _complain(f"{error.format_message().rstrip('.')} (see {command} --help)")
            sys.exit(BAD)
        sys.exit(code if isinstance(code, int) else 0)


class Command(TyperCommand):
    """One command that computes: what the environment says must make sense."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; an error knows its command, also where the parser does not say it."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        native.check_environment()
        return super().invoke(ctx)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _let_go_of_output() -> None:
    """Flush standard output; what it does not take is dropped."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_words(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return f"{name}{error.strerror or error}"
    return error.spelled(_as_option) if isinstance(error, RegardError) else str(error)


def _as_option(setting: Setting) -> str:
    """An argument that a message proposes, as an option of the command."""
    option = f"--{setting.name.replace('_', '-')}"
    return option if setting.value is True else f"{option} {setting.value}"


def _complain(message: str) -> None:
    typer.echo(f"regard: error: {safe_text(message)}", err=True)


# --- options -------------------------------------------------------------------------------------


def option(metavar: str | None, help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """An option that takes a value; its name is the parameter's unless `names` says another."""
    return typer.Option(default, *names, metavar=metavar, help=help, **more)


def flag(name: str, help: str, *names: str, **more: Any) -> Any:
    """An option that takes no value; `names` are other spellings."""
    return typer.Option(False, name, *names, help=help, **more)


# --- checks of options and files ------------------------------------------------------------------


def refuse_with(other: str, options: Mapping[str, Any]) -> None:
    """Options that would have no effect."""
    for option, value in options.items():
        if value is not None:
            raise OptionError(f"{option} has no effect with {other}; leave it out")


def refuse_without(other: str, options: Mapping[str, Any]) -> None:
    """Options that would have no effect alone."""
    for option, value in options.items():
        if value is not None and value is not False and value != []:
            raise OptionError(f"{option} goes with {other} only")


def check_targets(
    targets: Mapping[str, str | None], *, force: bool, inputs: Sequence[str | int] = ()
) -> None:
    """Refuse to write a file twice, over an existing file, or over an input.

    A page replaces one that regard wrote. `targets` are options without their dashes; `inputs` are
    files, or the number of an open one.
    """
    from regard.views.report import is_page

    places: dict[str, str] = {}
    for option, path in targets.items():
        if path is None:
            continue
        if path in ("", "-"):
            raise OptionError(
                f"--{option} needs the name of a file, not "
                + ("an empty one" if not path else "- (./- would be a file of that name)")
            )
        other = places.setdefault(os.path.realpath(path), option)
        if other != option:
            raise OptionError(f"--{other} and --{option} would go to the same file, {path}")
        read = next((source for source in inputs if _is_same_file(path, source)), None)
        if read is not None:
            name = "standard input" if read == 0 else read
            raise ProblemError(
                f"{path}: --{option} would replace the input {name}; give another name"
            )
        if not force and os.path.lexists(path) and not (option == "html" and is_page(path)):
            raise ProblemError(f"{path}: already exists; pass --force to replace it")


def _is_same_file(path: str, other: str | int) -> bool:
    """Whether two names lead to one file, links and letter case included."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):  # one is not there
        return False


def print_json(data: Any) -> None:
    """Print strict JSON in ASCII, so that labels cannot do anything to a terminal."""
    typer.echo(json.dumps(data, allow_nan=False, ensure_ascii=True))


def saved(path: str, show: bool) -> None:
    """Say that a page was written, and open it if that was asked for."""
    typer.echo(f"saved {safe_text(path)}", err=True)
    if show:
        import webbrowser
        from pathlib import Path

        if not webbrowser.open(Path(path).absolute().as_uri()):
            typer.echo("no browser could be started; open the file yourself", err=True)


@contextmanager
def progress_bar(
    after: float = 0.0, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[Progress], None] | None]:
    """Shows blocks, bytes a second and the time left, from some seconds on; on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    begin = clock()
    columns = (
        TextColumn("{task.completed}/{task.total} blocks"),
        BarColumn(),
        TextColumn("{task.fields[speed]:.2f} GB/s, left:"),
        TimeRemainingColumn(),
    )
    # Blocks may take minutes: time left is judged by all of them, not by the last half a minute.
    bar = Bar(
        *columns,
        console=console(stderr=True),
        transient=True,
        speed_estimate_period=1e6,
        get_time=clock,
    )
    task = bar.add_task("attention", total=None, speed=0.0)

    def watch(at: Progress) -> None:
        seconds = clock() - begin
        bar.update(task, completed=at.blocks, total=at.of, speed=at.bytes / 1e9 / seconds)
        if seconds >= after:
            bar.start()  # once; after that it does nothing

    try:
        yield watch
    finally:
        bar.stop()
