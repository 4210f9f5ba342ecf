"""Making an object of a class: small sizes for the parameters of its constructor, by their names.

Must not know what the object computes.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.changed_text import parsed
from regard.diagnosis.norms import NORM, without_norms
from regard.diagnosis.signature import plain, role_of, text_of
from regard.errors import OptionError, safe_text

# Where an object that is made here keeps what it was made with.
_MADE = "regard_made_with"
_HEADS = "regard_made_with_heads"
MODEL_NAMES = ("d", "dim", "width")  # of the embeddings in a constructor, of a head elsewhere
HEAD_WIDTH, HEADS = 6, 4  # as those of probes with heads
# A width of which a quarter and a half are even, for a part of it that rotary positions turn.
ROUND_WIDTH = 8
PARTIAL = re.compile("rotary_pct|partial_rotary|rotary_(ndims|dim|percent)|rope_pct")
# Code of slopes of ALiBi that knows numbers of heads which are no power of two, such as 6.
SLOPES = re.compile(r"log2|(closest|lower|next|nearest)_?power|bit_length", re.IGNORECASE)
ODD_HEADS = 6
DROPOUT = 0.1  # of a module in evaluation mode, which has to ignore it
LONGEST = 512  # of a sequence: more than any probe has
CONFIGURATION = re.compile("config|configuration|cfg|conf|args|hparams|hps|opt|options|c")
# Names of sizes, where a role does not tell; the first pattern that matches decides.
SIZES = (
    (re.compile("rotary(pct|percent)|partialrotary|ropepct"), "turned share"),
    (re.compile("^rotaryn?dims?$"), "turned"),
    (
        re.compile(
            "len|block|context(?!dim)|positions|seq|maxpos|maxsteps|ntokens|capacity|buffer|slots|"
            "maxsize|cachesize|latents$|queries$|maxtokens"
        ),
        "length",
    ),
    (re.compile("^c(hidden|head)$|preattnscalar$"), "width"),
    (re.compile("batch|bsz"), "batch"),
    (re.compile("layer|depth"), "layers"),
    (re.compile("vocab"), "length"),
    (re.compile("drop|prob$"), "dropout"),
    (
        re.compile(
            "^(d|emb|in|out|hid|dim|model|width|embed|nembd|q|k|v|kv|query|key|value|feat|size|ch|"
            "channels|c$|c[a-z]$|cin|cout)"
        ),
        "model",
    ),
)

# A window with a side, so that a probe of 16 tokens fills it.
OF_IMAGES = re.compile(
    r"(window(_size)?|ws)\)? *\*\* *2|(window_size|ws) *\* *(self\.)?(window_size|ws)\b|meshgrid"
)
# Sizes of windows and images are pairs in some code, which says so when it gets a number.
PAIRED = re.compile("size|window|grid|resolution|shape|patches|img|image")
OF_PAIRS = re.compile("subscriptable|iterable|unpack")
PAIRS = ((2, 8), (4, 4))  # of so many pixels as round probes have tokens

# A single learned number that multiplies what attention returns; of others the module is kept.
GATE = re.compile("(gamma|gate|alpha|beta)$")

# A learned factor of the scores; where each head has the same, all keep it.
SHARPNESS = re.compile(r"(scale|temperature|tau)$")
# A layer whose sigmoid multiplies it; with a large bias it multiplies by 1.
GATE_LAYER = re.compile("gat(e|ing)|g_proj$|linear_g$")
# Layers behind attention, whose output is added: without numbers they add nothing.
FEED_FORWARD = re.compile(r"(^|\.)(ff|ffn|mlp|feed_?forward|linear[12]|fc[12])$")

# What the constructor of a class that has weights mentions.
OF_WEIGHTS = re.compile(
    r"\b[wW]_?[qkvo]|weight|Linear|Dense|Parameter|kernel|proj|random|normal|qkv|//"
)
# What makes the weights of a function that takes them.
INITIAL = re.compile("_?(init|make|create|new|random)", re.IGNORECASE)
# Numbers that are no sizes, by their names.
NUMBERS = (
    (re.compile("eps"), 1e-6),
    (re.compile("^inf|large"), 1e9),
    (re.compile("theta|base"), 10000.0),
    (re.compile("bias|causal|masked"), True),
    (re.compile("^(is|use|has|with|gat|flash|norm|pre|return|learn)"), False),
    (re.compile("alpha|slope"), 0.2),
    (re.compile("temp|scale|gain|init|std"), 1.0),
)


def constructed(kind: Any, heads: int | None) -> list[Any]:
    """Objects of a class, the one with sizes chosen here first; an OptionError if there is none."""
    name = safe_text(getattr(kind, "__name__", "it"), 60)
    found, problem = [], ""
    for own_sizes in (True, False):
        try:
            arguments = _arguments(kind, heads, own_sizes)
            made, *with_others = _made(kind, arguments)
            if own_sizes and (width := _width_of_heads(made, arguments)):
                arguments |= width
                made = kind(**arguments)
            if is_module(kind) and not all(own.numel() for own in made.parameters()):
                raise ValueError("a weight has no numbers")  # such as a width of dim // 8
            for own, given in ((made, arguments), *with_others):
                with contextlib.suppress(AttributeError):
                    counts = (value for name, value in given.items() if _is_count(name, kind))
                    setattr(own, _HEADS, next(counts, None))
                    setattr(own, _MADE, ", ".join(f"{n}={_said(v)}" for n, v in given.items()))
                found.append(own)
        except OptionError as error:
            problem = problem or str(error)
        except Exception as error:
            text = safe_text(f"{type(error).__name__}: {error}", 160)
            problem = problem or f"{name} cannot be made: {text}; give an object of it"
    if not found:
        raise OptionError(problem)
    return found


def _said(value: Any) -> str:
    """An argument of a constructor as code; the shape of a weight."""
    return f"<{tuple(value.shape)}>" if hasattr(value, "shape") else repr(value)


def _made(kind: Any, arguments: dict[str, Any]) -> list[Any]:
    """An object of a class, with pairs for the sizes that are pairs to it.

    After it others with other pairs, each with its arguments.
    """
    try:
        return [kind(**arguments)]
    except TypeError as error:
        sizes = [n for n, v in arguments.items() if type(v) is int and PAIRED.search(plain(n))]
        if not sizes or not OF_PAIRS.search(str(error)):
            raise
        found = []
        for pair in PAIRS:
            with contextlib.suppress(Exception):
                own = arguments | dict.fromkeys(sizes, pair)
                found.append((kind(**own), own))
        if not found:
            raise
        (made, own), *others = found
        arguments |= own
        return [made, *others]


def _width_of_heads(made: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The width that heads need if the width of embeddings is fixed outside; else nothing."""
    roles = {role_of(name): name for name in arguments if plain(name) not in MODEL_NAMES}
    if not is_module(type(made)) or not {"heads", "width"} >= roles.keys() or "width" not in roles:
        return {}
    count = arguments[roles["heads"]] if "heads" in roles else 1
    first = next((p.shape[-1] for p in made.parameters() if p.ndim == 2), 0)
    return {roles["width"]: first // count} if "heads" in roles and first % count == 0 else {}


def _is_count(name: str, kind: Any) -> bool:
    """Whether a parameter is the number of heads: by its name, or as a letter that widths have."""
    if role_of(name) == "heads" or len(name) > 1:
        return role_of(name) == "heads"
    return re.search(rf"\w+ *(//|%) *{name}\b", text_of(kind)) is not None


def heads_made_with(thing: Any) -> int | None:
    """The number of heads with which an object was made here, if that is known."""
    count = getattr(thing, _HEADS, None)
    return count if type(count) is int else None


def made_with(thing: Any) -> str:
    """The arguments with which an object was made here, as code; nothing for another object."""
    return str(getattr(thing, _MADE, ""))


def as_written(own: Any, thing: Any) -> bool:
    """Whether lines of code can say how an object was made of a class, or was another's copy."""
    is_module = hasattr(own, "state_dict")
    return own is thing or (is_module and _Configuration.__name__ not in made_with(own))


def is_module(kind: type) -> bool:
    """Whether a class is one of torch's modules."""
    return any(base.__module__.startswith("torch.nn") for base in kind.__mro__)


def fresh_weights(thing: Any, *, narrow: bool = False) -> Any:
    """A copy of an object with random weights in float64, made for evaluation; the rest is kept.

    With `narrow` they are of float32.

    Single numbers, such as a learned temperature, are kept too.
    """
    own = copy.deepcopy(thing)
    if hasattr(own, "state_dict") and hasattr(own, "parameters"):
        import torch

        own = without_norms(own).eval()
        own = own.float() if narrow else own.double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                of_heads = parameter.ndim > 2 and parameter.numel() == max(parameter.shape)
                is_same = parameter.numel() and (parameter == parameter.flatten()[0]).all()
                if is_same and (SHARPNESS.search(name) or (of_heads and parameter.any())):
                    continue
                if parameter.numel() > 1:
                    parameter.uniform_(-0.9, 0.9, generator=generator)
                elif GATE.search(name):
                    parameter.fill_(1.0)
            for name, part in own.named_modules():
                if FEED_FORWARD.search(name):
                    for parameter in part.parameters():
                        parameter.zero_()
                if GATE_LAYER.search(name) and getattr(part, "bias", None) is not None:
                    part.weight.zero_()
                    part.bias.fill_(100.0)  # its sigmoid is 1
        return own
    rng = np.random.default_rng(0)
    for holder in (vars(own), *(one for one in vars(own).values() if isinstance(one, dict))):
        for name, value in holder.items():
            if (role_of(str(name)) or "")[:2] in ("W_", "b_") and _is_float(value):
                drawn = rng.uniform(-0.9, 0.9, value.shape).astype(value.dtype)
                holder[name] = drawn if isinstance(value, np.ndarray) else _like(value, drawn)
    for part in vars(own).values():
        for name, value in arrays_of_layer(part).items():
            drawn = rng.uniform(-0.9, 0.9, value.shape).astype(value.dtype)
            drawn = drawn if isinstance(value, np.ndarray) else _like(value, drawn)
            object.__setattr__(part, name, drawn)
    return own


def arrays_of_layer(part: Any) -> dict[str, Any]:
    """The weight and the bias of an object that is a layer, as Equinox has them; empty for others.

    The weight comes first.
    """
    own = getattr(part, "__dict__", {})
    weight = next((n for n in ("weight", "kernel", "w", "W") if _is_float(own.get(n))), "")
    if not weight or own[weight].ndim != 2:
        return {}
    bias = next((n for n in ("bias", "b") if _is_float(own.get(n))), "")
    return {name: own[name] for name in (weight, bias) if name}


def without(thing: Any) -> list[str]:
    """The layers of a torch module that `fresh_weights` leaves out, by their names."""
    if not hasattr(thing, "named_modules"):
        return []
    parts = thing.named_modules()
    left_out = (
        n for n, part in parts if NORM.search(type(part).__name__) or FEED_FORWARD.search(n)
    )
    return [name for name in left_out if name]


def _is_float(value: Any) -> bool:
    return hasattr(value, "shape") and str(getattr(value, "dtype", ""))[:5] == "float"


def _like(value: Any, drawn: Array) -> Any:
    library = sys.modules.get("jax.numpy")
    return value if library is None else library.asarray(drawn)


def _arguments(kind: Any, heads: int | None, own_sizes: bool) -> dict[str, Any]:
    """The arguments of a constructor: sizes by their names, the rest as its defaults say."""
    parameters = [
        one
        for one in inspect.signature(kind).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    sizes = _sizes([one.name for one in parameters], heads, kind)
    arguments: dict[str, Any] = {}
    for one in parameters:
        value = None if _is_seed(one.name) else size_by_name(one.name, sizes)
        value = sizes["heads"] if _is_count(one.name, kind) else value
        required = one.default is one.empty
        weight = _weight(one.name, sizes, kind) if required else None
        if weight is not None:
            arguments[one.name] = weight
        elif required and CONFIGURATION.fullmatch(plain(one.name)):
            arguments[one.name] = configuration(kind, one, heads)
        elif required and (choice := _choice(one.name, text_of(kind))):
            arguments[one.name] = choice
        elif required and value is None:
            value = _by_annotation(one, sizes, kind)
            arguments[one.name] = value
        elif required or type(value) is float or (own_sizes and _may_change(one, value)):
            arguments[one.name] = value
    return arguments


def initial_tree(function: Any, names: Iterable[str], heads: int) -> Mapping[str, Any]:
    """The weights with these names, among others, that a function of the same file makes."""
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", ""))
    for name, own in vars(module).items() if module else ():
        if not (INITIAL.match(name) and inspect.isfunction(own)) or own is function:
            continue
        with contextlib.suppress(Exception):
            made = own(**_arguments(own, heads, own_sizes=True))
            found = made if isinstance(made, Mapping) else made._asdict()
            if {*names} <= found.keys():
                return dict(found)
    return {}


def _weight(name: str, sizes: Mapping[str, Any], kind: Any) -> Any:
    """A weight or a bias for a constructor that takes it, in the library of the class, or None."""
    role, bare = role_of(name) or "", plain(name)
    as_torch = re.fullmatch("(in|out)proj(weights?|bias)", bare)  # (3 · M, M) and (M, M)
    fused = 3 if re.fullmatch("w?qkv(w|weights?|proj)?|inproj(weights?|bias)", bare) else 1
    if fused == 1 and not as_torch and role[:2] not in ("W_", "b_"):
        return None
    columns = fused * sizes["width"] * sizes["key_heads" if role[-1:] in ("k", "v") else "heads"]
    shape: tuple[int, ...]
    shape = (columns, sizes["model"]) if as_torch else (sizes["model"], columns)
    if role[:2] == "b_" or bare.endswith("bias"):
        shape = (columns,)
    drawn = np.random.default_rng(len(name) + ord(role[-1:] or "q")).uniform(-0.9, 0.9, shape)
    used = _names_beside(kind)
    if "torch" in used:
        return sys.modules["torch"].from_numpy(drawn)
    return _like(drawn, drawn) if {"jnp", "jax"} & used else drawn


def _names_beside(kind: Any) -> set[str]:
    """The names of the file in which a class or a function is written."""
    return {*vars(sys.modules.get(kind.__module__, sys))}


def _may_change(parameter: inspect.Parameter, value: Any) -> bool:
    """Whether a size may be another one than the default; None is as many key heads as others."""
    default = parameter.default
    if default is None and role_of(parameter.name) == "key_heads":
        return True
    is_size = type(default) is int or plain(parameter.name).endswith("preattnscalar")
    return is_size and type(value) is int and default > 0


def _choice(name: str, text: str) -> str:
    """The first of the words that code compares an argument with.

    >>> _choice("method", 'if method not in ("dot", "general"):')
    'dot'
    """
    compared = rf"\b{name}\b *(?:==|!=|(?:not +)?in *[(\[{{]) *[\"'](\w+)[\"']"
    return next((one[1] for one in re.finditer(compared, text)), "")


def _by_annotation(parameter: inspect.Parameter, sizes: Mapping[str, Any], kind: Any) -> Any:
    words = re.findall(r"\w+", inspect.formatannotation(parameter.annotation))
    if "dtype" in plain(parameter.name):
        return np.float64
    if _is_seed(parameter.name):
        if plain(parameter.name) == "seed":
            return 0
        of_jax = {"jax", "jnp", "jr", "random"} & _names_beside(kind)
        jax = sys.modules.get("jax") if of_jax else None
        return np.random.default_rng(0) if jax is None else jax.random.PRNGKey(0)
    if "bool" in words:
        return True
    if value := _number(parameter.name):
        return value
    return 1.0 if "float" in words else sizes["model"]


def _is_seed(name: str) -> bool:
    """Whether a parameter is meant to make random numbers."""
    return plain(name) in ("key", "prngkey", "rngkey", "seed", "rng", "generator", "randomkey")


def _sizes(names: list[str], heads: int | None, kind: Any) -> dict[str, Any]:
    """Sizes that fit together: heads of six columns each, and half as many key heads."""
    named = any(_is_count(name, kind) or role_of(name) == "key_heads" for name in names)
    grouped = any(role_of(name) == "key_heads" for name in names)
    usual = ODD_HEADS if SLOPES.search(text_of(sys.modules.get(kind.__module__))) else HEADS
    count = heads or (usual if named else 1)
    text = text_of(kind)
    begins = text_of(kind.__init__) if inspect.isclass(kind) else ""
    is_bare = begins != "" and not (is_module(kind) or OF_WEIGHTS.search(begins))
    # A head alone has another width than the embeddings, so that a scale by these is seen.
    apart = 2 if count == 1 and any(role_of(name) == "width" for name in names) else 1
    width = ROUND_WIDTH if PARTIAL.search(text) else HEAD_WIDTH
    return {
        "heads": count,
        "key_heads": max(1, count // 2) if grouped and not is_bare else count,
        "width": width,
        "model": width if is_bare else width * count * apart,
        "turned": width // 2,
        "turned share": 0.5,
        "length": LONGEST,
        "block": LONGEST,
        "window": 4 if OF_IMAGES.search(text) else 3,
        "batch": 2,
        "layers": 1,
        "softcap": 3,
        "dropout": DROPOUT if inspect.isclass(kind) and is_module(kind) else 0.0,
    }


def size_by_name(name: str, sizes: Mapping[str, Any]) -> Any:
    """The size or number that a name asks for, or None."""
    role = "model" if plain(name) in MODEL_NAMES else role_of(name) or ""
    if role == "no":
        return False if "train" in name else sizes["dropout"]
    if role in ("heads", "key_heads", "width", "model", "window", "softcap", "block"):
        return sizes[role]
    for pattern, size in SIZES:
        if pattern.search(plain(name)):
            return sizes[size]
    return None


# --- configurations ------------------------------------------------------------------------------


def configuration(kind: Any, parameter: inspect.Parameter, heads: int | None) -> Any:
    """A configuration with the attributes that the code of a class reads."""
    annotated = parameter.annotation
    module = sys.modules.get(kind.__module__)
    if isinstance(annotated, str):
        annotated = getattr(module, annotated, None)
    names = [*_read_from(kind, parameter.name)]
    if is_dataclass(annotated) and isinstance(annotated, type):
        own = [one.name for one in fields(annotated) if one.init]
        sizes = _sizes(own, heads, kind)
        given = ((name, size_by_name(name, sizes)) for name in own)
        return annotated(**{name: value for name, value in given if value is not None})
    sizes = _sizes(names, heads, kind)
    values = {name: size_by_name(name, sizes) for name in names}
    return _Configuration(
        {name: _number(name) if value is None else value for name, value in values.items()}
        | {name: False for name in names if re.search("bias|flash|use|is_|gate|norm", name)}
    )


def _number(name: str) -> Any:
    """What an entry of a configuration may be that is no size."""
    return next((value for pattern, value in NUMBERS if pattern.search(plain(name))), 0.0)


class _Configuration(SimpleNamespace):
    """Its entries are attributes and items."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__(**entries)

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An entry, or a default."""
        return vars(self).get(name, default)


def _read_from(kind: Any, name: str) -> Iterator[str]:
    """The attributes and items of `name` that a class and the others of its module read."""
    try:
        tree = parsed(textwrap.dedent(inspect.getsource(sys.modules[kind.__module__])))
    except (OSError, TypeError, SyntaxError, KeyError):
        try:
            tree = parsed(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_name(node.value, name):
            yield node.attr
        elif isinstance(node, ast.Subscript) and _is_name(node.value, name):
            entry = getattr(node.slice, "value", None)
            if isinstance(entry, str):
                yield entry


def _is_name(node: ast.expr, name: str) -> bool:
    if isinstance(node, ast.Attribute):  # self.config.n_embd
        return node.attr == name and isinstance(node.value, ast.Name)
    return isinstance(node, ast.Name) and node.id == name
