"""One problem run by rewritten code: its values, and which steps of the textbook are among them.

Owns what the result was made of, which steps it needs, and which of them are not there. Must not
know lines, nor how code is called.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.probe import Probe
from regard.diagnosis.trace.find import NEAR, Finder, Sought, sought
from regard.diagnosis.trace.notes import EndlessError, Notes, Record

RIGHT = 1e-5  # how far a result may be off, relative where it is larger than 1

Run = Callable[[], Mapping[str, Any]]  # calls the user's function; a result for each name


class Problem(Protocol):
    """What a run is asked, and what the textbook says of it."""

    @property
    def probe(self) -> Probe:
        """The steps with their values."""

    @property
    def expected(self) -> Mapping[str, Array]:
        """What the run should give, by name: the "output", or gradients."""

    @property
    def compared(self) -> Array | None:
        """The rows of the output that count, (B, L); None: all."""


def is_right(result: Mapping[str, Any] | None, problem: Problem) -> bool:
    """Whether a result is the textbook's."""
    return result is not None and same_results(result, problem.expected, problem)


def same_results(result: Mapping[str, Any], wanted: Mapping[str, Array], problem: Problem) -> bool:
    """Whether a result has the wanted numbers, in the rows that are compared."""
    for name, own in wanted.items():
        got = result.get(name)
        if got is None:
            return False
        got, rows = np.asarray(got, float), problem.compared
        if got.shape != own.shape:
            return False
        if name == "output" and rows is not None and own.ndim > 2:
            rows = np.broadcast_to(rows if own.ndim == 3 else rows[:, None], own.shape[:-1])
            got, own = got[rows], own[rows]
        if not alike(got, own):
            return False
    return True


def alike(got: Array, wanted: Array) -> bool:
    """Whether numbers are the same but for rounding."""
    if got.shape != wanted.shape:
        return False
    finite = wanted[np.isfinite(wanted)]
    near = RIGHT * max(1.0, float(np.abs(finite).max(initial=0)))
    with np.errstate(invalid="ignore"):
        close = np.abs(got - wanted) <= near
    nothing = np.isnan(got) & np.isnan(wanted)
    return bool((close | (got == wanted) | nothing).all())


class Traced:
    """One problem run by rewritten code: its values, and which of them are which steps."""

    def __init__(
        self,
        run: Run,
        notes: Notes,
        problem: Problem,
        others: Sequence[tuple[Run, Problem]] = (),
    ) -> None:
        self.run, self.notes, self.problem = run, notes, problem
        self.others = others  # problems of other sizes, on which a change has to hold as well
        self.error: Exception | None = None
        self.steps = sought(problem.probe)
        self.order = list(self.steps)
        self.result = self.listened()
        self.right = is_right(self.result, problem)
        self.finder = Finder(notes.records)

    def listened(self) -> Mapping[str, Any] | None:
        """The result of a run whose values are noted; None if it raised."""
        self.notes.clear()
        self.notes.listening = True
        try:
            with np.errstate(all="ignore"):
                return self.run()
        except Exception as error:  # code of a stranger
            self.error = error
            return None
        finally:
            self.notes.listening = False

    def is_right_again(self, *, everywhere: bool) -> bool:
        """Whether one more run is right, and then one of each other problem."""
        try:
            with np.errstate(all="ignore"):
                if not is_right(self.run(), self.problem):
                    return False
                others = self.others if everywhere else ()
                return all(is_right(run(), problem) for run, problem in others)
        except (Exception, EndlessError):  # exchanged values make any code raise
            return False

    # --- what the result is made of ------------------------------------------------------------

    @cached_property
    def ends(self) -> list[Record]:
        """The values that the result was taken from."""
        found: dict[int, Record] = {}
        for one in (self.result or {}).values():
            own = None if one is None else np.asarray(one, float).ravel()
            if own is None or len(own := own[np.isfinite(own)]) < 2:
                continue
            here = self.finder.find(Sought("", ("B",), own, None, "given", False))
            if not here:
                return []
            last = here[-1]
            alone = last.value.size >= 1 + np.count_nonzero(np.diff(np.sort(own)) > NEAR)
            found |= {x.number: x for x in ([last] if alone else here)}
        return list(found.values())

    @cached_property
    def cone(self) -> list[Record]:
        """The values that the result was made of, in order; all, where that is not known."""
        records = self.notes.records
        if not self.ends:
            return records
        by_node: dict[int, list[Record]] = {}
        for one in records:
            by_node.setdefault(one.node, []).append(one)
        own: set[Record] = set()
        waiting = list(self.ends)
        while waiting:
            one = waiting.pop()
            if one not in own:
                own.add(one)
                waiting += one.parents
                # A round of a loop has what the last one had: a generator keeps the last alone.
                alike = by_node[one.node]
                waiting += alike[: alike.index(one)] if len(alike) > 1 else []
        return sorted(own, key=lambda one: one.number)

    @cached_property
    def is_in_cone(self) -> Array:
        """Whether the result was made of each value."""
        own = np.zeros(len(self.notes.records), bool)
        own[[one.number for one in self.cone]] = True
        return own

    @cached_property
    def found(self) -> dict[str, list[Record]]:
        """The values that are each step, among those that the result is made of."""
        own = self.is_in_cone
        return {name: self.finder.find(step, own) for name, step in self.steps.items()}

    @cached_property
    def unused(self) -> dict[str, list[Record]]:
        """The same for steps that are there alone where the result is not made of them."""
        own = ~self.is_in_cone
        missing = [name for name in self.order if not self.found[name] and self.steps[name].own]
        return {
            x: here for x in missing if own.any() and (here := self.finder.find(self.steps[x], own))
        }

    @cached_property
    def needed(self) -> list[str]:
        """The steps that the result needs, in order."""
        last = [step for step, _ in self._sources.values()] or self.gradients[:]
        needed = {*last}.union(*map(self.made_of, last))
        return [name for name in self.problem.probe.declared if name in needed]

    def made_of(self, name: str) -> set[str]:
        """All steps that a step is made of."""
        declared = self.problem.probe.declared
        found: set[str] = set()
        waiting = [name]
        while waiting:
            new = {ref.step for ref in declared[waiting.pop()].operands} - found
            found |= new
            waiting += new
        return found

    def is_result(
        self,
        values: Mapping[str, Array],
        result: Mapping[str, Any] | None = None,
        problem: Problem | None = None,
    ) -> bool:
        """Whether such values of the steps end in what the run gave, or one of another problem."""
        result = self.result if result is None else result
        problem = self.problem if problem is None else problem
        if result is None:
            return False
        wanted = {}
        for name, (step, summed) in self._sources.items():
            own = np.asarray(values[step])
            own = own.sum(0) if summed else own
            wanted[name] = own.reshape(problem.expected[name].shape)
        return bool(wanted) and same_results(result, wanted, problem)

    @cached_property
    def elsewhere(self) -> list[tuple[Problem, Mapping[str, Any]]]:
        """What the other problems gave, where they gave something."""
        found = []
        for run, problem in self.others:
            with contextlib.suppress(Exception):  # code of a stranger
                found.append((problem, run()))
        return found

    @cached_property
    def _sources(self) -> dict[str, tuple[str, bool]]:
        """By the name of each result the step that it is, and whether texts are added up."""
        right = self.problem.probe.right
        if "output" in self.problem.expected:
            return {"output": (self.problem.probe.result_step, False)}
        found = {}
        for name, wanted in self.problem.expected.items():
            for step in self.gradients:
                own = np.asarray(right[step])
                for summed in (False, True):
                    if alike(own.sum(0) if summed else own, wanted):
                        found[name] = step, summed
        return found

    @property
    def gradients(self) -> list[str]:
        """The steps that are whole gradients of what is given."""
        declared = self.problem.probe.declared
        return [x for x, one in declared.items() if one.of and declared[one.of].op == "given"]

    @cached_property
    def gone(self) -> list[str]:
        """The steps that are needed and not there, nor any after them."""
        reached: set[str] = set()
        for name in reversed(self.needed):
            if name in reached or self.found.get(name):
                reached |= {one.step for one in self.problem.probe.declared[name].operands}
        own = (name for name in self.needed if name in self.steps and self.steps[name].own)
        gone = [name for name in own if not self.found[name] and name not in reached]
        # What is computed beside the result counts where all goes through it.
        passed = ("scores", "weights")
        return [x for x in gone if x not in self.unused or self.steps[x].kind in passed]

    def before(self, name: str) -> list[str]:
        """The steps that are there and that a step is made of, through those that are not."""
        found: list[str] = []
        waiting = [ref.step for ref in self.problem.probe.declared[name].operands]
        while waiting:
            one = waiting.pop(0)
            if self.found.get(one):
                found += [one] if one not in found else []
            elif one in self.problem.probe.declared:
                waiting += [ref.step for ref in self.problem.probe.declared[one].operands]
        return found

    def line(self, record: Record) -> int:
        """The line that made a value."""
        return self.notes.nodes[record.node].line


@contextlib.contextmanager
def listening(module: types.ModuleType, notes: Notes) -> Iterator[None]:
    """While this lasts the code of a module hands its values to notes."""
    before = {name: module.__dict__.get(name) for name in notes.names()}
    module.__dict__.update(notes.names())
    try:
        yield
    finally:
        module.__dict__.update(before)
