"""A page for every mistake of the catalogue: what it does, an example in numbers, and the cure.

All of it is what the catalogue and the diagnosis say. Must not describe a mistake itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from regard.diagnosis.catalogue import SEVERITIES, described, families
from regard.diagnosis.mistakes.entry import Mistake
from regard.views.diagnosis.story import Compared, Part, tell

FOLDER = "reference/mistakes"


def mistakes() -> Iterator[tuple[str, str]]:
    """The name and the text of every page about the catalogue."""
    found, rows = families(), ""
    count = sum(map(len, found.values()))
    for family, own in found.items():
        for mistake in own:
            yield f"{FOLDER}/{mistake.name}.md", _page(mistake)
        yield f"{FOLDER}/{_slug(family)}.md", _family(family, own)
        rows += f"| [{_sentence(family)}]({_slug(family)}.md) | {len(own)} |\n"
    yield (
        f"{FOLDER}/index.md",
        f"# Mistakes\n\nThe {count} mistakes that [`regard.diagnose`](../../docs/diagnose.md) "
        "can name, each with an example in numbers and the line to write instead. The name of a "
        "mistake, as in `diagnosis.names`, is the name of its page. `regard mistakes NAME` shows "
        "the same in a terminal.\n\n"
        f"| family | mistakes |\n|---|---|\n{rows}\n{_toctree(map(_slug, found))}",
    )


def _family(family: str, own: list[Mistake]) -> str:
    rows = "".join(f"| [{_sentence(one.title)}]({one.name}.md) | {one.severity} |\n" for one in own)
    kinds = "".join(f"- **{name}**: {words}.\n" for name, words in SEVERITIES.items())
    listed = _toctree(one.name for one in own)
    return f"# {_sentence(family)}\n\n| mistake | kind |\n|---|---|\n{rows}\n{kinds}\n{listed}"


def _page(mistake: Mistake) -> str:
    found = described(mistake.name)
    (part,) = tell(found).parts
    facts = {fact.name: fact.text for fact in part.facts}
    facts["Departs at"] = found.mistakes[0].step
    rows = [
        ("Name", f"`{mistake.name}`"),
        ("Kind", f"{mistake.severity}: {SEVERITIES[mistake.severity]}"),
    ]
    for name in ("Departs at", "Usual check"):
        if facts.get(name):
            rows.append((name, _text(facts[name])))
    text = f"# {_sentence(mistake.title)}\n\n{_text(mistake.why)}\n\n"
    text += "".join(f"{name}\n: {words}\n\n" for name, words in rows)
    if mistake.codes:
        text += f"## As people write it\n\n```python\n{_source(mistake)}\n```\n\n"
    text += f"## What to write instead\n\n{_code(mistake)}"
    return text + _example(part)


def _source(mistake: Mistake) -> str:
    """The code of its example, the wrong lines marked."""
    lines = enumerate(mistake.source.rstrip().splitlines(), 1)
    return "\n".join(f"{text}  # wrong" if n in mistake.lines else text for n, text in lines)


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
