"""Where a run departs from the textbook, and the line of it.

The first step that is not there while those before it are, and what takes its place, tell it;
so does a value that makes the rest right when it is exchanged. Must not know how code is called.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.trace import jax, torch
from regard.diagnosis.trace.find import LOW, NOTHING, downstream, sought, upstream
from regard.diagnosis.trace.live import in_force
from regard.diagnosis.trace.name import named
from regard.diagnosis.trace.notes import Notes, Record
from regard.diagnosis.trace.put import Cure, Putting
from regard.diagnosis.trace.rewrite import Code
from regard.diagnosis.trace.substitute import Substitute, Substitutes, arranged_as
from regard.diagnosis.trace.traced import RIGHT, Problem, Run, Traced, listening

SOME = 1 / 3  # of a step's cells: too many to be there by chance


@dataclass(frozen=True, eq=False)
class Departure:
    """Where the code departs from the textbook, and what is known of it."""

    step: str  # the first that is not there
    line: int  # 0 where no line can be told
    said: str  # what was measured, or what makes it right
    how: str  # what told the line
    mistake: str = ""  # a name of the catalogue
    right: tuple[str, int] | None = None  # the last step that is right, and its line
    suspects: tuple[int, ...] = ()  # lines, the likeliest first
    numbers: Array | None = None  # what the code has for the step, in the textbook's layout


@dataclass(frozen=True)
class Story:
    """What each line of a source makes: the steps that are right there, and those that are not."""

    right: Mapping[int, tuple[str, ...]]
    wrong: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def trace(
    run: Run,
    code: Code,
    thing: Any,
    problem: Problem,
    others: Sequence[tuple[Run, Problem]] = (),
) -> tuple[Traced, Departure | None]:
    r"""Run a problem with its values noted, and tell where it departs from the textbook.

    Parameters
    ----------
    run : callable
        Calls the user's function once by its adapter, and gives its results by name.
    code : Code
        The source of the function, rewritten.
    thing : module, function, class or object
        What was loaded of the rewritten code, or what runs so for as long as this lasts.
    problem : Problem
        What the run is asked.
    others : sequence of (run, problem)
        Problems of other sizes. A change of the code counts where it makes these right, too.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from regard.diagnosis.probe import Probe
    >>> from regard.diagnosis.trace.rewrite import rewritten
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 5, 4))
    >>> probe = Probe("own", {"queries": q, "keys": k, "values": v})
    >>> right = {"output": probe.right["output"]}
    >>> problem = SimpleNamespace(probe=probe, expected=right, compared=None)
    >>> text = [
    ...     "import numpy as np",
    ...     "def f(q, k, v):",
    ...     "    s = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5",
    ...     "    e = np.exp(s)",
    ...     "    return e / e.sum(-2, keepdims=True) @ v",
    ... ]
    >>> code = rewritten("\n".join(text))
    >>> module = code.module("own")
    >>> _, departure = trace(lambda: {"output": module.f(q, k, v)}, code, module, problem)
    >>> departure.step, departure.line, departure.said, departure.right
    ('weights', 5, 'with 1 instead of 2', ('exponentials', 4))
    """
    notes = Notes(code)
    with _noted(thing, code, notes):
        traced = Traced(run, notes, problem, others)
        return traced, None if traced.right else Verdict(traced).departure


@contextlib.contextmanager
def _noted(thing: Any, code: Code, notes: Notes) -> Iterator[None]:
    """While this lasts the code of a thing hands its values to notes, and libraries are opened."""
    is_module = isinstance(thing, types.ModuleType)
    own = listening(thing, notes) if is_module else in_force(thing, code, notes.names())
    quiet = np.errstate(all="ignore")
    with own, torch.opened(notes, thing), jax.opened(notes, thing), quiet:
        yield


def nearest(run: Run, code: Code, thing: Any, problems: Sequence[Problem]) -> int:
    """Which of several readings of one problem has most steps there that the first has not.

    Whole numbers are anywhere. If none is there, it is the first of which a mistake in such a step
    explains the result.
    """
    if code.broken:
        return 0
    notes = Notes(code)
    plain = problems[0].probe.declared
    counts = [0]
    with _noted(thing, code, notes):
        finder = Traced(run, notes, problems[0]).finder
        for one in problems[1:]:
            steps = (own for name, own in sought(one.probe).items() if name not in plain)
            own = [step for step in steps if (step.value != np.round(step.value)).any()]
            counts.append(sum(bool(finder.find(step)) for step in own))
        every = [Traced(run, notes, one) for one in problems if not any(counts)]
    explained = [False, *(bool(named(one, None, plain)) for one in every[1:])]
    return int(np.argmax(counts if any(counts) else explained))


def differing(
    run: Run, code: Code, thing: Any, problem: Problem, between: Sequence[tuple[Run, Problem]] = ()
) -> tuple[Traced, Departure]:
    """Run the same problem twice, and tell the first value that is another one the second time."""
    notes = Notes(code)
    with _noted(thing, code, notes):
        traced = Traced(run, notes, problem)
        # What a right step was made of is not it, such as weights that are drawn, and then given.
        passed = set(traced.cone) - upstream(one for own in traced.found.values() for one in own)
        for call, _ in between:
            with contextlib.suppress(Exception):  # what is kept may not fit it
                call()
        traced.listened()
    once = traced.finder.records
    for one, other in zip(once, notes.records, strict=False):
        same = one not in passed or np.array_equal(one.value, other.value, equal_nan=True)
        if one.node != other.node or not same:
            # What is kept is an object that the first call has had, or is read before anything.
            kept = any(other.owner is x.owner for x in once)
            return traced, _drawn(traced, other if kept else one, kept=kept)
    return traced, Departure("", 0, "two equal calls give different results", "twice")


def _drawn(traced: Traced, record: Record, *, kept: bool) -> Departure:
    node = traced.notes.nodes[record.node]
    drawn = node.kind in ("Call", "Library") and not kept
    said = "drawn at random" if drawn else "kept from an earlier call"
    name = "dropout_left_on" if drawn else "state_kept"
    return Departure("", node.line, f"{node.text} is {said}", "twice", name)


def story(traced: Traced, departure: Departure | None = None) -> Story:
    """What each line makes."""
    right: dict[int, dict[str, None]] = {}
    for name in traced.order:
        for one in traced.found[name] if traced.steps[name].kind != "given" else ():
            right.setdefault(traced.line(one), {})[name] = None
    wrong = {} if departure is None else {departure.line: (departure.step,)}
    return Story({line: tuple(own) for line, own in sorted(right.items())}, wrong)


class Verdict:
    """What is said of one wrong run."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.first = traced.gone[0] if traced.gone else ""

    @cached_property
    def departure(self) -> Departure:
        """Where it departs."""
        if self.traced.result is None:
            return self.raised
        line, said, how, step = self.placed
        cure = self.cure
        suspects = tuple(dict.fromkeys([line, *self.lines]))
        if cure is not None:
            line, how, said = cure.line, "put", cure.said
        elif self.traced.notes.full:  # what is not noted cannot be told from what is not there
            line, how, said = 0, "", "it makes more values than are noted"
        name = named(self.traced, self.substitute)
        values = {} if self.substitute is None else self.substitute.values
        numbers = values.get(step)
        return Departure(step, line, said, how, name, self.last_right, suspects, numbers)

    @property
    def raised(self) -> Departure:
        """Where the code raised, after the last step that it has right."""
        error, file = self.traced.error, self.traced.notes.code.file
        frames = traceback.walk_tb(error.__traceback__ if error else None)
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        said = "it raised " + type(error).__name__
        return Departure(
            self.first, lines[-1] if lines else 0, said, "raised", right=self.last_right
        )

    @cached_property
    def substitute(self) -> Substitute | None:
        """What takes the place of the first step that is not there."""
        return Substitutes(self.traced).found

    @cached_property
    def placed(self) -> tuple[int, str, str, str]:
        """The line by what is where: line, what was measured, how it was told, step."""
        traced, first = self.traced, self.first
        ends = traced.ends
        end = traced.line(ends[-1]) if ends else 0
        if not first:
            return end, "every step is there, and the result differs", "end", ""
        if first in traced.unused:
            here = traced.unused[first][0]
            return traced.line(here), "it is computed and not used", "unused", first
        moved = self.moved
        if moved is not None:
            record, step = moved
            return traced.line(record), f"the numbers of {step} are in another order", "order", step
        pieces, share = traced.finder.partly(traced.steps[first], traced.is_in_cone)
        later = self.substitute is None or self.substitute.steps[0] != first
        if SOME < share < 1 and len(pieces) > 1 and later:
            said = f"{share:.0%} of {first} are there"
            return traced.line(pieces[0]), said, "part", first
        if self.substitute is not None:
            return self.by_substitute(self.substitute.steps[0], self.substitute.records[0])
        if not self.alike_in_size:
            return end, "nothing takes its place", "", first
        return traced.line(self.alike_in_size[0]), self.measured, "place", first

    def by_substitute(self, step: str, record: Record) -> tuple[int, str, str, str]:
        """The same for a value that takes the place of a step."""
        traced, steps, made = self.traced, self.traced.steps, self.made
        names = self.substitute.steps if self.substitute else ()
        if made and len(names) > 1:
            return self.caller(record), f"{' and '.join(names)} are exchanged", "substitute", step
        if made and made != [step]:
            own = [x for x in traced.before(step) if steps[x].axes == steps[step].axes]
            last = max(own or made, key=traced.order.index)
            said = f"{step} is left out: it goes on with {last}"
            return self.going_on(traced.found[last][-1]), said, "left out", step
        if made:
            said = f"{step} are used in another order"
            return self.going_on(traced.found[step][-1]), said, "turned", step
        if record.node in {one.node for own in traced.found.values() for one in own}:
            # What made it has made what is right as well: the call is wrong, not the function.
            return self.caller(record), self.measured, "substitute", step
        return traced.line(self.part_of(record, step)), self.measured, "substitute", step

    def is_all(self, record: Record, step: str) -> bool:
        """Whether a value has a step's own numbers, and not only those that are left free."""
        return bool(self.traced.finder.explained(self.traced.steps[step])[record.number])

    @cached_property
    def made(self) -> list[str]:
        """The right steps that are what takes the place of another."""
        if self.substitute is None:
            return []
        record, found = self.substitute.records[0], self.traced.found.items()
        return [x for x, own in found if record in own and self.is_all(record, x)]

    @cached_property
    def moved(self) -> tuple[Record, str] | None:
        """The first value that has a step's numbers in a wrong order, and the step."""
        traced = self.traced
        until = traced.order.index(self.first) + 1
        steps = [traced.steps[x] for x in traced.order[:until]]
        for record, step in traced.finder.scrambled(steps, traced.is_in_cone):
            return record, step.name
        return None

    def going_on(self, record: Record) -> int:
        """The line that uses a value, where the function that made it does."""
        nodes = self.traced.notes.nodes
        own = nodes[record.node]
        scope, line = own.scope, own.line
        for node in self.traced.notes.reads.get(record, ()):
            here = nodes[node]
            if here.kind == "Call":
                scope, line = here.scope, here.line
            elif here.kind in ("Name", "Attribute") and here.scope == scope:
                return here.line
            else:
                return line
        return line

    def part_of(self, record: Record, step: str) -> Record:
        """The part of a quotient that is wrong; the quotient itself, if neither or both are."""
        traced, value = self.traced, self.traced.steps[step].value
        if len(self.substitute.records if self.substitute else ()) != 1 or len(record.parents) != 2:
            return record
        above, below = record.parents
        divides = traced.notes.nodes[record.node].detail == "Div"
        if not divides or above.value.shape != record.value.shape or below.value.size < 2:
            return record
        for own in arranged_as(above.value, traced.steps[step]):
            with np.errstate(all="ignore"):
                rows = own / value
            if np.isfinite(rows).all() and np.allclose(rows, rows[..., :1], 1e-6, 1e-9):
                # Each row is right but for its size, by which it should be divided.
                sizes = np.sort(rows[..., 0].ravel())
                near = np.abs(sizes[:, None] - below.value.ravel()).min(0)
                return record if (near < 1e-6 * np.abs(below.value).max()).all() else below
        return above

    def caller(self, record: Record) -> int:
        """The line of the call that gave a value."""
        nodes = self.traced.notes.nodes
        calls = (nodes[x] for x in self.traced.notes.reads.get(record, ()))
        own = self.traced.line(record)
        return next((x.line for x in calls if x.kind == "Call" and x.line != own), own)

    @cached_property
    def last_right(self) -> tuple[str, int] | None:
        """The last right step before the first that is not there, and its line."""
        traced, first = self.traced, self.first
        own = traced.before(first) if first else traced.order
        before = [x for x in traced.order if x in own and traced.found.get(x)]
        return (before[-1], traced.line(traced.found[before[-1]][0])) if before else None

    # --- regions -------------------------------------------------------------------------------

    @cached_property
    def region(self) -> list[Record]:
        """The values between the last right steps and the result, in order."""
        traced = self.traced
        right = {one for own in traced.found.values() for one in own}
        nodes = {one.node for one in right}
        many = {n for n in nodes if traced.notes.runs.get(n, 0) > 1}
        right |= {one for one in traced.cone if one.node in many}
        ends = traced.ends or traced.cone[-1:]
        opened = upstream(ends, right)
        before = traced.before(self.first) if self.first else []
        ways = [downstream(traced.cone, traced.found[x]) for x in before]
        inside = set.intersection(*ways) if ways else set(traced.cone)
        own = [one for one in traced.cone if one in opened and one.kind == "f" and traced.line(one)]
        return [one for one in own if one in inside] or own

    @cached_property
    def alike_in_size(self) -> list[Record]:
        """Those that have the size of the first step."""
        traced, step = self.traced, self.traced.steps[self.first]
        sizes = {step.value.size}
        if step.seen is not None:
            sizes.add(int(step.seen.sum()))
        own = (traced.steps[x] for x in traced.before(self.first))
        sizes |= {one.value.size for one in own if one.axes == step.axes}
        same = [one for one in self.region if one.value.size in sizes]
        many = traced.notes.runs
        loops = [x for x in self.region if x.value.size > 1 and many.get(x.node, 0) > 1]
        return same or loops or self.region

    @cached_property
    def lines(self) -> list[int]:
        """All lines that ran, the likeliest to be wrong first."""
        traced = self.traced
        line = self.placed[0]
        own = [line]
        if self.substitute is not None:
            until = {one for own in traced.found.values() for one in own}
            inner = upstream(self.substitute.records, until)
            own += [traced.line(one) for one in sorted(inner, key=lambda one: -one.number)]
        near = [traced.line(one) for one in self.region]
        ran = [traced.notes.nodes[one].line for one in traced.notes.runs]
        rest = sorted(ran, key=lambda one: (one > line, abs(one - line)))
        return [one for one in dict.fromkeys([*own, *near, *rest]) if one]

    @cached_property
    def cure(self) -> Cure | None:
        """The smallest change that makes the result right."""
        wrong = self.substitute is not None and not self.made
        until = self.substitute.records[-1] if self.substitute and wrong else None
        return Putting(self.traced).cure(self.lines, until)

    @cached_property
    def measured(self) -> str:
        """How what takes the place of a step differs from it."""
        if self.substitute is None:
            return ""
        name = self.substitute.steps[0]
        step, got = self.traced.steps[name], self.substitute.values[name]
        seen = np.ones(got.shape, bool) if step.seen is None else step.seen
        low = step.value[seen].min(initial=0) - LOW
        shown = np.isfinite(got) & (got > low if step.kind == "scores" else np.abs(got) > NOTHING)
        if step.kind in ("scores", "weights") and (shown != seen).any():
            more, less = int((shown & ~seen).sum()), int((seen & ~shown).sum())
            return f"{more} hidden cells are seen, and {less} are hidden that should be seen"
        own, right = got[seen], step.value[seen]
        if not np.isfinite(own).all():
            return f"{int((~np.isfinite(own)).sum())} of {own.size} are not finite"
        with np.errstate(all="ignore"):
            factors, apart = own / right, own - right
        for told, what in ((factors, "{:.4g} times"), (apart, "{:+.4g} beside")):
            if np.isfinite(told).all() and np.ptp(told) < RIGHT * max(1.0, np.abs(told).max()):
                return f"{name} are {what.format(told.mean())} what they should be"
        off = int((np.abs(apart) > RIGHT * max(1.0, np.abs(right).max())).sum())
        return f"{off} of {own.size} numbers differ"
