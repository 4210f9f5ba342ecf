"""What an entry of the catalogue is.

Must not know any single mistake, nor how one is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from regard.boundary.cached import cached_property
from regard.diagnosis.mistakes.programs import PROGRAMS, program_of
from regard.diagnosis.mistakes.written import assignments, variants_of
from regard.diagnosis.probe import Variant

Family = Literal[
    "one head",
    "hiding",
    "numerics",
    "heads and projections",
    "caching and windows",
    "blocks of keys",
    "positions, softcap and sinks",
    "gradients",
    "other scores",
]
# wrong: ordinary inputs give wrong numbers. fragile: some inputs do, others do not.
Severity = Literal["wrong", "fragile"]
# The line to write instead, in NumPy and in torch.
Lines = tuple[str, str]


@dataclass(frozen=True, eq=False)
class Mistake:
    """One wrong way of computing attention: the textbook with a step replaced.

    A step is replaced by a wrong line as people write it; `codes` has each way in which they do,
    and the first is shown. What several calls alone show has none, and is a property.
    """

    name: str
    family: Family
    title: str
    why: str
    numpy: str
    torch: str
    codes: tuple[str, ...] = ()
    program: str = ""  # the right code in which its line is shown
    severity: Severity = "wrong"

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The textbook with what its lines replace; agreeing with one of them is enough."""
        return tuple(way for code in self.codes for way in variants_of(code))

    @property
    def replaced(self) -> dict[str, str]:
        """The wrong expressions of its example, by what they take the place of."""
        return dict(assignments(self.codes[0]))

    @property
    def source(self) -> str:
        """Its example: right code but for its line."""
        return PROGRAMS[self.program].source(self.replaced)

    @property
    def lines(self) -> tuple[int, ...]:
        """The lines of its example that are wrong."""
        return PROGRAMS[self.program].lines(self.replaced)


def written(
    family: Family,
    lines: Lines,
    table: Mapping[str, tuple[Sequence[str], ...]],
    program: str = "",
    severity: Severity = "wrong",
) -> tuple[Mistake, ...]:
    """The mistakes of a table, with what they share.

    By name: title, why, the wrong line as people write it, each other way in which they do, and a
    cure of its own at the end.
    """
    found = []
    for name, entry in table.items():
        title, why, *codes = (one for one in entry if isinstance(one, str))
        numpy, torch = next((one for one in entry if not isinstance(one, str)), lines)
        targets = frozenset(target for code in codes[:1] for target, _ in assignments(code))
        shown = program or (program_of(targets) if codes else "")
        found.append(Mistake(name, family, title, why, numpy, torch, tuple(codes), shown, severity))
    return tuple(found)
