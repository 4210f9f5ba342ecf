"""Random calls of `regard.attention`, each a plain dictionary that can be kept in a file.

Owns what a call is (`draw`), the arrays it stands for (`build`), and whether the answer is right
(`check`). Must not know how any kernel works.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

import regard
from bounds import FUSED, PAIRS, WHOLE_ROWS, Arithmetic, assert_within, error_bounds
from calls import BFLOAT16, PATHS, on_path
from long_oracle import attend_long
from oracle import Answer
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.rules.visibility import Placed
from texts import positions_in_texts

Call = dict[str, Any]
SIZES = [0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33]
DTYPES = ["float32", "float64", "float16"] + (["bfloat16"] if BFLOAT16 is not None else [])
LAYOUTS = ["plain", "fortran", "reversed", "stepped", "swapped", "unaligned", "readonly"]
LARGEST = {"float16": 4, "float32": 37, "float64": 307, "bfloat16": 37}  # powers of ten


def draw(seed: int) -> Call:
    """One call: sizes, types, layouts, options; its numbers are drawn from the seed."""
    r = random.Random(seed)
    form = r.choice(["heads"] * 6 + ["rows", "vector"])
    call: Call = {"seed": seed, "form": form, "path": r.choice(PATHS), "options": {}}
    call["batch"] = [r.choice([1, 2, 2, 3, 0]) for _ in range(r.choice([0, 0, 1, 1, 2, 3]))]
    call["groups"], call["repeats"] = r.choice([1, 1, 2, 3]), r.choice([1, 1, 2, 3, 0])
    for letter in "LSDE":
        call[letter] = r.choice(SIZES)
    if r.random() < 0.05:
        call["S"], call["batch"] = r.choice([130, 255, 257, 300, 520]), []
    if r.random() < 0.3:
        call["L"] = 1
    if form != "heads":
        call |= {"batch": [], "groups": 1, "repeats": 1}
    if form == "vector":
        call["L"] = 1
    one = r.choice(DTYPES)
    halves = DTYPES[:3] if one != "bfloat16" else ["bfloat16", *DTYPES[:2]]  # those that mix
    kinds = r.choice([[one] * 3] * 8 + [[r.choice(halves) for _ in range(3)], ["int8"] * 3])
    call["dtypes"] = kinds
    call["layouts"] = [r.choice(LAYOUTS) if r.random() < 0.4 else "plain" for _ in range(3)]
    call["powers"] = [0, 0, 0]
    if r.random() < 0.3:
        most = [LARGEST.get(kind, 0) for kind in kinds]
        call["powers"] = [r.randint(-n, n) if r.random() < 0.5 else 0 for n in most]
    call["shared"] = [r.random() < 0.2 for _ in range(3)]  # whose leading axes are broadcast
    call["nan"] = r.choice([None] * 9 + ["query", "key", "value"])
    call["poison"] = r.choice([None, "nan", "inf", "-inf"])
    _draw_options(r, call)
    return call


def _draw_options(r: random.Random, call: Call) -> None:
    options = call["options"]
    if r.random() < 0.3:
        options["mask"] = _draw_mask(r, call, 0)
    if r.random() < 0.2:
        options["causal"] = True
    if r.random() < 0.2:
        ends = [r.choice([None, 0, 1, 3, 40]), r.choice([0, 1, 5])]
        r.shuffle(ends)
        options["window"] = ends
    if r.random() < 0.2:
        options["bias"] = [r.randrange(16), r.choice([0.0, 0.0, 0.3]), r.choice([0, 1, 3, 30])]
    if r.random() < 0.3:
        options["scale"] = r.choice([0.0, 1.0, -0.7, 1e-3, 30.0, 2e6, -1e20])
    if r.random() < 0.2:
        options["softcap"] = r.choice([0.01, 0.5, 5.0, 50.0, 1e4])
    if r.random() < 0.2:
        options["sink"] = r.choice(["heads", 0.0, -30.0, 4.0, 1e4])
    if r.random() < 0.2:
        floats = {"float64", "int8"}
        options["precision"] = (
            "high" if floats & set(call["dtypes"]) else r.choice(["high", "exact"])
        )
    if r.random() < 0.2:
        options["threads"] = r.choice([1, 2, 5])
    for name in ("return_weights", "return_lse", "out"):
        if r.random() < 0.4:
            options[name] = True
    if positional(call):
        choices: list[Any] = ["end", 0, 1, -2, call["S"], 1000]
        options["offset"] = r.choice([*choices, "batch"] if call["batch"] else choices)


def _draw_mask(r: random.Random, call: Call, depth: int) -> list[Any]:
    if depth < 2 and r.random() < 0.3:
        kind = r.choice(["and", "or", "not"])
        return [kind, *(_draw_mask(r, call, depth + 1) for _ in range(1 + (kind != "not")))]
    choices: list[list[Any]] = [["array", r.randrange(1 << 16), r.randrange(32)]] * 2
    choices.append(["lengths", r.randint(0, call["S"])])
    if call["form"] != "vector":
        choices += [["causal"], ["window", r.choice([None, 0, 2]), r.choice([0, 3])]]
        choices.append(["segments", r.randrange(1 << 16)])
    return r.choice(choices)


def positional(call: Call) -> bool:
    """Does the call compare positions, so that it needs an offset?"""

    def within(mask: list[Any]) -> bool:
        inner = (within(x) for x in mask[1:] if isinstance(x, list))
        return mask[0] in ("causal", "window") or any(inner)

    options = call["options"]
    return "causal" in options or "window" in options or within(options.get("mask", [""]))


def build(call: Call) -> tuple[tuple[np.ndarray, ...], dict[str, Any], np.ndarray]:
    """Query, key and value, the options of the call, and who sees whom as (…, H, L, S)."""
    rng = np.random.default_rng(call["seed"])
    batch, groups = tuple(call["batch"]), call["groups"]
    heads = groups * call["repeats"]
    rows, keys, width, columns = (call[letter] for letter in "LSDE")
    everything = (*batch, heads, rows, keys)
    # Of each array the leading axes may be left out; those of the result come from the others.
    lead = [() if shared else batch for shared in call["shared"]]
    if all(call["shared"]):
        lead[0] = batch
    if () in lead and batch and batch not in lead:
        lead[0] = batch
    tails = [(heads, rows, width), (groups, keys, width), (groups, keys, columns)]
    arrays = []
    for one, tail, kind, power in zip(lead, tails, call["dtypes"], call["powers"], strict=True):
        x = np.clip(rng.normal(size=(*one, *tail)), -5, 5)
        arrays.append((x * 4 if kind == "int8" else x * 10.0**power).astype(kind))
    options, visible = _options(call, rng, everything)
    query, key, value = arrays
    if call["nan"] and arrays[0].dtype.kind != "i":
        hit = arrays[["query", "key", "value"].index(call["nan"])]
        if hit.size:
            hit.reshape(-1)[rng.integers(hit.size)] = np.nan
    if call["poison"] and arrays[0].dtype.kind != "i":
        seen = visible.any(axis=-2).reshape(*batch, groups, call["repeats"], keys).any(axis=-2)
        for array, one in ((key, lead[1]), (value, lead[2])):
            kept = seen if one else seen.any(axis=tuple(range(len(batch))))
            array[~kept] = float(call["poison"])
    if call["form"] != "heads":
        drop = (0, 0) if call["form"] == "vector" else (0,)
        query, key, value = query[drop], key[0], value[0]
    laid = [_laid(x, how) for x, how in zip((query, key, value), call["layouts"], strict=True)]
    return tuple(laid), options, visible


def _options(
    call: Call, rng: np.random.Generator, everything: tuple[int, ...]
) -> tuple[dict[str, Any], np.ndarray]:
    options = dict(call["options"])
    batch, heads, rows, keys = everything[:-3], *everything[-3:]
    offset = options.get("offset", 0)
    if offset == "batch":
        offset = options["offset"] = rng.integers(-3, keys + 3, size=batch)
    terms = list(_terms(options.get("mask", [""])))
    position = _positions(terms, offset, batch, rows, keys)
    nested = any(term[0] in ("or", "not") and "segments" in str(term) for term in terms)
    if nested and "offset" in options:  # which could not count within these
        options["offset"] = Placed(position)
    position = np.broadcast_to(position[..., np.newaxis, :, np.newaxis], everything)
    column = np.broadcast_to(np.arange(keys), everything)
    visible = np.ones(everything, bool)
    if options.get("causal"):
        visible &= column <= position
    if "window" in options:
        left, right = options["window"] = tuple(options["window"])
        visible &= _in_window(position, column, left, right)
    if "mask" in options:
        options["mask"], seen = _mask(options["mask"], call, position, column)
        visible &= seen
    if "bias" in options:
        dims, hidden, size = options["bias"]
        shape = _some_of(everything, dims, call["form"])
        bias = np.where(rng.random(shape) < hidden, -np.inf, rng.normal(size=shape) * size)
        options["bias"] = bias.astype(np.float32)
        visible &= options["bias"] != -np.inf
    if options.get("sink") == "heads":
        options["sink"] = rng.normal(size=heads).astype(np.float32) if heads else 0.0
        if call["form"] != "heads":
            options["sink"] = float(options["sink"][0])
    return options, visible


def _positions(
    terms: list[Any], offset: Any, batch: tuple[int, ...], rows: int, keys: int
) -> np.ndarray:
    """Where the queries are, (…, L), by plain loops; `terms` are rules that a key must pass."""
    texts = [_texts(term[1], rows, keys) for term in terms if term[0] == "segments"]
    return positions_in_texts(
        offset,
        batch,
        rows,
        keys,
        text_of_query=lambda b, i: [ids[i] for ids, _ in texts],
        text_of_key=lambda b, j: [ids[j] for _, ids in texts],
        length=lambda b: min([term[1] for term in terms if term[0] == "lengths"], default=keys),
    )


def _terms(mask: list[Any]) -> Iterator[list[Any]]:
    """The rules that a key must pass."""
    if mask[0] != "and":
        yield mask
    for part in mask[1:] if mask[0] == "and" else ():
        yield from _terms(part)


def _texts(seed: int, rows: int, keys: int) -> list[list[int]]:
    """The texts of queries and of keys: three, one after the other, in any order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(3)
    return [order[np.sort(rng.integers(3, size=n))].tolist() for n in (rows, keys)]


def _in_window(position: np.ndarray, column: np.ndarray, left: Any, right: Any) -> np.ndarray:
    seen = np.ones(position.shape, bool)
    if left is not None:
        seen &= column >= position - left
    if right is not None:
        seen &= column <= position + right
    return seen


def _some_of(everything: tuple[int, ...], dims: int, form: str) -> tuple[int, ...]:
    """A shape that broadcasts to the result: an axis is 1 where a bit of `dims` is set."""
    kept = {"heads": everything, "rows": everything[-2:], "vector": everything[-1:]}[form]
    shape = tuple(1 if dims >> n & 1 else size for n, size in enumerate(reversed(kept)))[::-1]
    return shape[dims % 3 if dims % 3 < len(shape) else 0 :]


def _mask(mask: list[Any], call: Call, position: Any, column: Any) -> tuple[Any, np.ndarray]:
    """The mask to pass, and who sees whom by plain comparisons."""
    kind, everything = mask[0], position.shape
    if kind in ("and", "or", "not"):
        parts = [_mask(one, call, position, column) for one in mask[1:]]
        rules = [Boolean(m) if isinstance(m, np.ndarray) else m for m, _ in parts]
        if kind == "not":
            return ~rules[0], ~parts[0][1]
        if kind == "and":
            return rules[0] & rules[1], parts[0][1] & parts[1][1]
        return rules[0] | rules[1], parts[0][1] | parts[1][1]
    if kind == "causal":
        return Causal(), column <= position
    if kind == "window":
        return Window(mask[1], mask[2]), _in_window(position, column, mask[1], mask[2])
    if kind == "lengths":
        return Lengths(mask[1]), column < mask[1]
    rng = np.random.default_rng(mask[1])
    if kind == "segments":
        ids = [np.array(one, np.int64) for one in _texts(mask[1], *everything[-2:])]
        seen = ids[0][:, np.newaxis] == ids[1][np.newaxis, :]
        return Segments(*ids), np.broadcast_to(seen, everything)
    array = rng.random(_some_of(everything, mask[2], call["form"])) < 0.6
    return array, np.broadcast_to(array, everything)


def _laid(x: np.ndarray, how: str) -> np.ndarray:
    """The same numbers in another layout."""
    if how == "fortran":
        return np.asfortranarray(x)
    if how == "reversed" and x.ndim:
        return x[..., ::-1].copy()[..., ::-1]
    if how == "stepped":
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7, x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == "swapped" and x.dtype.name in ("float16", "float32", "float64"):
        return x.astype(x.dtype.newbyteorder())
    if how == "unaligned":
        bytes_ = np.zeros(x.nbytes + 1, np.uint8)[1:]
        bytes_[:] = np.frombuffer(x.tobytes(), np.uint8)
        return bytes_.view(x.dtype).reshape(x.shape)
    if how == "readonly":
        x = x.copy()
        x.flags.writeable = False
    return x


def check(call: Call) -> None:
    """Make the call; each number must be within its bound, and NaN where it belongs."""
    arrays, options, visible = build(call)
    dtype = np.result_type(*(x.dtype for x in arrays))
    dtype = np.dtype(np.float64) if dtype.kind in "iub" else dtype.newbyteorder("=")
    answer, bound, wrong = _expected(call, arrays, options, visible, dtype)
    out = None
    if options.pop("out", False):
        out = options["out"] = np.full(answer.output.shape, 7, dtype)
    before = [x.tobytes() for x in arrays]
    with on_path(call["path"]) as kernel:
        result = regard.attention(*arrays, kernel=kernel, **options)
    assert [x.tobytes() for x in arrays] == before, "an input was written"
    if options.get("return_weights") or options.get("return_lse"):
        given = result._asdict()
    else:
        given = {"output": result}
    assert given["output"].dtype == dtype, f"{given['output'].dtype}, not {dtype}"
    assert out is None or given["output"] is out, "the result is not out"
    for name, got in given.items():
        exact = np.where(getattr(wrong, name), np.nan, getattr(answer, name))
        assert_within(got, exact, getattr(bound, name), name)


def _expected(
    call: Call, arrays: Any, options: dict[str, Any], visible: np.ndarray, dtype: Any
) -> tuple[Answer, Any, Answer]:
    """The oracle's answer, its bounds, and where NaN must be."""
    query, key, value = (np.asarray(x).astype(np.float64) for x in arrays)
    if call["form"] == "vector":
        query = query[np.newaxis]
    if call["form"] != "heads":
        query, key, value = (x[np.newaxis] for x in (query, key, value))
    repeats = call["repeats"] or 1
    bad_query, bad_key = (np.isnan(x).any(axis=-1) for x in (query, key))
    shape = visible.shape
    by_key = np.repeat(bad_key, repeats, axis=-2)[..., : shape[-3], np.newaxis, :]
    logits = visible & (bad_query[..., np.newaxis] | by_key)
    rows = logits.any(axis=-1)
    weights = visible & rows[..., np.newaxis]
    values = np.repeat(np.isnan(value), repeats, axis=-3)[..., : shape[-3], :, :]
    output = np.einsum("...ij,...jd->...id", visible, values) | rows[..., np.newaxis]
    # Hidden poison and NaN are replaced: `wrong` has what a visible one reaches.
    query, key, value = (np.where(np.isfinite(x), x, 0.0) for x in (query, key, value))
    asked = {
        name: options[name] for name in ("scale", "softcap", "bias", "sink") if name in options
    }
    answer = attend_long(query, key, value, visible, **asked)
    exact = options.get("precision") == "exact"
    bias = None if asked.get("bias") is None else np.where(visible, asked["bias"], 0.0)
    asked["bias"] = bias
    how = _arithmetic(call, arrays, options)
    bound = error_bounds(
        query, key, value, answer, dtype=dtype, exact=exact, arithmetic=how, **asked
    )
    wrong = Answer(output, weights, rows, visible, logits)
    drop = {"heads": (...,), "rows": (0,), "vector": (0, 0)}[call["form"]]
    return (
        Answer(*(x[drop] for x in answer)),
        type(bound)(*(x[drop] for x in bound)),
        Answer(*(x[drop] for x in wrong)),
    )


def _arithmetic(call: Call, arrays: Any, options: dict[str, Any]) -> Arithmetic:
    if call["path"] == "reference":
        return WHOLE_ROWS
    pairs = call["path"] == "fused:avx512_bf16" and all(x.dtype == BFLOAT16 for x in arrays)
    # What asks for the arithmetic of float32, by docs/semantics.md.
    asked = options.get("precision", "working") != "working" or abs(options.get("scale") or 0) > 1e6
    return PAIRS if pairs and not asked else FUSED
