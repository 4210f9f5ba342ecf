"""What the parameters of a function mean: the role of each, from its name.

Must not call the function, nor know any probe.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from regard.boundary.arrays import Array
from regard.diagnosis.reading.changed_text import Block
from regard.diagnosis.reading.parameter_names import (
    BACKWARD_NAMES,
    BACKWARD_ROLE_OF,
    NAMES,
    is_upstream,
    plain,
    role_of,
)
from regard.diagnosis.reading.source_text import source_of
from regard.diagnosis.reading.surroundings import Surroundings
from regard.errors import OptionError, safe_text

# The roles of arguments that have a gradient.
DIFFERENTIATED = ("query", "key", "key_t", "value", "x", "context", "cache_k", "cache_v")
# Those of weights, whose gradients backward passes may return too.
WEIGHTS = tuple(f"{kind}_{part}" for part in "qkvo" for kind in "Wb")
# Every role that a user may state.
ROLES = {*NAMES, *BACKWARD_NAMES, "keep01", "hide01", "add"}
# And those that a parameter gets beside them: keys that are values too, and a matrix between
# queries and keys.
ROLES_GIVEN = ROLES | {"key_value", "between"}
ARRAYS = ("query", "key", "value")
# The roles of parameters that hide keys: those of padded keys, and all.
OF_KEYS = ("key_mask", "key_keep", "key_hide", "lengths")
# Those of texts one after the other, each of which reads itself alone.
OF_TEXTS = ("borders", "segments")
MASKS = ("mask", "keep", "hide", "bias", *OF_KEYS, *OF_TEXTS)
PROJECTIONS = ("W_q", "W_k", "W_v")
STEPS = ("dropped", "kept")
# Edges of a graph, (2, E): from the nodes of the first row to those of the second.
EDGES = re.compile("edge_?(index|list|idx)s?$|^edges$", re.IGNORECASE)
BETWEEN = ("w", "wa", "wgeneral")  # a matrix between queries and keys, as Luong's
FAMILY = re.compile("(\\w+?)_?([qkvocQKVOC])")  # of names: omega_q, omega_k, omega_v
LATENTS = "latents"  # learned queries, among the weights of an object
# The option of a layer whose tables of biases by place are kept, and not left out.
WITH_TABLES = "its tables"
PAIRS = "pairs"  # a matrix that makes a bias of each pair, among the weights of an object
MOST_READINGS = 64
# What a required parameter may be whose name and position say nothing, by its annotation.
GUESSES = {
    "int": ("heads", "block", "window", "width", "key_heads", "pos"),
    "float": ("scale", "no", "softcap"),
    "bool": ("causal", "no", "yes"),
    "": ("mask", "key_mask", "bias", "lengths", "sink", "heads", "scale", "none", "no", "block"),
}
MOST_GUESSES = 24


@dataclass(frozen=True)
class Parameter:
    """One parameter: its role, and whether it is passed by keyword."""

    name: str
    role: str | None
    required: bool = True
    keyword: bool = False
    default: Any = None
    kind: str = ""  # what its annotation says: int, float, bool, or nothing
    guessed: bool = False  # whether nothing but a guess says its role


@dataclass(frozen=True, eq=False)
class Callee:
    """What is known of a function without calling it."""

    name: str
    parameters: tuple[Parameter, ...]
    framework: str = "numpy"
    weights: Mapping[str, Array] = field(default_factory=dict)  # used as x @ W
    heads: int | None = None
    number: int = 0  # of this reading: a function may be read in several ways
    returns: tuple[str, ...] = ()  # the names of gradients in a backward pass's last return
    reads_one_length: bool = False  # whether keys are as many as queries, as it reads or says
    paired: bool = False  # whether it has a backward pass beside its forward pass
    tables: str = ""  # the form of its tables of rotary positions
    layout: str = ""  # of the queries, as the code or its documentation says
    opaque: str = ""  # why its weights cannot be used, if they cannot
    widths: tuple[int, ...] = ()  # that arrays of tokens may have, by the weights
    unused: tuple[str, ...] = ()  # layers that its class makes and never reads
    has_positions: bool = False  # whether it has a learned table of positions
    mask_of_keys: bool = False  # whether its code says that a mask is (B, S)
    caps: tuple[float, ...] = ()  # numbers that its file gives to names with cap in them
    axes: Mapping[str, str] = field(default_factory=dict)  # of its arguments, as documented
    inverts_mask: bool = False  # whether its code inverts by ~ a mask that is said to be 1 and 0
    packs: bool = False  # whether heads lie side by side in its arrays, as many as `heads`
    narrow: bool = False  # it is called with float32 alone, as a torch module with such weights
    without: tuple[str, ...] = ()  # layers that are left out: normalisations, and the input added
    made: str = ""  # the arguments with which an object was made of a class
    steps: str = ""  # called for one token at a time, whose axis is kept or dropped
    remembers: bool = False  # an object that keeps keys and values between calls
    rows_first: bool = True  # whether (L, B, M) may be meant, and not only (B, L, M)
    batched: bool = True  # whether its code may be meant for more axes than it is right on
    adapted: bool = False  # called in a way that a line of code does not say
    window_means: str = ""  # inclusive or exclusive: whether its text counts the own key
    causal_aligns: str = ""  # end or start: which queries and keys meet, as its text says
    says_pieces: bool = False  # whether its text lets several tokens follow those in a cache
    says_single: bool = False  # whether only one does, after those of the first call
    says_linear: bool = False  # whether its name or its text mentions linear attention
    says_transposed: bool = False  # whether its weights are stored as (out, in), by a name
    by_head: bool | None = None  # whether one head's fused columns follow another's
    columns_said: str = ""  # heads or parts: whether its text says so, or the opposite
    around: Surroundings | None = None  # what a function of weights computes around attention
    norm_place: str = ""  # first or last: whether the input is normalised, or the sum with it
    says_causal: bool = False  # whether its code, without what is said beside it, has a causal rule
    says_cosine: bool = False  # whether its text normalises vectors, or mentions the cosine
    meant: tuple[str, ...] = ()  # names of mistakes that its text says are meant
    says_added: bool = False  # whether its text says that a mask is added to the scores
    sharpness: float | None = None  # the logarithm of what multiplies its cosines, if learned
    said_scale: str = ""  # none, width or model: what its text says in place of the root of D
    mask_means: str = ""  # keep or hide: what True is in a mask, as its name or its text says
    key_mask_means: str = ""  # the same of a mask of padded keys beside another mask
    pools: bool = False  # whether the first token alone asks, which is the mean of a map
    fault: str = ""  # the mistake that it has if this reading is right, or nothing
    option: str = ""  # an argument that is not as its default says, as code
    blocks: tuple[Block, ...] = ()  # its code, and that of its file that it calls

    @property
    def needs_mask(self) -> bool:
        """Whether the first parameter that takes a mask is a required one."""
        role = next((role for role in MASKS if role in self.roles), None)
        return role is not None and self.roles[role].required

    @property
    def reads_for_itself(self) -> bool:
        """Whether what it gets is read by learned queries, or by the first token alone."""
        return self.pools or LATENTS in self.weights

    @property
    def reads_more(self) -> bool:
        """Whether queries or a bias are made of what it gets in a way that the textbook has not."""
        return self.reads_for_itself or PAIRS in self.weights

    @property
    def has_past(self) -> bool:
        """Whether keys that came before are handed over: the last query belongs to the last key."""
        return "cache_k" in self.roles

    @property
    def has_one_length(self) -> bool:
        """Whether its queries and keys have the same axes, as documented or as its code reads."""
        own = [self.axes.get(self.roles[one].name) for one in ("query", "key") if one in self.roles]
        said = len(own) == 2 and own[0] == own[1] and "T" in (own[0] or "")
        return said or self.reads_one_length

    @property
    def is_backward(self) -> bool:
        """Whether it returns gradients: it takes that of the output."""
        return "d_output" in self.roles

    @property
    def roles(self) -> dict[str, Parameter]:
        """The parameters by their roles."""
        return {parameter.role: parameter for parameter in self.parameters if parameter.role}

    @property
    def kind(self) -> str:
        """arrays, packed (heads side by side), projected (with weights), or self (X alone)."""
        roles = self.roles
        if self.weights or set(PROJECTIONS) <= roles.keys():
            return "projected"
        if "x" in roles and "query" not in roles:
            return "self"
        return "packed" if "heads" in roles or self.packs else "arrays"


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function, without roles."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _documented(function)
    kinds = inspect.Parameter
    if [one.kind for one in found] == [kinds.VAR_POSITIONAL]:
        return [Parameter(name, None) for name in ARRAYS]
    parameters = []
    for one in found:
        if one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            required = one.default is one.empty
            keyword = one.kind is kinds.KEYWORD_ONLY
            keyword |= not required and one.kind is not kinds.POSITIONAL_ONLY
            default = None if required else one.default
            kind = next((k for k in ("int", "float", "bool") if k in _annotation(one)), "")
            parameters.append(Parameter(one.name, None, required, keyword, default, kind))
    return parameters


def _annotation(parameter: inspect.Parameter) -> list[str]:
    """The words of an annotation: Optional[int], int | None and "int" all have int."""
    return re.findall(r"\w+", inspect.formatannotation(parameter.annotation))


def _documented(function: Any) -> list[Parameter]:
    """The signature of a native function, from the first line of its documentation."""
    text = str(getattr(function, "__doc__", "") or "")
    match = re.match(r"\s*\w+\((.*?)\)\s*->", text, re.DOTALL)
    if match is None:
        return [Parameter(name, None) for name in ARRAYS]
    parts = [part.partition("=") for part in match[1].replace("*,", "").split(",")]
    return [
        Parameter(name.split(":")[0].strip(), None, not equals, bool(equals))
        for name, equals, _ in parts
        if name.strip().isidentifier()
    ]


def with_roles(parameters: list[Parameter], stated: dict[str, str]) -> list[tuple[Parameter, ...]]:
    """Each parameter with its role: as stated, by its name, by its position, or by a guess."""
    for name, role in stated.items():
        if role not in ROLES:
            raise OptionError(
                f"signature says {safe_text(name, 40)} is {safe_text(role, 40)}; it must be one of "
                f"{', '.join(sorted(ROLES))}"
            )
        if name not in {parameter.name for parameter in parameters}:
            raise OptionError(f"signature names {safe_text(name, 40)}, which is not a parameter")
    backward = any(one.required and is_upstream(one.name) for one in parameters)
    more = BACKWARD_ROLE_OF if backward and not stated else {}
    found = [
        replace(
            one,
            role=stated.get(one.name)
            or one.role
            or more.get(plain(one.name))
            or _role_by_name(one),
        )
        for one in parameters
    ]
    if (
        found[:1]
        and not (stated or found[0].role or _takes_queries(found))
        and {one.role for one in found} >= {*PROJECTIONS}
    ):
        found[0] = replace(found[0], role="x")  # before the matrices that it meets
    if not stated:
        found = _by_families(found)
    if not stated and not _takes_queries(found):
        of_arrays = dict(zip(PROJECTIONS, ARRAYS, strict=True))  # query_layer is an array, then
        found = [replace(one, role=of_arrays.get(one.role or "", one.role)) for one in found]
    if not stated and not _takes_queries(found) and found[:1] and plain(found[0].name) == "h":
        found[0] = replace(found[0], role="x")  # hidden states, and not the number of heads
    by_position = False
    if not stated and not _takes_queries(found):
        # A state without anything else that could be the queries is no cache.
        found = [replace(one, role=None if one.role == "cache" else one.role) for one in found]
        by_position = not any(one.required and one.role for one in found)
        found = _by_position(found)
    _settle(found, stated)
    unknown = [one for one in found if one.required and one.role is None]
    if not _takes_queries(found):
        name = safe_text(found[0].name, 40) if found else "x"
        raise OptionError(
            f"no parameter takes the queries; state which one with signature={name + '=query'!r}"
        )
    if len(unknown) > 2:
        names = [safe_text(one.name, 40) for one in unknown]
        stated_as = ", ".join(f"{name}=mask" for name in names)
        raise OptionError(
            f"the roles of parameters {', '.join(names)} are not known; state them with "
            f"signature={stated_as!r}, each as one of {', '.join(sorted(ROLES))}"
        )
    choices = [GUESSES[one.kind] for one in unknown]
    guesses = itertools.islice(itertools.product(*choices), MOST_GUESSES)
    scales = [one for one in found if _is_of_caller(one)]
    told = [replace(one, required=True) if one in scales else one for one in found]
    ways = [told, found] if scales else [found]
    ways += [_exchanged(found)] if by_position and {*ARRAYS} <= {x.role for x in found} else []
    return [_with_guesses(own, roles) for roles in guesses for own in ways]


def _exchanged(found: Sequence[Parameter]) -> list[Parameter]:
    """The same with keys and values in the other order, as of names that say nothing."""
    others = {"key": "value", "value": "key"}
    return [replace(one, role=others.get(one.role or "", one.role)) for one in found]


def roles_by_family(names: Sequence[str]) -> dict[str, str]:
    """Names that differ in q, k and v alone are those of weights, and others of biases.

    As in f(X, omega_v, omega_q, omega_k, beta_v, beta_q, beta_k); omega_c is the output's then.
    """
    stems: dict[str, dict[str, str]] = {}
    for name in names:
        if (own := FAMILY.fullmatch(name)) is not None:
            stems.setdefault(own[1], {})[own[2].lower()] = name
    whole = [stem for stem in stems if {*"qkv"} <= stems[stem].keys()]
    whole.sort(key=lambda stem: plain(stem).startswith("b"))  # beta, bias
    return {
        name: f"{kind}_{'o' if letter == 'c' else letter}"
        for kind, stem in zip("Wb", whole, strict=False)
        for letter, name in stems[stem].items()
    }


def _by_families(found: list[Parameter]) -> list[Parameter]:
    roles = roles_by_family([one.name for one in found[1:] if one.role is None])
    return [replace(one, role=one.role or roles.get(one.name)) for one in found]


def _by_position(found: list[Parameter]) -> list[Parameter]:
    """Names that say nothing: query, key, value and a mask in their usual order, or X alone."""
    required = [n for n, one in enumerate(found) if one.required]
    untold = [n for n in required if found[n].role is None]
    usual = {1: ("x",), 3: ARRAYS, 4: (*ARRAYS, "mask")}
    places, roles = required, usual.get(len(required), ())
    if not (roles and (len(untold) == len(required) or len(required) == 1)):
        known = {one.role for one in found}
        places = untold
        if {"key", "value"} <= known or "context" in known:
            roles = ("query",)
        else:
            roles = {1: ("x",), 2: ("x", "context")}.get(len(untold), ARRAYS if untold else ())
    for n, role in zip(places, roles, strict=False):
        found[n] = replace(found[n], role=role)
    return found


def _settle(found: list[Parameter], stated: Mapping[str, str]) -> None:
    """Roles that depend on those of other parameters."""
    roles = {one.role for one in found}
    if "query" in roles and not roles & {"key", "key_t", "value", "context", "x"}:
        whole = {"cache_k": "key", "cache_v": "value"}  # attention over a cache that is filled
        for n, one in enumerate(found):
            if one.required and one.role in whole and one.name not in stated:
                found[n] = replace(one, role=whole[one.role])
        roles = {one.role for one in found}
    several = sum(one.role == "mask" for one in found) > 1
    for n, one in enumerate(found):
        if one.name in stated:
            continue
        if one.role == "mask" and several and plain(one.name) == "m":  # the memory, then
            found[n] = replace(one, role="context")
            continue
        if one.role == "context" and {"query", "value"} <= roles and "key" not in roles:
            found[n] = replace(one, role="key")
        elif one.role == "x" and "query" in roles and "context" not in roles:
            found[n] = replace(one, role=None if "key" in roles else "context")
        elif one.role == "query" and not roles & {"key", "key_t", "value", "context", "x"}:
            found[n] = replace(one, role="x")
        elif one.role == "key" and "x" in roles and "value" not in roles:
            found[n] = replace(one, role="none")  # JAX's random key
        elif plain(one.name) in BETWEEN and not one.required and one.default is None:
            own = roles & {"key", "context"} and not roles & {*PROJECTIONS}
            found[n] = replace(one, role="between") if own else one


def _with_guesses(found: list[Parameter], roles: Sequence[str]) -> tuple[Parameter, ...]:
    guesses = iter(roles)
    return tuple(
        replace(one, role=next(guesses), guessed=True) if one.required and one.role is None else one
        for one in found
    )


def _takes_queries(parameters: list[Parameter]) -> bool:
    return any(parameter.role in ("x", "query") for parameter in parameters)


def _role_by_name(parameter: Parameter) -> str | None:
    role = role_of(parameter.name)
    if role == "before_softmax":  # its inverse root, or what multiplies the scores
        own = parameter.default
        return "scale" if type(own) is float and own < 1 else "width"
    switches = ("scale", "window", "cache", "bias", "cache_k", "context", "x")
    if role in switches and (isinstance(parameter.default, bool) or parameter.kind == "bool"):
        return None  # a switch: whether to scale, not by how much
    if role == "width" and not parameter.required:
        return None  # dim=-1 is an axis
    return role


def _is_of_caller(parameter: Parameter) -> bool:
    """Whether a scale may be the caller's to give: its default is 1, or that of some width."""
    default = parameter.default
    if parameter.role != "scale" or type(default) not in (int, float) or not 0 < default <= 1:
        return False
    return bool(abs(default**-2 - round(default**-2)) < 1e-3 * default**-2)


def without_weights(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """The parameters of a function that has no weights: embeddings are queries, and keys."""
    roles = {one.role for one in parameters}
    ready = {"key", "key_t", "value", *PROJECTIONS}
    if "context" not in roles or not roles & {"x", "query"} or roles & ready:
        return tuple(parameters)
    arrays = {"x": "query", "context": "key_value"}
    return tuple(replace(one, role=arrays.get(one.role or "", one.role)) for one in parameters)


def heads_bound(function: Any) -> int | None:
    """The number of heads that a partial function has been given already."""
    if not isinstance(function, functools.partial):
        return None
    given = inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
    counts = (one for name, one in given.arguments.items() if role_of(name) == "heads")
    return next((one for one in counts if type(one) is int and one > 0), None)


def names_in(function: Any) -> list[str]:
    """The global names and attributes in the code of a function and of those inside it.

    Of a class those of its methods.
    """
    own = [function]
    if inspect.isclass(function):
        own = [one for part in parts_of(function) for one in vars(part).values()]
    codes = [getattr(one, "__code__", None) for one in own]
    for code in codes:
        codes += [one for one in getattr(code, "co_consts", ()) if isinstance(one, CodeType)]
    return [*dict.fromkeys(name for code in codes for name in getattr(code, "co_names", ()))]


def globals_of(function: Any) -> dict[str, Any]:
    """The global names that the code of a function, or of a class, may use."""
    module = sys.modules.get(function.__module__) if inspect.isclass(function) else None
    return vars(module) if module else getattr(function, "__globals__", {})


def given_windows(made: str) -> dict[Parameter, int]:
    """The windows that an object was made with, as the arguments of its constructor say.

    >>> [(one.name, size) for one, size in given_windows("dim=24, sliding_window=3").items()]
    [('sliding_window', 3)]
    """
    given = re.findall(r"\b(\w+)=(\d+)\b", made)
    return {Parameter(n, "window"): int(size) for n, size in given if role_of(n) == "window"}


def parts_of(kind: type) -> list[type]:
    """A class and those of its file that it inherits from."""
    return [one for one in kind.__mro__ if one.__module__ == kind.__module__]


def text_of(function: Any) -> str:
    """The code of a function, or of a class and those of its file that it inherits from.

    Nothing of what is not known.
    """
    while isinstance(function, functools.partial):
        function = function.func
    found = []
    for one in parts_of(function) if inspect.isclass(function) else [function]:
        with contextlib.suppress(OSError, TypeError):
            found.append(source_of(inspect.unwrap(one)))
    return "\n".join(found)
