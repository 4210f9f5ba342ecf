"""What a constructor is given: sizes by their names, weights, configurations.

Also to functions that make weights. Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import text_of
from regard.diagnosis.reading.source_text import tree_of

MODEL_NAMES = ("d", "dim", "width")  # of the embeddings in a constructor, of a head elsewhere
HEAD_WIDTH, HEADS = 6, 4  # as those of probes with heads
# A width of which a quarter and a half are even, for a part of it that rotary positions turn.
ROUND_WIDTH = 8
PARTIAL = re.compile("rotary_pct|partial_rotary|rotary_(ndims|dim|percent)|rope_pct")
# Code of slopes of ALiBi that knows numbers of heads which are no power of two, such as 6.
SLOPES = re.compile(
    r"(floor|int)\([\w.]*log2|log2(?s:.)*(floor|int\(|is_integer|// *1\b)|"
    r"(closest|lower|next|nearest)_?power|bit_length",
    re.IGNORECASE,
)
ODD_HEADS = 6
DROPOUT = 0.1  # of a module in evaluation mode, which has to ignore it
LONGEST = 512  # of a sequence: more than any probe has
CONFIGURATION = re.compile("config|configuration|cfg|conf|args|hparams|hps|opt|options|c")
GRID = re.compile("^(grid|partition)(size)?$")
MAP_SIDE = re.compile(
    "^((input|feat|feature|featmap|fmap|img|image|map|spatial)(size|resolution|res)|resolution)$"
)
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
    (re.compile("^shift(size)?$"), "shift"),
    (GRID, "grid"),
    (MAP_SIDE, "side of a map"),
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

# A map that is cut into windows by one reshape: H // m, m, W // m, m, and as einops writes it.
CUTS = (
    r"\b[hH]\w* *// *[\w.]+ *, *[\w.]+ *, *[wW]\w* *//|"
    r"\([hHyY]\w* \w+\) \([wWxX]\w* \w+\)|\(\w+ [hHyY]\w*\) \(\w+ [wWxX]\w*\)"
)
# A window with a side, so that a probe of 16 tokens fills it.
OF_IMAGES = re.compile(
    r"(window(_size)?|ws)\)? *\*\* *2|(window_size|ws) *\* *(self\.)?(window_size|ws)\b|meshgrid|"
    r"window_(partition|reverse)|\brel\w*_h\b|" + CUTS
)
OF_WINDOWS = re.compile(r"\broll\(|partition\w*\(|\breverse\w*\(|" + CUTS)  # several in a small map
# Sizes of windows and images are pairs in some code, which says so when it gets a number.
PAIRED = re.compile("size|window|grid|resolution|shape|patches|img|image")
OF_PAIRS = re.compile("subscriptable|iterable|unpack")
PAIRS = ((2, 8), (4, 4))  # of so many pixels as round probes have tokens

# What the constructor of a class that has weights mentions.
OF_WEIGHTS = re.compile(
    r"\b[wW]_?[qkvo]|weight|Linear|Dense|Parameter|kernel|proj|random|normal|qkv|//"
)
# Code whose blocks change nothing, so that a short text may have several.
BY_BLOCKS = re.compile(r"online|flash|running (max|sum)|rescal|\btile", re.IGNORECASE)
# What makes the weights of a function that takes them.
INITIAL = re.compile(r"_?(init|make|create|new|random)|\w+_init$", re.IGNORECASE)
HALF_TYPES = ("torch.bfloat16", "torch.float16")
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


def is_module(kind: type) -> bool:
    """Whether a class is one of torch's modules."""
    return any(base.__module__.startswith("torch.nn") for base in kind.__mro__)


def is_pair(name: str, value: Any) -> bool:
    """Whether the value of a parameter is a height and a width."""
    is_two = isinstance(value, tuple) and [*map(type, value)] == [int, int]
    return is_two and PAIRED.search(plain(name)) is not None


def is_count(name: str, kind: Any) -> bool:
    """Whether a parameter is the number of heads: by its name, or as a letter that widths have."""
    if role_of(name) == "heads" or len(name) > 1:
        return role_of(name) == "heads"
    return re.search(rf"\w+ *(//|%) *{name}\b", text_of(kind)) is not None


def like(value: Any, drawn: Array) -> Any:
    """Numbers as an array of JAX, where that is loaded; else the value."""
    library = sys.modules.get("jax.numpy")
    return value if library is None else library.asarray(drawn)


def constructor_arguments(kind: Any, heads: int | None, own_sizes: bool) -> dict[str, Any]:
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
        value = sizes["heads"] if is_count(one.name, kind) else value
        required = one.default is one.empty
        if str(one.default) in HALF_TYPES:  # answers in float32 have the digits of a comparison
            arguments[one.name] = sys.modules["torch"].float32
            continue
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
        elif own_sizes and is_dataclass(one.default) and CONFIGURATION.fullmatch(plain(one.name)):
            arguments[one.name] = configuration(kind, one, heads)
        elif not required and _is_kept(one, own_sizes):
            arguments[one.name] = one.default
        elif required or type(value) is float or (own_sizes and _may_change(one, value)):
            arguments[one.name] = value
    return arguments


def dtypes_asked(kind: Any) -> Iterator[str]:
    """The parameters of a constructor that are a dtype of torch, by default."""
    for one in inspect.signature(kind).parameters.values():
        if str(one.default).startswith(("torch.float", "torch.bfloat")):
            yield one.name


def initial_tree(function: Any, names: Iterable[str], heads: int) -> Mapping[str, Any]:
    """The weights with these names, among others, that a function of the same file makes."""
    module = sys.modules.get(getattr(inspect.unwrap(function), "__module__", ""))
    for name, own in vars(module).items() if module else ():
        if not (INITIAL.match(name) and inspect.isfunction(own)) or own is function:
            continue
        with contextlib.suppress(Exception):
            made = own(**constructor_arguments(own, heads, own_sizes=True))
            found = made if isinstance(made, Mapping) else made._asdict()
            if {*names} <= found.keys():
                return dict(found)
    return {}


def _weight(name: str, sizes: Mapping[str, Any], kind: Any) -> Any:
    """A weight or a bias for a constructor that takes it, in the library of the class, or None."""
    role, bare = role_of(name) or "", plain(name)
    as_torch = re.fullmatch("(in|out)proj(weights?|bias)", bare)  # (3 · M, M) and (M, M)
    fused = (
        3 if re.fullmatch("[wb]?qkv(w|b|weights?|bias|proj)?|inproj(weights?|bias)", bare) else 1
    )
    if fused == 1 and not as_torch and role[:2] not in ("W_", "b_"):
        return None
    columns = fused * sizes["width"] * sizes["key_heads" if role[-1:] in ("k", "v") else "heads"]
    shape: tuple[int, ...]
    shape = (columns, sizes["model"]) if as_torch else (sizes["model"], columns)
    if role[:2] == "b_" or bare.endswith("bias") or re.fullmatch("bqkv|qkvb", bare):
        shape = (columns,)
    drawn = np.random.default_rng(len(name) + ord(role[-1:] or "q")).uniform(-0.9, 0.9, shape)
    used = _names_beside(kind)
    if "torch" in used:
        return sys.modules["torch"].from_numpy(drawn)
    return like(drawn, drawn) if {"jnp", "jax"} & used else drawn


def _names_beside(kind: Any) -> set[str]:
    """The names of the file in which a class or a function is written."""
    return {*vars(sys.modules.get(kind.__module__, sys))}


def _is_kept(parameter: inspect.Parameter, own_sizes: bool) -> bool:
    """Whether a default is handed over, because it is a pair, or a window that has to be known."""
    if own_sizes:
        return is_pair(parameter.name, parameter.default)
    return role_of(parameter.name) == "window"


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
    named = any(is_count(name, kind) or role_of(name) == "key_heads" for name in names)
    grouped = any(role_of(name) == "key_heads" for name in names)
    whole = text_of(sys.modules.get(kind.__module__))
    usual = ODD_HEADS if SLOPES.search(whole) else HEADS
    count = heads or (usual if named else 1)
    text = text_of(kind)
    own = [one for one in getattr(kind, "__mro__", ()) if one.__module__ == kind.__module__]
    begins = "\n".join(text_of(vars(one)["__init__"]) for one in own if "__init__" in vars(one))
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
        "block": 2 if BY_BLOCKS.search(text) else LONGEST,
        "window": (2 if OF_WINDOWS.search(text) else 4) if OF_IMAGES.search(whole) else 3,
        "grid": 2 if OF_WINDOWS.search(text) else None,
        "side of a map": 4 if OF_IMAGES.search(whole) else width * count,
        "shift": 1,
        "batch": 2,
        "layers": 1,
        "softcap": 3,
        "dropout": DROPOUT if inspect.isclass(kind) and is_module(kind) else 0.0,
    }


def size_by_name(name: str, sizes: Mapping[str, Any]) -> Any:
    """The size or number that a name asks for, or None."""
    role = "model" if plain(name) in MODEL_NAMES else role_of(name) or ""
    role = "width" if plain(name) in ("hd", "hs") else role  # of a head
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
    annotated = type(parameter.default) if is_dataclass(parameter.default) else annotated
    names = [*_read_from(kind, parameter.name)]
    if is_dataclass(annotated) and isinstance(annotated, type):
        own = [one.name for one in fields(annotated) if one.init]
        sizes = _sizes(own, heads, kind)
        given = ((name, size_by_name(name, sizes)) for name in own)
        return annotated(**{name: value for name, value in given if value is not None})
    sizes = _sizes(names, heads, kind)
    values = {name: size_by_name(name, sizes) for name in names}
    return Configuration(
        {name: _number(name) if value is None else value for name, value in values.items()}
        | {name: False for name in names if re.search("bias|flash|use|is_|gate|norm", name)}
    )


def _number(name: str) -> Any:
    """What an entry of a configuration may be that is no size."""
    return next((value for pattern, value in NUMBERS if pattern.search(plain(name))), 0.0)


class Configuration(SimpleNamespace):
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
        tree = tree_of(sys.modules[kind.__module__])
    except (OSError, TypeError, SyntaxError, KeyError):
        try:
            tree = tree_of(kind)
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
