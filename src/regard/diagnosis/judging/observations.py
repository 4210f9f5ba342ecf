"""What the answers of a function show beyond the verdict: abilities, findings and failures.

Must not know mistakes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for, mask_role
from regard.diagnosis.calls.calling import call_again, with_defaults
from regard.diagnosis.calls.convention import Answer, Convention, Question, agrees, spell
from regard.diagnosis.calls.convention_search import key_mask_convention
from regard.diagnosis.calls.description import describe_call
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.calls.likely import only_nan
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.probes import ABILITIES, ROUND
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.function_readings import MERGES
from regard.diagnosis.forms.source import prose_of
from regard.diagnosis.judging.matching import Matcher
from regard.diagnosis.process.run_lines import Unrun, never_run
from regard.diagnosis.reading.signature import WEIGHTS
from regard.diagnosis.result import Ability, Finding, Outcome
from regard.errors import safe_text

# Code that counts the windows of an image.
OF_WINDOWS = re.compile(r"\bn_?W\b|\bn(um)?_?windows?\b")
_GRADIENTS = {
    "queries": "dQ, the gradient of the queries",
    "keys": "dK, the gradient of the keys",
    "values": "dV, the gradient of the values",
    "embeddings": "dX, the gradient of the embeddings",
    "context": "dC, the gradient of the context",
    **{name: f"d{name}, the gradient of {name}" for name in WEIGHTS},
}
# Reported only if the function answered: nothing says that it is meant to do these.
SILENT = ("grouped", "long")
OF_AXES = re.compile(
    "unpack|dimension|subscript|axes|axis|indices|Einstein|out of range|not aligned|matmul|shape",
    re.IGNORECASE,
)
# An argument of positions, and text that they are for queries and keys.
OF_POSITIONS = re.compile("^(\\w*_)?(pos(_?emb\\w*|_?enc\\w*|itions?\\w*)?|p_?e)$", re.IGNORECASE)
OF_QUERIES = re.compile("^(q|query|queries|tgt|target|obj\\w*|point)_", re.IGNORECASE)
# A text that gives positions to the values too.
TO_VALUES = re.compile(
    r"pos[^.]{0,90}\b(values?|v)\b|k[^.\n]{0,20}\bv\b[^.]{0,60}pos", re.IGNORECASE
)
TO_QUERIES_AND_KEYS = re.compile(
    r"(pos|encod|embed)[^.]{0,90}\b(quer(y|ies)|q)\W+(and|&|\+)\W+(the )?(keys?|k)\b|"
    r"\b(quer(y|ies)|q)\W+(and|&|\+)\W+(the )?(keys?|k)\b[^.]{0,60}pos|\bq *= *k *=[^\n]*pos",
    re.IGNORECASE,
)
# A line that hides scores by a mask.
SATURATED = 100.0  # scores between which a softmax only chooses the greatest
HIDES = re.compile(r"mask\w*_fill|where\([^\n]*mask|mask[^\n]*inf\b|\+=? *\w*mask", re.IGNORECASE)
NEAR_BLOCKS = re.compile(
    r"local|window|sparse|dilat|neighbo|axial|stride|\bwith_prev|prev(ious)?_(chunk|block|bucket|segment)",
    re.IGNORECASE,
)
# A parameter whose default is a list or a dictionary, which Python makes once.
CHANGEABLE = re.compile(
    r"\b(\w+)(?: *:[^=,()]*)? *= *(?:\[[^\]\n]*\]|\{[^}\n]*\}|dict\(\)|list\(\)) *[,)]"
)
# What may be None and says nothing of what is computed.
OF_NO_ATTENTION = re.compile(
    "dtype|device|out$|rng|key$|seed|generator|train|name|precision|layout|return|need|output",
    re.IGNORECASE,
)
# Not reported if there is no mask, causal flag or window at all.
FINER = ("key mask", "causal rectangular", "causal and mask", "window rectangular")


def abilities(
    tested: FunctionUnderTest, conventions: Sequence[Convention], matcher: Matcher
) -> Iterator[Ability]:
    """The outcome of each ability: right, wrong, refused, or not offered."""
    wrong = {matcher.outputs[n].probe.name for n in matcher.wrong}
    returned = {one.probe.name for one in matcher.outputs}
    for name, title in ABILITIES.items():
        asked = [(c, p) for c in conventions for p in tested.probes_for(c) if p.ability == name]
        answered = [probe.name for _, probe in asked if probe.name in returned]
        bad = [probe for probe in answered if probe in wrong]
        if bad:
            more = ", …" if len(bad) > 3 else ""
            text = f"{len(bad)} of {len(answered)} probes: {', '.join(bad[:3])}{more}"
            yield Ability(name, title, "wrong", text)
        elif answered:
            text = f"{len(answered)} probe{'s' if len(answered) > 1 else ''}"
            yield Ability(name, title, "right", text)
        elif asked and (name not in SILENT or name in tested.callee.roles):
            answers = [tested.ask(convention, probe) for convention, probe in asked]
            failed = next((one for one in answers if one.kind != "refused"), None)
            if failed is not None:
                yield Ability(name, title, "refused", failed.problem)
            elif name not in FINER:
                yield Ability(name, title, "not offered", answers[0].problem)


def parts(matcher: Matcher) -> Iterator[Ability]:
    """The outcome for the gradient of each input."""
    wrong: dict[str, list[str]] = {}
    for one in matcher.outputs:
        assert isinstance(one.probe, GradientProbe)
        tolerance = matcher.tolerance(one.probe, one.probe.result(one.probe.right))
        for name, place in one.probe.places.items():
            right = one.probe.result(one.probe.right)[place]
            bad = wrong.setdefault(name, [])
            if not agrees(one.output[place], right, tolerance):
                bad.append(one.probe.name)
    for name, bad in wrong.items():
        count = len(matcher.outputs)
        text = f"{len(bad)} of {count} probes: {', '.join(bad[:3])}{', …' if len(bad) > 3 else ''}"
        state: Literal["wrong", "right"] = "wrong" if bad else "right"
        title = _GRADIENTS.get(name, f"d{name}, the gradient of {name}")
        yield Ability(name, title, state, text if bad else f"{count} probes")


def no_gradients(tested: FunctionUnderTest) -> Iterator[Finding]:
    """Why a function that works on tensors gave no gradients."""
    problems = (one for one in tested.answers.values() if one.kind in ("raised", "detached"))
    if (first := next(problems, None)) is not None:
        text = f"{tested.callee.name} was not differentiated: {first.problem}"
        yield Finding("no_gradients", text)


def findings(tested: FunctionUnderTest) -> Iterator[Finding]:
    """What the function does besides computing, each once."""
    name, asked = tested.callee.name, tested.answers
    answers = list(asked.values())
    if (printed := next((one.printed for one in answers if one.printed), "")) != "":
        yield Finding("prints", f"{name} prints: {printed[:80]}")
    if tested.callee.without:
        text = f"{name} is judged without its {', '.join(tested.callee.without)}"
        yield Finding("left_out", text)
    if untried := never_given(tested):
        text = f"{name} is not judged with {', '.join(untried)}: nothing was tried for it"
        yield Finding("not_tried", text)
    if tested.out_of_time:
        text = f"{name} is slow: after {tested.calls} calls no time was left for more"
        yield Finding("slow", text)
    if any(_has_other_weights(tested, *key, answer) for key, answer in list(asked.items())):
        text = f"{name} returns weights that are not those of its output"
        yield Finding("other_weights", text)
    if (hung := next((one.problem for one in answers if one.kind == "hung"), "")) != "":
        yield Finding("hangs", f"{name}: {hung}")
    if any(one.returned.startswith("a list") for one in answers):
        yield Finding("returns_list", f"{name} returns a list instead of an array")
    for (convention, probe), answer in asked.items():
        given, returned = convention.dtype, answer.dtype
        known = given in ("float64", "float32") and returned not in ("", given)
        if known and not probe.has_rules and answer.output is not None:
            yield Finding("another_dtype", f"{name} returns {returned} for {given} arrays")
            break


def lines_never_run(tested: FunctionUnderTest) -> Iterator[Finding]:
    """The statements of the function's file that no call has run, each part with its condition.

    Those of an option for which nothing was tried have another name.
    """
    given = tested.put.given
    for first, last, condition, arguments in _never_run(tested):
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        where = safe_text(condition.removesuffix(":"), 80)
        text = f"{lines} never ran, where {where}: nothing is known of them"
        yield Finding("not_run" if arguments <= given else "option_not_run", text)


def _never_run(tested: FunctionUnderTest) -> Iterator[Unrun]:
    name = f"lines of {tested.calls} calls"
    (seen,) = tested.put(Question(name, ({},), reading=tested.callee.number, looks="lines"))
    run = {int(line) for one in seen.arrays if one.numbers is not None for line in one.numbers}
    return never_run(tested.callee.blocks, run)


def option_of_mask(tested: FunctionUnderTest) -> str:
    """The option of an object without which its code hides nothing by a mask; or nothing."""
    for first, last, condition, arguments in _never_run(tested):
        lines = [
            line
            for begin, text in tested.callee.blocks
            for number, line in enumerate(text.splitlines(), begin)
            if first <= number <= last
        ]
        is_own = arguments <= {"self"} and re.fullmatch(r"self\.\w+", condition)
        if is_own and any(map(HIDES.search, lines)):
            return condition
    return ""


def never_given(tested: FunctionUnderTest) -> list[str]:
    """The parameters with a default of None that had no other value in any call."""
    own = {
        one.name
        for one in tested.callee.parameters
        if not one.required and one.default is None and not OF_NO_ATTENTION.search(one.name)
        if one.role not in ("none", "no", "yes", "keeps", "prompt", "beams")
    }
    if tested.callee.remembers or any(probe.chunks for _, probe in tested.answers):
        own -= {p.name for p in tested.callee.parameters if "cache" in (p.role or "")}
    return sorted(own - tested.put.given)


def _has_other_weights(
    tested: FunctionUnderTest, convention: Convention, probe: Probe, answer: Answer
) -> bool:
    if answer.weights is None or probe.has_rules or not tested.is_right(convention, probe):
        return False
    if np.abs(probe.right[probe.scaled]).max() > SATURATED:  # any scale gives the same output
        return False
    return not agrees(answer.weights, probe.right["weights"], probe.tolerance(UNITS["float32"]))


def keeps_context(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether an object answers for the context of an earlier call instead of the one it gets."""
    probes = (one for one in tested.probes_for(convention) if "context" in one.inputs)
    probe = next((one for one in probes if not one.has_rules and not one.chunks), None)
    if not tested.callee.remembers or probe is None:
        return False
    other = {**probe.inputs, "context": -0.5 * probe.inputs["context"][:, ::-1]}
    new = replace(probe, inputs=other, name=f"{probe.name}, another context")
    alone = tested.ask(convention, new).output
    after = call_again(tested.callee, convention, probe, new, tested.put).output
    if alone is None or after is None:
        return False
    return not agrees(after, alone, new.tolerance(UNITS["float32"]))


def keeps_default(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether a call without an argument changes what the next one gets in its place."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    may_change = {one[1] for one in CHANGEABLE.finditer(code)}
    kept = may_change & {one.name for one in tested.callee.parameters if not one.required}
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if not kept or probe is None:
        return False
    with contextlib.suppress(NotOfferedError):
        first, after = with_defaults(tested.callee, convention, probe, kept, tested.put)
        if first.problem or after.problem:
            return not first.problem
        one, two = (x.arrays[convention.output_at or 0].numbers for x in (first, after))
        near = probe.tolerance(UNITS["float32"])
        return one is not None and two is not None and not agrees(two, one, near)
    return False


def masks_of_windows_misplaced(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether another image changes which mask the windows of the first one get.

    A function that takes (images · windows, L, M) and a mask (windows, L, S) repeats that.
    """
    if any(OF_WINDOWS.search(text) for _, text in tested.callee.blocks):
        convention = replace(convention, mask_shape="batch cells")
    if convention.mask_shape not in ("batch cells", "batch 1 cells", "full"):
        return False
    for probe, name, given in _with_masks(tested, convention, "mask"):
        mask, windows = np.array(given[name]), probe.sizes["B"]
        if windows < 2 or mask.ndim < 3 or mask.shape[0] != windows:
            continue
        mask[1] = mask[1][..., ::-1]  # each window has its own
        of_one = {**given, name: mask}
        of_two = {
            key: np.concatenate([array, 0.3 - array[::-1]])
            if key != name and np.shape(array)[:1] == (windows,)
            else array
            for key, array in of_one.items()
        }
        one, two = (_returned(tested, convention, arguments) for arguments in (of_one, of_two))
        if one is not None and two is not None and two.shape[0] == 2 * windows:
            return not agrees(one, two[:windows], probe.tolerance(UNITS["float32"]))
    return False


def inverts_integers(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> bool:
    """Whether a mask of integers that the code inverts by ~ is another one than that of truths."""
    return tested.callee.inverts_mask and _differs_for(tested, conventions, np.int64)


def adds_numbers(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> bool:
    """Whether a mask that is said to hold 1.0 and 0.0 is another one than that of truths."""
    role = mask_role(tested.callee)
    if role is None or not tested.callee.mask_means:
        return False
    name = re.escape(tested.callee.roles[role].name)
    text = "\n".join(text for _, text in tested.callee.blocks)
    said = re.search(rf"\b{name}\b[^\n=]*(\bfloat\b[^\n=]*\b1\b|\b1\.0\b)", text)
    if said is None or re.search(rf"\b{name}\b[^\n]*\bbool", text):
        return False
    return _differs_for(tested, conventions, np.float64)


def _differs_for(
    tested: FunctionUnderTest, conventions: Sequence[Convention], kind: type[np.number[Any]]
) -> bool:
    """Whether a mask of truths is another one if it is handed over as numbers of a kind."""
    for convention in conventions:
        for probe, name, given in _with_masks(tested, convention, "mask", "key mask"):
            if np.asarray(given[name]).dtype != bool:
                continue
            numbers = {**given, name: np.asarray(given[name]).astype(kind)}
            one, two = (_returned(tested, convention, x) for x in (given, numbers))
            if one is not None and two is not None:
                return not agrees(one, two, probe.tolerance(UNITS["float32"]))
    return False


def adds_positions_to_values(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether positions change the output of tokens that are all the same, where none may.

    Such tokens have equal values, so it does not matter which of them is read. Only code that says
    that its positions are those of queries and keys is held to that, or that takes positions of
    queries apart from those of a context.
    """
    callee = tested.callee
    code = "\n".join(text for _, text in callee.blocks)
    names = [p.name for p in callee.parameters if OF_POSITIONS.search(p.name)]
    roles = {role: one.name for role, one in callee.roles.items()}
    rows = roles.get("x") or roles.get("query")
    context = roles.get("context") or roles.get("value")
    apart = [one for one in names if not OF_QUERIES.search(one)]
    told = bool(TO_QUERIES_AND_KEYS.search(code))
    told |= bool(context) and 0 < len(apart) < len(names) and not TO_VALUES.search(prose_of(code))
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if "sink" in {*callee.roles, *callee.weights}:  # weights do not add up to 1
        return False
    if not names or rows is None or probe is None or not told:
        return False
    name, of_values = (apart[0], context or rows) if apart else (names[0], rows)
    with contextlib.suppress(NotOfferedError):
        given = arguments_for(callee, convention, probe)
        place, shapes = convention.token_axis, {np.shape(given[one]) for one in (rows, of_values)}
        given = {
            key: np.repeat(array.take([0], place), array.shape[place], place)
            if np.shape(array) in shapes and np.ndim(array) > 1
            else array
            for key, array in given.items()
        }
        like = given[of_values]
        drawn = np.random.default_rng(5).normal(size=like.shape).astype(like.dtype)
        one, two = (_returned(tested, convention, {**given, name: a}) for a in (0 * drawn, drawn))
        if one is not None and two is not None and one.shape == two.shape:
            return not agrees(one, two, probe.tolerance(UNITS["float32"]))
    return False


def depends_on_blocks(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether blocks of another size, of which the last is not full, change a result.

    Code that says that only blocks near each other are read is not held to that.
    """
    callee = tested.callee
    blocks = [p.name for p in callee.parameters if p.role == "block" and not p.required]
    code = "\n".join(text for _, text in callee.blocks)
    if not blocks or callee.steps or NEAR_BLOCKS.search(callee.name + code):
        return False
    if tested.is_round and not MERGES.search(code):  # few blocks of many tokens may be near
        return False
    lengths, sizes = ((ROUND,), (4, 8, 2, 1)) if tested.is_round else ((5, 70), (1, 2, 3))
    for probe in tested.probes_for(convention):
        asked = probe.keep is None and not probe.chunks and probe.sizes["S"] in lengths
        usual = probe.sizes["L"] in (1, probe.sizes["S"]) or convention.one_query
        if asked and (usual or tested.is_right(convention, probe)):  # it may take no others
            with contextlib.suppress(NotOfferedError):
                given = arguments_for(callee, convention, probe)
                whole = _returned(tested, convention, given)
                own = (
                    _returned(tested, convention, given | dict.fromkeys(blocks, n)) for n in sizes
                )
                near = probe.tolerance(UNITS["float32"])
                if whole is not None and any(
                    one is not None and _differ(one, whole, near) for one in own
                ):
                    return True
    return False


def depends_on_prompt(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether later tokens change where those before them are read at once, as a prompt."""
    prompt = tested.callee.roles.get("prompt")
    if prompt is None or convention.one_query:
        return False
    axis = convention.token_axis
    for probe in tested.probes_for(convention):
        length = probe.sizes["L"]
        if probe.keep is not None or probe.chunks or not 3 < length == probe.sizes["S"] < 100:
            continue
        with contextlib.suppress(NotOfferedError):
            given = arguments_for(tested.callee, convention, probe)
            alone = _returned(tested, convention, given)
            for size in (2, 3, length // 2, length - 1) if alone is not None else ():
                with_prompt = _returned(tested, convention, given | {prompt.name: size})
                later = range(size, length)
                one, other = (
                    None if own is None or own.shape[axis] != length else own.take(later, axis)
                    for own in (alone, with_prompt)
                )
                near = probe.tolerance(UNITS["float32"])
                if one is not None and other is not None and _differ(other, one, near):
                    return True
    return False


def _differ(one: Array, other: Array, near: float) -> bool:
    return one.shape == other.shape and not agrees(one, other, near)


def _with_masks(
    tested: FunctionUnderTest, convention: Convention, *abilities: str
) -> Iterator[tuple[Probe, str, dict[str, Any]]]:
    """Probes with a mask, the name of the argument, and all arguments of the call."""
    role = mask_role(tested.callee)
    for probe in tested.probes_for(convention) if role and not tested.callee.steps else ():
        if probe.ability in abilities and not probe.chunks:
            own = convention
            if probe.ability == "key mask":
                own = key_mask_convention(tested, convention, probe)
            with contextlib.suppress(NotOfferedError):
                given = arguments_for(tested.callee, own, probe)
                name = tested.callee.roles[role or ""].name
                if given.get(name) is not None:
                    yield probe, name, given


def _returned(
    tested: FunctionUnderTest, convention: Convention, arguments: dict[str, Any]
) -> Array | None:
    """What the function returns for arguments that no probe has."""
    result = tested.put(Question("as given", (arguments,), reading=tested.callee.number))[-1]
    return None if result.problem else result.arrays[convention.output_at or 0].numbers


def is_random(tested: FunctionUnderTest) -> Finding | None:
    """A finding if the first probe, repeated after all others, gets another answer."""
    answered = ((key, one) for key, one in tested.answers.items() if one.output is not None)
    (convention, probe), first = next(answered)
    again = tested.ask(convention, replace(probe, name=f"{probe.name}, again"))
    if first.output is None or again.output is None:
        return None
    if agrees(first.output, again.output, probe.tolerance(UNITS["float32"])):
        return None
    text = "two calls with the same inputs differ; does it use dropout, or keep state?"
    return Finding("random", f"{tested.callee.name}: {text}")


def nan_throughout(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> Outcome | None:
    """The diagnosis of a function that returns nothing but NaN; None if it returns numbers."""
    if not only_nan(tested):
        return None
    name = tested.callee.name
    text = (
        f"{name} returns nothing but NaN; a mask multiplied by infinity does that (0·∞ is NaN), "
        "and so may an array that was not initialised"
    )
    summary = f"{name} is wrong: every number that it returns is NaN"
    called = describe_call(tested, conventions, None)
    found = (Finding("nan", text), *findings(tested))
    return Outcome(name, "unknown", summary, called, findings=found)


def unusable(tested: FunctionUnderTest) -> Outcome:
    """The diagnosis of a function that never returned an output: what it did instead."""
    name = tested.callee.name
    problems: dict[str, str] = {}

    # An exception about the number of axes says that another layout is meant.
    def fitness(one: tuple[tuple[Convention, Probe], Answer]) -> tuple[bool, bool, int]:
        (convention, _), answer = one
        about_axes = OF_AXES.search(answer.problem) is not None
        return "unpack" in answer.problem, about_axes, -len(convention.layout)

    asked = sorted(tested.answers.items(), key=fitness)
    for (convention, _), answer in asked:
        if answer.problem and answer.kind != "refused":
            arrays = spell(convention.layout)
            problems.setdefault(answer.kind, f"{answer.problem} (with arrays {arrays})")
    order = ("hung", "prints", "nothing", "type", "shape", "raised")
    text = next((problems[kind] for kind in order if kind in problems), "it could not be called")
    if tested.out_of_time:
        text = "it is too slow; a higher time limit gives it more time"
    elif "raised" in problems and text == problems["raised"]:
        roles = ", ".join(f"{p.name}={p.role}" for p in tested.callee.parameters if p.role)
        text += f"; its parameters are taken as signature={roles!r}: state what is another"
    instead = [Finding(kind, f"{name}: {problem}") for kind, problem in problems.items()]
    others = [one for one in findings(tested) if one.name not in problems]
    summary = f"{name} could not be diagnosed: {text}"
    return Outcome(name, "unusable", summary, "", findings=(*instead, *others))
