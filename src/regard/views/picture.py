"""The whole calculation as one picture: which tables it has, where each is, what each opens.

A product is a cross: the row of a number lies left of it, its column above it. Read off the
declared steps, whatever the mechanism; the page and the worksheet draw it. Must not know numbers,
sizes or pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from regard.textbook.steps import Ref, Step, letters_of

RESULTS = ("output", "merged", "projected_output")
HEADS = ("h", "g", "h//(H//G)")  # how an operand's index names the cell's own head


@dataclass(frozen=True)
class Station:
    """A table of the picture: one step, in a column and a row of the picture.

    Results are in row 0, what is above them in rows −1, −2, … A table that is `turned` has the
    rows of its step as columns. `inside` are the steps on the way to it, which open there.
    """

    name: str  # of the step; of a copy also where it is used
    step: str
    column: int
    row: int
    turned: bool = False
    left: str = ""  # the stations of its factors
    above: str = ""
    source: str = ""  # the station that it is made of, cell by cell or row by row
    inside: tuple[str, ...] = ()
    copy: bool = False


@dataclass(frozen=True)
class Picture:
    """Groups of stations that belong together, in the order of the calculation."""

    wide: tuple[tuple[Station, ...], ...]
    narrow: tuple[tuple[Station, ...], ...]  # each cross by itself, for small screens
    slices: dict[str, str]  # which part of a packed axis belongs to a head


def picture(steps: Iterable[Step]) -> Picture:
    """The picture of declared steps."""
    declared = {step.name: step for step in steps}
    splits = [step.operands[0] for step in declared.values() if step.op == "split"]
    slices = {declared[ref.step].axes[-1]: ref.index[-1] for ref in splits}
    wide, narrow = (_Drawing(declared, narrow).groups() for narrow in (False, True))
    return Picture(wide, narrow, slices)


class _Drawing:
    """The stations of one picture while they are placed."""

    def __init__(self, steps: Mapping[str, Step], narrow: bool) -> None:
        self.steps, self.narrow = steps, narrow
        self.placed: set[str] = set()
        self.before: list[list[Station]] = []  # the crosses that a narrow picture shows first

    def groups(self) -> tuple[tuple[Station, ...], ...]:
        """Every station, a group for the heads and one for what is made of all of them."""
        found: list[list[Station]] = []
        for name in RESULTS:
            if name in self.steps and not (name == "merged" and RESULTS[-1] in self.steps):
                last = self._tree(name, False, "")
                found += [*self.before, last]
                self.before = []
        if "target" in self.steps:
            column = max(station.column for station in found[-1]) + 1
            found += [[]] if self.narrow else []
            found[-1].append(Station("target", "target", column, 0))
        owners = self._owners([station for group in found for station in group])
        return tuple(
            tuple(
                replace(
                    station,
                    column=station.column - min(one.column for one in group),
                    inside=() if station.copy else tuple(owners.get(station.step, ())),
                )
                for station in group
            )
            for group in found
        )

    def _tree(self, name: str, turned: bool, user: str) -> list[Station]:
        """A step at (0, 0), and around it all that it is made of."""
        core = self.core(name)
        if core is None or (name in self.placed and user):
            copy = name in self.placed
            self.placed.add(name)
            return [Station(f"{name}>{user}" if copy else name, name, 0, 0, turned, copy=copy)]
        self.placed.add(name)
        if name == "weights" and core.name != name:
            source = self._tree(core.name, turned, name)
            here = Station(name, name, 0, 0, turned, source=source[0].name)
            if self.narrow:
                self.before.append(source)
                return [here]
            return [here, *_moved(source, -2, 0)]  # what lies between them has a column
        left, above = self._factors(core, turned)
        side = self._left(left.step, _is_turned(left, core, 0), name)
        up = _moved(self._tree(above.step, _is_turned(above, core, 1), name), 0, -1)
        here = Station(name, name, 0, 0, turned, side[0].name, up[0].name)
        taken = {(one.column, one.row) for one in up}
        shift = -1
        while taken & {(one.column + shift, one.row) for one in side}:
            shift -= 1
        return [here, *up, *_moved(side, shift, 0)]

    def _left(self, name: str, turned: bool, user: str) -> list[Station]:
        """What is left of a product; in a narrow picture a cross by itself, and here its result."""
        tree = self._tree(name, turned, user)
        if not self.narrow or len(tree) == 1:
            return tree
        self.before.append(tree)
        return [Station(f"{name}>{user}", name, 0, 0, turned, copy=True)]

    def core(self, name: str) -> Step | None:
        """The product that a step is made of, number by number; None where there is none."""
        step = self.steps[name]
        runs = [ref for ref in step.operands if step.running in _letters(ref)]
        if step.running and len(runs) > 1:
            return step
        own = {letter for entry in step.index for letter in letters_of(entry)} - {"h", "g"}
        for ref in step.operands:
            if _letters(ref) == own and not _mixes_heads(ref, self.steps[ref.step]):
                found = self.core(ref.step)
                if found is not None:
                    return found
        return None

    def _factors(self, core: Step, turned: bool) -> tuple[Ref, Ref]:
        """The operand with the row of a cell, and the one with its column."""
        runs = [ref for ref in core.operands if core.running in _letters(ref)]
        letters = [letter for letter in core.index if letter not in ("h", "g")]
        column = letters[0 if turned else -1]
        above = next(ref for ref in runs if column in _letters(ref))
        row = letters[-1 if turned else 0]
        sides = [ref for ref in runs if ref is not above]
        return next((ref for ref in sides if row in _letters(ref)), sides[-1]), above

    def _owners(self, stations: list[Station]) -> dict[str, list[str]]:
        """For each step that is a station, the steps that open there."""
        shown = {station.step for station in stations}
        owner = {name: name for name in shown}
        for name in (one for one in self.steps if one in shown):
            waiting = list(self.steps[name].reads)
            while waiting:
                part = waiting.pop()
                if part not in owner:
                    owner[part] = name
                    waiting += self.steps[part].reads
        for name, step in self.steps.items():  # what nothing on the picture is made of
            if step.of in owner:
                owner.setdefault(name, owner[step.of])
        order = list(self.steps)
        for name in reversed(order):  # the parts of gradients
            if name in owner and name not in shown:
                for part in self.steps[name].reads:
                    owner.setdefault(part, owner[name])
        for name, step in self.steps.items():  # by-products, such as the log-sum-exp
            made = [owner[one] for one in step.reads if one in owner]
            last = "target" if step.phase == "loss" and "target" in shown else "weights"
            owner.setdefault(name, max(made, key=order.index) if made else last)
        found: dict[str, list[str]] = {}
        for name in order:
            if name not in shown and self.steps[name].of not in shown:
                found.setdefault(owner[name], []).append(name)
        return found


def _letters(ref: Ref) -> set[str]:
    return {letter for entry in ref.index for letter in letters_of(entry)} - {"h", "g"}


def _mixes_heads(ref: Ref, step: Step) -> bool:
    pairs = zip(step.axes, ref.index, strict=True)
    return any(axis in ("H", "G") and entry not in HEADS for axis, entry in pairs)


def _is_turned(ref: Ref, core: Step, side: int) -> bool:
    """Whether a factor is shown turned: left of a product its columns run, above it its rows."""
    letters = [entry for entry in ref.index if entry not in HEADS]
    return len(letters) == 2 and letters[1 - side] != core.running


def _moved(stations: list[Station], right: int, down: int) -> list[Station]:
    return [replace(one, column=one.column + right, row=one.row + down) for one in stations]
