"""One HTML file: the printed tables, the data, the style and the script, and nothing from outside.

Owns the frame of the page and its Content-Security-Policy. Text reaches the page through jinja2's
autoescaping alone. Must not compute anything.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from regard.errors import OptionError, safe_text
from regard.explanation.derivation import cell_name
from regard.explanation.notation import format_number
from regard.explanation.questions import compare
from regard.explanation.step import ExplainedStep
from regard.explanation.trace import READING_NOTE, Trace
from regard.views import story
from regard.views.head_view import Head
from regard.views.report.json_data import Data, page_data
from regard.views.report.plan import Plan, make_plan, without_numbers
from regard.views.report.summary import checks, said, summary
from regard.views.report.tables import is_printed, printed
from regard.views.report.whatif import has_gradients
from regard.views.step_words import SPREAD, sentences

# Up to so many given numbers, a page says where the first NaN or infinity is.
SEARCHED = 100_000
# In this order: each one may import from those before it.
SCRIPTS = (
    *("numbers", "visibility", "operations", "attention", "derivation", "carried", "figures"),
    *("picture", "elements", "shown", "stations", "summary", "words"),
    *("stage", "operands", "change", "why", "walk", "link"),
)
LARGE_SCRIPTS = ("pictures", "large")
GRADIENT_SCRIPTS = ("descent", "nudging", "curve", "learn")
LAST_SCRIPT = "report"
# Variables, and what is below one; elements.js has the same.
_LETTERS = re.compile(
    r"((?:(?<![A-Za-z_])(?!d[α-ω‖])|(?<=\bd))[A-Zb-z](?![A-Za-z])"
    r"|_(?:[a-z]|[A-Z](?:_[a-z])?[*′]*|‖[A-Z]‖))"
)


def render(explanations: Mapping[str, Trace], budget: int, digits: int) -> str:
    """The whole page as text of at most `budget` bytes.

    What is in every page is measured first, and the plan adds the sizes that tables, numbers and
    pooled weights will have. Only the sentences about each head are estimated: where they turn out
    longer, the page is planned once more with that many bytes less.

    Raises
    ------
    OptionError
        If there is no such page.
    """
    frame = _frame(explanations, digits)
    bare = page_data(explanations, without_numbers(explanations), digits)
    reserved = len(_assembled(frame, Plan({}), bare).encode())
    for _ in range(2):
        plan = make_plan(explanations, budget, reserved, lambda head: _tables(head, digits))
        text = _assembled(_fitting(frame, plan), plan, page_data(explanations, plan, digits))
        surplus = len(text.encode()) - budget
        if surplus <= 0:
            return text
        reserved += surplus + 2_000
    raise OptionError(f"budget is {budget} bytes, and the page is {surplus} bytes longer")


def _frame(explanations: Mapping[str, Trace], digits: int) -> dict[str, Any]:
    """What the page says whatever fits into it."""
    first = next(iter(explanations.values()))
    more = any(map(has_gradients, explanations.values()))
    count = len(explanations)
    several = len({one.mechanism for one in explanations.values()}) > 1
    said = f"{count} mechanisms, of which one is shown." if several else ""
    layers = [said or f"{count} layers, one after the other."] if count > 1 else []
    return {
        "title": safe_text(first.title, 200) or "Attention",
        "note": safe_text(first.note, 1000),
        "gradients": more,
        "opening": [*story.opening(first), *layers],
        "alarms": _alarms(explanations),
        "parting": _parting(explanations, digits) if several and count == 2 else None,
        "without_script": _without_script(explanations),
        "choices_of_digits": sorted({2, 3, 4, 6, 8, 16, digits}),
        "selectable": _selectable(explanations),
        "checks": _checks(first),
        "reading_note": READING_NOTE,
        "digits": digits,
        "kind_of_layer": "mechanism" if several else "layer",
        **_code(more, True),
    }


def _code(gradients: bool, large: bool) -> dict[str, Any]:
    """The style and the script of a page, and what allows them."""
    style, script = _style(gradients), _script(gradients, large)
    return {
        "policy": policy(style, script),
        "style": Markup(style),
        "script": Markup(script),
    }


def _fitting(frame: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The frame without the script for large tables and several heads, where there are none."""
    layers = [layer.explanation for layer in plan.layers.values()]
    sizes = [size for one in layers for step in one.steps.values() for size in step.shape]
    if plan.overview or not is_printed((max(sizes), 1)):
        return frame
    return {**frame, **_code(any(map(has_gradients, layers)), False)}


def _parting(explanations: Mapping[str, Trace], digits: int) -> dict[str, Any] | None:
    """The first step in which two mechanisms differ, and small weights of both side by side."""
    names, (here, there) = [safe_text(one, 60) for one in explanations], explanations.values()
    shapes = [one.steps["weights"].shape for one in (here, there)]
    if shapes[0] != shapes[1] or not is_printed(here.steps["weights"].matrix_shape):
        return None
    found = compare(here, there, 0.0)
    if found is None:
        return None
    cell = cell_name(found.here.symbol, found.labels)
    values = [format_number(float(one.value), digits) for one in (found.here, found.there)]
    said = [
        f"{found.step} is the first step of both that differs: {cell} is "
        f"{values[0]} with {names[0]} and {values[1]} with {names[1]}."
    ]
    only = zip(names, (found.only_here, found.only_there), strict=True)
    said += [f"Only {name} has {', '.join(steps)}." for name, steps in only if steps]
    heads = [Head(one, found.here.head, found.here.batch) for one in (here, there)]
    weights = [
        {**_step(head, "weights", digits), "title": f"weights, {name}"}
        for name, head in zip(names, heads, strict=True)
    ]
    said.append("What is changed below does not change these tables.")
    return {"said": " ".join(said), "weights": weights}


def _tables(head: Head, digits: int) -> str:
    """The printed tables of one head, and its statistics."""
    steps = [_step(head, name, digits) for name in head.explanation.steps]
    text: str = template("report/tables.html.j2").render(
        steps=steps, summary=summary(head, digits), spread=SPREAD
    )
    return text


def _assembled(frame: Mapping[str, Any], plan: Plan, data: Data) -> str:
    offered = {name for layer in data.content["layers"] for name in layer["switches"]}
    text: str = template("report/template.html.j2").render(
        frame,
        said=plan.said,
        what_if={name: what for name, what in story.WHAT_IF.items() if name in offered},
        tables=Markup(plan.tables),
        json=Markup(data.json),
        arrays=Markup(data.base64),
    )
    return text


@cache
def template(name: str) -> Template:
    """A template in the views' folder, with autoescaping."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(asset),
    )
    environment.filters["formula"] = _typeset
    return environment.get_template(name)


@cache
def asset(name: str) -> str:
    """The text of a file in the views' folder, such as report/style.css."""
    return (files("regard") / "views" / name).read_text("utf-8")


@cache
def _style(gradients: bool) -> str:
    """The style sheet; that of gradients only where there are any."""
    names = ("style", "picture", *("gradients",) * gradients)
    whole = "".join(asset(f"report/{name}.css") for name in names)
    whole = re.sub(r"/\*.*?\*/|^\s+", "", whole, flags=re.DOTALL | re.MULTILINE)
    whole = re.sub(r"\s*([{;,])\s*|(:)\s+", r"\1\2", whole)
    return whole.replace(";}", "}")


@cache
def _script(gradients: bool, large: bool) -> str:
    """The modules one after the other, in one scope: what is outermost has a name of its own.

    Comments, indentation and spaces around operators are removed.
    """
    more = (*LARGE_SCRIPTS * large, *GRADIENT_SCRIPTS * gradients)
    names = (*SCRIPTS, *more, LAST_SCRIPT)
    whole = "\n".join(asset(f"report/{name}.js") for name in names)
    whole = re.sub(r'^import \{[^}]*\} from "\./\w+\.js";$|^export ', "", whole, flags=re.MULTILINE)
    whole = re.sub(r"/\*\*.*?\*/", "", whole, flags=re.DOTALL)
    whole = re.sub(r"^(\s*//.*\n|\s+)", "", whole, flags=re.MULTILINE)
    whole = "\n".join(map(_tight, whole.splitlines()))
    return re.sub(r"[,;]?\n(?=[)}\]])|(?<=[({\[,;])\n|\n(?=[.?:])", "", whole)


def _tight(line: str) -> str:
    """A line of the script without a comment at its end and without spaces around operators.

    Strings, templates and regular expressions, which begin with no blank, are not changed.
    """
    line = re.sub(r"(?<=[;,{(\[])\s+// .*$", "", line)
    parts = re.split(r'("(?:[^"\\]|\\.)*"|`[^`]*`|/(?! )(?:[^/\\]|\\.)+/)', line)
    parts[::2] = (re.sub(r"(?<=[\w)\]]) ([+/-]) (?=[\w(\[])", r"\1", part) for part in parts[::2])
    parts[::2] = (re.sub(r"\s*([=<>!&|?:,;{}()\[\]%*]+)\s*", r"\1", part) for part in parts[::2])
    parts[::2] = (re.sub(r"\bconst\b", "let", part) for part in parts[::2])
    return "".join(parts)


def policy(style: str, script: str = "") -> str:
    """A Content-Security-Policy: load nothing, apply this style, run this script if any."""
    allowed = _digest(script) if script else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{hashed}'"


@lru_cache(maxsize=1024)
def _typeset(formula: str) -> Markup:
    """A formula as HTML: single letters as variables, _i as a subscript, the d of dX upright."""

    def marked(part: str) -> Markup:
        letter, *below = part.split("_")
        found = Markup("<var>{}</var>").format(letter) if letter else Markup("")
        for one in reversed(below):
            found = Markup("<sub>{}{}</sub>").format(one, found)
        return found

    parts = _LETTERS.split(formula)
    return Markup("").join(marked(part) if k % 2 else escape(part) for k, part in enumerate(parts))


# --- what the page says and prints ---------------------------------------------------------------


def _alarms(explanations: Mapping[str, Trace]) -> list[tuple[str, str]]:
    """Where the numbers of a layer stop being finite: a sentence, and the link to the number.

    Long layers are not searched.
    """
    alarms = []
    for number, one in enumerate(explanations.values()):
        if sum(math.prod(step.shape) for step in one.steps.values() if step.given) > SEARCHED:
            continue
        found = story.nonfinite(one)
        if found is not None:
            sentence, first = found
            batch = _indices(one.batch_shape).index(first.batch)
            cell = f"{first.step}:{','.join(map(str, first.index))}"
            place = f"#layer={number}&batch={batch}&head={first.head or 0}&cell={cell}"
            alarms.append((sentence, place))
    return alarms


def _without_script(explanations: Mapping[str, Trace]) -> str:
    several = len(explanations) > 1 or any(
        one.heads not in (None, 1) or len(_indices(one.batch_shape)) > 1
        for one in explanations.values()
    )
    shown = "The tables below are those of the first head. " if several else ""
    return f"{shown}Where JavaScript runs, every number can be opened and changed."


def _selectable(explanations: Mapping[str, Trace]) -> dict[str, list[str]]:
    """What a reader may choose between, and the names of the choices."""
    batches = max((_indices(one.batch_shape) for one in explanations.values()), key=len)
    heads = max(one.heads or 1 for one in explanations.values())
    choices = {
        "layer": [safe_text(name, 60) for name in explanations],
        "batch": [", ".join(map(str, at)) for at in batches],
        "head": [str(head) for head in range(heads)],
    }
    return {name: names for name, names in choices.items() if len(names) > 1}


def _indices(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(np.ndindex(*shape))


def _checks(explanation: Trace) -> dict[str, Any] | None:
    """What the problem expects of the first layer, and whether it came out."""
    found = checks(explanation)
    if not found:
        return None
    wrong = sum(1 for check in found if check.wrong)
    lines = [
        line
        for check in found
        for line in ([(False, one) for one in check.wrong] or [(True, check.right)])
    ]
    return {"said": said(len(found), wrong), "wrong": wrong, "lines": lines}


def _step(head: Head, name: str, digits: int) -> dict[str, Any]:
    step = head.explanation.steps[name]
    return {
        "name": name,
        "symbol": step.symbol,
        "formula": "given" if step.given and name != "width" else step.formula,
        "words": sentences(head, name),
        "printed": printed(head, name, digits),
        "size": _size(step, head.shape(name)),
    }


def _size(step: ExplainedStep, shape: tuple[int, int]) -> str:
    count = len([axis for axis in step.axes if axis not in ("H", "G")])
    return f"{shape[0]} × {shape[1]}" if count == 2 else str(max(shape)) if count else "one number"
