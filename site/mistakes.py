"""A page for every mistake of the catalogue: what it does, an example in numbers, and the cure.

All of it is what the catalogue and the diagnosis say. Must not describe a mistake itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from regard.diagnosis.built_in import PLAIN, BuiltIn
from regard.diagnosis.examples import smallest_example, usual_check
from regard.diagnosis.mistakes import EQUIVALENTS, GRADIENTS, OF_INPUT, all_mistakes, linear
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.result import Named, Outcome
from regard.views.diagnosis.story import Compared, Part, tell

FOLDER = "reference/mistakes"
SEVERITIES = {
    "wrong": "ordinary inputs give wrong numbers",
    "fragile": "ordinary inputs give right numbers, and some inputs do not",
    "note": "a choice that others make differently, or a habit worth knowing",
}
# What a function computes besides, where a mistake is about that.
BESIDES: Mapping[str, tuple[BuiltIn, ...]] = {
    "frequencies": (BuiltIn("rotary, halves"), BuiltIn("rotary, pairs")),
    "positions_slopes": (BuiltIn("ALiBi"),),
    "softcap": (BuiltIn(softcap=5.0), BuiltIn(softcap=2.0)),
}
INPUTS = {mistake.name: name for name, own in OF_INPUT.items() for mistake in own}
BACKWARD = {mistake.name for mistake in GRADIENTS}
LINEAR = {mistake.name for mistake in linear.MISTAKES}


def mistakes() -> Iterator[tuple[str, str]]:
    """The name and the text of every page about the catalogue."""
    known = all_mistakes()
    families: dict[str, list[Mistake]] = {}
    for mistake in known.values():
        families.setdefault(mistake.family, []).append(mistake)
        yield f"{FOLDER}/{mistake.name}.md", _page(mistake)
    rows = ""
    for family, own in families.items():
        yield f"{FOLDER}/{_slug(family)}.md", _family(family, own)
        rows += f"| [{_sentence(family)}]({_slug(family)}.md) | {len(own)} |\n"
    yield (
        f"{FOLDER}/index.md",
        f"# Mistakes\n\nThe {len(known)} mistakes that [`regard.diagnose`](../../docs/diagnose.md) "
        "can name, each with an example in numbers and the line to write instead. The name of a "
        "mistake, as in `diagnosis.names`, is the name of its page.\n\n"
        f"| family | mistakes |\n|---|---|\n{rows}\n{_toctree(map(_slug, families))}",
    )


def _family(family: str, own: list[Mistake]) -> str:
    rows = "".join(f"| [{_sentence(one.title)}]({one.name}.md) | {one.severity} |\n" for one in own)
    kinds = "".join(f"- **{name}**: {words}.\n" for name, words in SEVERITIES.items())
    listed = _toctree(one.name for one in own)
    return f"# {_sentence(family)}\n\n| mistake | kind |\n|---|---|\n{rows}\n{kinds}\n{listed}"


def _page(mistake: Mistake) -> str:
    named = _with_example(mistake)
    outcome = Outcome("f", "mistaken", f"f is mistaken: {mistake.title}", "", mistakes=(named,))
    (part,) = tell(outcome).parts
    facts = {fact.name: fact.text for fact in part.facts}
    rows = [
        ("Name", f"`{mistake.name}`"),
        ("Kind", f"{named.severity}: {SEVERITIES[named.severity]}"),
    ]
    for name in ("Departs at", "Usual check", "The same as"):
        if name in facts:
            rows.append((name, _text(facts[name])))
    text = f"# {_sentence(mistake.title)}\n\n{_text(mistake.why)}\n\n"
    text += "".join(f"{name}\n: {words}\n\n" for name, words in rows)
    text += f"## What to write instead\n\n{_code(mistake)}"
    return text + _example(part)


def _with_example(mistake: Mistake) -> Named:
    """The mistake as if it had been found, with the first example that shows it."""
    own, backward = INPUTS.get(mistake.name, ""), mistake.name in BACKWARD
    plain = BuiltIn(linear="elu(x) + 1") if mistake.name in LINEAR else PLAIN
    made = product(BESIDES.get(own, (plain,)), ("ready", "projected"), (False, True))
    example, step, check = None, "", ""
    with np.errstate(all="ignore"):  # some mistakes divide by zero; that is shown
        for (besides, kind, always), variant in product(made, mistake.variants):
            options = dict(besides=besides, gradients=backward)
            example, step = smallest_example(variant, kind, always, **options)
            if example is not None:
                check = usual_check(variant, causal=always, **options)
                break
    shared = ("name", "family", "severity", "title", "why", "numpy", "torch")
    same = tuple(one.title for one in EQUIVALENTS if one.same_as == mistake.name)
    return Named(
        **{name: getattr(mistake, name) for name in shared},
        step=step,
        usual_check=check,
        same_as=same,
        example=example,
    )


def _code(mistake: Mistake) -> str:
    lines = {"In NumPy": mistake.numpy, "In torch": mistake.torch}
    if mistake.numpy == mistake.torch:
        lines = {"In either library": mistake.numpy}
    return "".join(f"{where}:\n\n```text\n{line}\n```\n\n" for where, line in lines.items())


def _example(part: Part) -> str:
    if part.example is None:
        return ""
    text = f"## The smallest example: {_text(part.example.title)}\n\n"
    text += "::::{grid} 1 2 3 3\n:gutter: 3\n\n"
    for one in part.example.given:
        text += f":::{{grid-item}}\n{_heading(one)}\n\n{_table(one, one.right)}:::\n\n"
    text += "::::\n\n"
    for one in part.example.steps:
        here = ": it departs here" if one.departs else ""
        text += f"**{_text(one.name)}** {_text(one.formula)}{here}\n\n"
        text += "::::{grid} 1 2 2 2\n:gutter: 3\n\n:::{grid-item}\nright\n\n"
        text += f"{_table(one, one.right)}:::\n\n"
        if one.wrong is not None:
            text += f":::{{grid-item}}\nwrong\n\n{_table(one, one.wrong)}:::\n\n"
        text += "::::\n\n"
    return text


def _heading(one: Compared) -> str:
    return f"**{_text(one.name)}** {_text(one.symbol)}"


def _table(one: Compared, printed: object) -> str:
    """A matrix as a table; a number that differs has a sign and is bold."""
    headers = list(printed.headers) or [_text(one.symbol)]
    text = f"| | {' | '.join(headers)} |\n|---|{'---:|' * len(headers)}\n"
    for label, row in zip(printed.labels, printed.rows, strict=True):
        cells = (f"**{c.mark} {c.text}**" if c.mark else c.text for c in row)
        text += f"| {label} | {' | '.join(cells)} |\n"
    return text + "\n"


def _toctree(names: Iterator[str]) -> str:
    return "```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def _slug(family: str) -> str:
    return "of-" + re.sub(r"\W+", "-", family)


def _sentence(text: str) -> str:
    return _text(text[:1].upper() + text[1:])


def _text(text: str) -> str:
    """Plain text as Markdown that says just this."""
    return re.sub(r"([\\`*_{}\[\]<>|$#~])", r"\\\1", text)
