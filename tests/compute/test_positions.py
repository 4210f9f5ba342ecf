"""Positions: against plain loops, by slopes, with offsets and batches, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import regard
from calls import assert_same_bytes
from regard import DtypeError, OptionError, ShapeError
from regard.boundary.arrays import bfloat16
from regard.compute import native, positioned
from regard.compute.positioned import Rotation
from regard.positions import Alibi, Learned, RelativeBias, Rotary, Sinusoidal

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.normal(size=n) for n in ((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 3)))
GRAD = RNG.normal(size=(2, 4, 3, 3))
SLOPES, TABLE = RNG.uniform(0.1, 1, size=4), RNG.normal(size=(4, 8))
PLACES = {"query_positions": [4, 1, 7], "key_positions": [[0, 2, 4, 1, 9], [3, 3, 8, 1, 0.5]]}

KINDS: dict[str, dict[str, Any]] = {
    "halves": {},
    "pairs": {"interleaved": True},
    "part": {"width": 4, "base": 100.0, "attention_factor": 1.25},
    "part of pairs": {"width": 6, "interleaved": True},
    "own": {"frequencies": [1.0, 0.5, -0.25], **PLACES},
    "alibi": {"slopes": SLOPES},
    "plain alibi": {},
    "table": {"table": TABLE, "max_distance": 6},
    "table of a decoder": {"table": TABLE, "bidirectional": False, "max_distance": 10},
}


def made(kind: str, **changed: Any) -> Any:
    make = Alibi if "alibi" in kind else RelativeBias if "table" in kind else Rotary
    return make(**{**KINDS[kind], **changed})


# in plain loops -----------------------------------------------------------------------------------


def turned(row: list[float], place: float, given: dict[str, Any]) -> list[float]:
    width = given.get("width", 2 * len(given["frequencies"]) if "frequencies" in given else 8)
    result = list(row)
    for p in range(width // 2):
        slow = given.get("base", 10000.0) ** (-2 * p / width)
        angle = place * (given["frequencies"][p] if "frequencies" in given else slow)
        one, other = (2 * p, 2 * p + 1) if given.get("interleaved") else (p, p + width // 2)
        cos, sin = (f(angle) * given.get("attention_factor", 1.0) for f in (math.cos, math.sin))
        result[one] = row[one] * cos - row[other] * sin
        result[other] = row[other] * cos + row[one] * sin
    return result


def bucket(ahead: int, given: dict[str, Any]) -> int:
    both, most, count = given.get("bidirectional", True), given["max_distance"], 8
    first = 0
    if both:
        count, first = count // 2, count // 2 if ahead > 0 else 0
    distance = abs(ahead) if both else max(-ahead, 0)
    if distance < count // 2:
        return first + distance
    far = math.log(distance / (count // 2)) / math.log(most / (count // 2)) * (count - count // 2)
    return first + min(count // 2 + int(far), count - 1)


def in_loops(kind: str, offset: tuple[int, int], sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    given = KINDS[kind]
    output, weights = np.zeros((2, 4, 3, 3)), np.zeros((2, 4, 3, 5))
    for b, h, i in np.ndindex(2, 4, 3):
        query, keys = QUERY[b, h, i].tolist(), KEY[b, h // 2].tolist()
        logits = {}
        for j in [j for j in range(5) if sees[i, j]]:
            at, there = i + offset[b], j
            if kind == "own":
                at, there = PLACES["query_positions"][i], PLACES["key_positions"][b][j]
            if "alibi" not in kind and "table" not in kind:
                pair = turned(query, at, given), turned(keys[j], there, given)
            else:
                pair = query, keys[j]
            logits[j] = sum(x * y for x, y in zip(*pair, strict=True)) / math.sqrt(8)
            if "alibi" in kind:
                slope = SLOPES[h] if "slopes" in given else 2.0 ** (-2 * (h + 1))
                logits[j] -= slope * abs(at - there)
            elif "table" in kind:
                logits[j] += TABLE[h, bucket(there - at, given)]
        total = sum(math.exp(x) for x in logits.values())
        for j, x in logits.items():
            weights[b, h, i, j] = math.exp(x) / total
            output[b, h, i] += weights[b, h, i, j] * VALUE[b, h // 2, j]
    return output, weights


SEES = np.array([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]], bool)


@pytest.mark.parametrize("kernel", ["fused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_weights_are_those_of_plain_loops(kind, kernel):
    for offset in ((2, 2), (0, 3)):
        output, weights = in_loops(kind, offset, SEES)
        call = {"positions": made(kind), "offset": np.array(offset), "mask": SEES}
        result = regard.attention(
            QUERY, KEY, VALUE, **call, return_weights=True, return_lse=True, kernel=kernel
        )
        np.testing.assert_allclose(result.weights, weights, 1e-12, 1e-14)
        np.testing.assert_allclose(result.output, output, 1e-12, 1e-14)
        rows = regard.weights(QUERY, KEY, result.lse, rows=[2, 0], **call, kernel=kernel)
        np.testing.assert_allclose(rows, weights[..., [2, 0], :], 1e-12, 1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_is_the_slope_of_the_output(kind):
    call = {"offset": np.array([0, 3]), "mask": SEES, "sink": 0.3, "bias": np.ones((1, 5))}
    own = {name: KINDS[kind][name] for name in ("slopes", "table") if name in KINDS[kind]}
    inputs = {"query": QUERY, "key": KEY, "value": VALUE, "bias": call.pop("bias"), **own}

    def loss(changed: dict[str, Any]) -> float:
        given = {name: changed[name] for name in own}
        arrays = [changed[name] for name in ("query", "key", "value")]
        call["positions"] = made(kind, **given)
        return float((GRAD * regard.attention(*arrays, bias=changed["bias"], **call)).sum())

    wrt = [f"positions.{name}" if name in own else name for name in inputs]
    call["positions"] = made(kind)
    grads = regard.gradients(QUERY, KEY, VALUE, GRAD, bias=inputs["bias"], wrt=wrt, **call)
    plain = regard.gradients(QUERY, KEY, VALUE, GRAD, bias=inputs["bias"], **call)
    np.testing.assert_allclose(plain.query, grads.query, 1e-11, 1e-13)  # a kernel's, and the steps'
    np.testing.assert_allclose(plain.key, grads.key, 1e-11, 1e-13)
    for name, array in inputs.items():
        found = (grads.parameters or {}).get(f"positions.{name}")
        found = getattr(grads, name) if found is None else found
        np.testing.assert_equal(found.shape, array.shape)
        for at in list(np.ndindex(array.shape))[:: max(1, array.size // 12)]:
            sides = []
            for step in (1e-6, -1e-6):
                moved = np.array(array)
                moved[at] += step
                sides.append(loss({**inputs, name: moved}))
            slope = (sides[0] - sides[1]) / 2e-6
            np.testing.assert_allclose(found[at], slope, 1e-6, 1e-8, err_msg=f"{name}{at}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_explanation_has_the_same_numbers_and_recomputes_each(kind):
    positions = made(kind)
    if kind in ("alibi", "table", "table of a decoder"):
        name = "slopes" if kind == "alibi" else "table"
        positions = made(kind, **{name: KINDS[kind][name][:1]})
    if kind == "own":
        positions = made(kind, key_positions=PLACES["key_positions"][0])
    one = QUERY[0, 0], KEY[0, 0], VALUE[0, 0]
    call = {"positions": positions, "offset": 2, "mask": SEES}
    explanation = regard.explain(*one, **call, grad_output=GRAD[0, 0])
    np.testing.assert_allclose(
        explanation.steps["output"].value, regard.attention(*one, **call), 1e-13, 1e-15
    )
    for name in explanation.steps:
        axes = explanation.steps[name].value.shape
        for place in {(0,) * len(axes), tuple(size - 1 for size in axes)}:
            cell = explanation.why(name, *place)
            np.testing.assert_allclose(cell.recompute(), cell.value, 1e-13, 1e-15, err_msg=name)
            line = eval(cell.numpy(), {"np": np})
            np.testing.assert_allclose(line, cell.value, 1e-13, 1e-15, err_msg=name)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_each_number_of_a_turned_row_is_rounded_once(dtype, interleaved):
    """One query, one key, no values of the other: the score is a turned number itself."""
    query, key = RNG.normal(size=(2, 3, 8)).astype(dtype)
    rotary = Rotary(interleaved=interleaved, width=6)
    places = np.arange(3) + 5
    given = {"width": 6, "interleaved": interleaved}
    exact = [
        [turned(row, place, given) for row, place in zip(rows.tolist(), at, strict=True)]
        for rows, at in ((query.astype(float), places), (key.astype(float), range(3)))
    ]
    pair = [np.array(rows).astype(dtype) for rows in exact]
    call = {"return_weights": True, "return_lse": True}
    found = regard.attention(query, key, key, positions=rotary, offset=5, **call)
    wanted = regard.attention(*pair, key, **call)
    if dtype == "float64":
        np.testing.assert_allclose(found.output, wanted.output, 1e-14)
    else:
        assert_same_bytes(found.output, wanted.output)
        assert_same_bytes(found.lse, wanted.lse)


def turned_rows(rows, rotary, places, *, back=False, dtype=None, threads=None):
    rotation, arrays = Rotation(rotary, {"key": places}, rows.shape[-1]), {"key": rows}
    if not back:
        return rotation.turned(arrays, threads)["key"]
    return rotation.back(arrays, {} if dtype is None else {"key": dtype}, threads)["key"]


def in_numpy(*given, **named):
    """What `turned_rows` makes without native code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "BUILT", False)
        return turned_rows(*given, **named)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "float32",
        "float64",
        pytest.param("bfloat16", marks=pytest.mark.needs("ml_dtypes")),
    ],
)
def test_every_target_and_numpy_turn_rows_to_the_same_bytes(dtype, interleaved, monkeypatch):
    rng = np.random.default_rng(10)
    dtype = bfloat16("rows") if dtype == "bfloat16" else np.dtype(dtype)
    sizes = np.exp2(rng.uniform(-140, 130, size=(2, 3, 40, 1)))  # subnormal and infinite ones too
    with np.errstate(over="ignore"):
        rows = (rng.normal(size=(2, 3, 40, 38)) * np.where(sizes > 1e3, sizes, 1)).astype(dtype)
        rows[1] = (rng.normal(size=(3, 40, 38)) * sizes[1]).astype(dtype)
    rows[0, 0, :3, :5] = [[0.0, -0.0, np.inf, np.nan, -np.inf]] * 3
    rotary = Rotary(100.0, 34, interleaved, attention_factor=1.5)
    targets = [name for name, runs in native.targets().items() if runs]
    for places in (range(40), np.stack([np.arange(40), np.arange(40)[::-1] / 2])):
        for array in (rows, rows[..., ::-1], rows.swapaxes(1, 2).copy().swapaxes(1, 2)):
            for back in (False, True):
                plain = in_numpy(array.copy(), rotary, places, back=back)
                for target in targets:
                    monkeypatch.setattr(native, "target", target)
                    own = array.copy() if back else array  # turned back in place
                    made = turned_rows(own, rotary, places, back=back)
                    assert_same_bytes(made, plain, target)
    if dtype.itemsize == 2:  # gradients in float32 are rounded there, and then to the half type
        wide = rows.astype(np.float32) * np.float32(1.0001)
        own = turned_rows(wide.copy(), rotary, range(40), back=True)
        with np.errstate(all="ignore"):
            wanted = own.astype(dtype)
        for target in targets:
            monkeypatch.setattr(native, "target", target)
            made = turned_rows(wide, rotary, range(40), back=True, dtype=dtype)
            assert_same_bytes(made, wanted, target)
        assert_same_bytes(in_numpy(wide, rotary, range(40), back=True, dtype=dtype), wanted)


@pytest.mark.parametrize(
    ("dtype", "step"),
    [
        ("float16", 2.0**-10),
        pytest.param("bfloat16", 2.0**-7, marks=pytest.mark.needs("ml_dtypes")),
    ],
)
def test_numbers_beside_the_middle_of_two_are_rounded_once(dtype, step, monkeypatch):
    ones = np.ones((1, 2, 80)).astype(bfloat16("rows") if dtype == "bfloat16" else dtype)
    cosines = np.ones((2, 40))
    cosines[:, ::3] += step / 2 + np.array([[2.0**-40], [-(2.0**-40)]])  # float32 has the middle
    wanted = np.ones_like(ones)
    wanted[0, 0, :40:3] = wanted[0, 0, 40::3] = 1 + step
    for target in [name for name, runs in native.targets().items() if runs]:
        monkeypatch.setattr(native, "target", target)
        made = np.empty_like(ones)
        positioned.turn_rows([(ones, made, cosines, np.zeros((2, 40)))], interleaved=False)
        assert_same_bytes(made, wanted, target)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_turned_to_the_same_bytes_by_any_number_of_threads(interleaved):
    rng = np.random.default_rng(10)
    rows = rng.normal(size=(2, 8, 450, 36)).astype(np.float32)
    rotary, places = Rotary(interleaved=interleaved), range(3, 453)
    wanted = turned_rows(rows, rotary, places, threads=1)
    for threads in (2, 5):
        assert_same_bytes(turned_rows(rows, rotary, places, threads=threads), wanted)
    parts = [turned_rows(rows[:, :, i : i + 30], rotary, range(3 + i, 33 + i))
             for i in range(0, 450, 30)]  # fmt: skip
    assert_same_bytes(np.concatenate(parts, axis=2), wanted)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", pytest.param("bfloat16", marks=pytest.mark.needs("ml_dtypes"))]
)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one text", "a batch with shared keys"])
@pytest.mark.parametrize("rows", [2, 70, 300])
def test_rows_turned_during_a_call_give_the_bytes_of_turned_rows(lead, rows, dtype, interleaved):
    """One block and several, with chunks of keys split among threads, and retried rows."""
    rng = np.random.default_rng(10)
    dtype = bfloat16("rows") if dtype == "bfloat16" else np.dtype(dtype)
    query = rng.normal(size=(*lead, 4, rows, 36)).astype(dtype)
    key, value = rng.normal(size=(2, 2, 600, 36)).astype(dtype)
    query[..., 1, rows - 1, 3] = 3e38 if dtype == np.float32 else np.nan
    rotary = Rotary(interleaved=interleaved, width=34)
    offset = np.array([5, 400, 7])[:, None][: len(lead) * 3, 0] if lead else 300
    call = {"causal": True, "offset": offset, "return_lse": True}
    turned = [turned_rows(query[i] if lead else query, rotary, range(at, at + rows))
              for i, at in enumerate(np.ravel(offset))]  # fmt: skip
    turned = np.stack(turned) if lead else turned[0]
    keys = turned_rows(key, rotary, range(600))
    for threads in (1, 3):
        wanted = regard.attention(turned, keys, value, **call, threads=threads)
        found = regard.attention(query, key, value, **call, threads=threads, positions=rotary)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same_bytes(ours, theirs)


def test_keys_that_a_batch_shares_are_turned_to_the_places_of_each_element():
    rng = np.random.default_rng(10)
    query = rng.normal(size=(2, 2, 30, 16)).astype(np.float32)
    key, value = rng.normal(size=(2, 2, 300, 16)).astype(np.float32)
    places = np.stack([np.arange(300), np.arange(300)[::-1] * 2])
    found = regard.attention(query, key, value, positions=Rotary(key_positions=places), offset=0)
    for one, own in enumerate(places):
        rotary = Rotary(key_positions=own)
        wanted = regard.attention(query[one], key, value, positions=rotary, offset=0)
        assert_same_bytes(found[one], wanted)


def test_scores_of_turned_rows_depend_on_how_far_apart_they_are():
    x = np.broadcast_to(RNG.normal(size=8), (6, 8))
    scores = regard.explain(x, x, x, positions=Rotary()).steps["scores"].value
    for k in range(-5, 6):
        np.testing.assert_allclose(np.diagonal(scores, k), scores.diagonal(k)[0], 1e-13)


def test_a_bias_by_distance_needs_no_matrix():
    from regard.compute.positioned import lowered
    from regard.compute.request import make_request

    x = np.zeros((2, 1000, 4), np.float32)
    request = make_request(x, x, x, positions=Alibi([0.5, 2.0]), causal=True)
    bias = lowered(request).options.bias
    np.testing.assert_equal((bias.shape, bias.strides), ((2, 1000, 1000), (4 * 1999, -4, 4)))
    np.testing.assert_equal(bias[:, 7, 3], [-2.0, -8.0])


def test_slopes_of_heads_that_are_no_power_of_two_are_those_of_twice_as_many_between():
    np.testing.assert_allclose(Alibi().slopes_of(4), [2**-2, 2**-4, 2**-6, 2**-8])
    np.testing.assert_allclose(Alibi().slopes_of(6), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_what_does_not_fit_is_refused_with_what_would():
    x = np.ones((2, 3, 5))
    cases = [
        (Rotary(), ShapeError, "is 5, but features are turned in pairs; pass an even"),
        (Rotary(width=6), ShapeError, "positions turn 6 features but queries and keys are 5 wide"),
        (Rotary(width=4, key_positions=[1, 2]), ShapeError, "2 numbers in a row but there are 3"),
        (Rotary(width=4, query_positions=np.ones((2, 3))), ShapeError, "does not broadcast"),
        (Alibi([1, 2, 3]), ShapeError, "3 numbers but there are 2 query heads"),
        (
            RelativeBias(np.ones((8, 2)), bidirectional=False),
            ShapeError,
            "8 rows but there are 2 query heads.*table.T",
        ),
        (Rotary, DtypeError, "the class Rotary, which needs brackets"),
        ("rotary", DtypeError, r"pass regard.positions.Rotary\(…\)"),
        ("rope", OptionError, 'it must be "none" or one of regard.positions.Rotary'),
    ]
    for positions, kind, says in cases:
        with pytest.raises(kind, match=says):
            regard.attention(x, x, x, positions=positions)
    with pytest.raises(OptionError, match="positions=Rotary compares positions, but there are 2"):
        regard.attention(x[:, :2], x, x, positions=Rotary(width=4))
    with pytest.raises(OptionError, match=r"lse save work that the gradient of positions.slopes"):
        regard.gradients(x, x, x, x, output=x, lse=x[..., 0], positions=Alibi(1.0),
                         wrt="positions.slopes")  # fmt: skip


def test_parameters_that_make_no_sense_are_refused():
    llama = {"rope_type": "llama3", "factor": 8.0}
    cases = [
        ({"width": 3}, OptionError, "width is 3, but features are turned in pairs"),
        ({"base": 0}, OptionError, "base is 0.0; it must be above 0"),
        ({"frequencies": [1.0], "base": 5.0}, OptionError, "frequencies is given with base"),
        ({"frequencies": [1.0], "width": 4}, ShapeError, "1 numbers but width is 4"),
        ({"frequencies": [np.nan]}, OptionError, "frequencies has a number that is not finite"),
        ({"query_positions": 3}, ShapeError, "query_positions is one number"),
        ({"scaling": "linear"}, DtypeError, "must be a mapping with rope_type"),
        ({"scaling": {"rope_type": "fast"}}, OptionError, "must be one of default, linear"),
        ({"scaling": {"rope_type": "linear"}}, OptionError, 'type "linear" needs factor'),
        ({"scaling": llama}, OptionError, 'type "llama3" needs low_freq_factor'),
        ({"scaling": {"type": "linear", "factor": 0}}, OptionError, "must be positive and finite"),
        ({"scaling": {"rope_type": "ntk", "factor": 2.0, "bate": 1}}, OptionError, "not take"),
        ({"scaling": {"rope_theta": 5.0}, "base": 7.0}, OptionError, "they are the same"),
    ]
    for given, kind, says in cases:
        with pytest.raises(kind, match=says):
            Rotary(**given)
    with pytest.raises(ShapeError, match="3 columns, one for each bucket; there must be an even"):
        RelativeBias(np.ones((1, 3)))
    with pytest.raises(OptionError, match="max_distance is 2; it must be 3 or more"):
        RelativeBias(np.ones((1, 8)), max_distance=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own"])
def test_a_cache_with_positions_has_the_bytes_of_one_call_also_after_its_file(kind, tmp_path):
    text = [RNG.normal(size=(4 if n == "query" else 2, 9, 8)).astype(np.float32)
            for n in ("query", "key", "value")]  # fmt: skip
    positions, parts = made(kind), []
    cache = regard.KVCache(positions=positions, window=(6, 0))
    for start, stop in ((0, 1), (1, 2), (2, 6), (6, 7), (7, 9)):
        query, key, value = (one[:, start:stop] for one in text)
        cache.append(key, value)
        parts.append(cache.attend(query))
        if stop == 6:
            cache.save(tmp_path / "cache.npz")
            cache = regard.KVCache.load(tmp_path / "cache.npz")
    whole = regard.attention(*text, positions=positions, window=(6, 0))
    assert_same_bytes(np.concatenate(parts, axis=1), whole)
    np.testing.assert_equal(cache._positions, positions)


def test_a_cache_of_texts_of_several_lengths_turns_each_key_to_its_own_place():
    query, key, value = RNG.normal(size=(3, 2, 1, 6, 8))
    cache = regard.KVCache(positions=Rotary())
    cache.append(key[:, :, :4], value[:, :, :4], lengths=[4, 2])
    cache.append(key[:, :, 4:5], value[:, :, 4:5])
    found = cache.attend(query[:, :, 4:5])
    for one, tokens in enumerate(([0, 1, 2, 3, 4], [0, 1, 4])):
        rows = (key[one][:, tokens], value[one][:, tokens])
        call = {"positions": Rotary(), "offset": "end", "causal": True}
        np.testing.assert_allclose(found[one], regard.attention(query[one][:, 4:5], *rows, **call))


def test_a_cache_refuses_positions_that_a_key_cannot_keep():
    longer = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
    for given, says in (
        (Rotary(scaling=longer), "turns each key once; pass the frequencies= of one length"),
        (Rotary(key_positions=[1]), "a cache counts its tokens; leave them out"),
    ):
        with pytest.raises(OptionError, match=says):
            regard.KVCache(positions=given)


def test_two_objects_with_the_same_parameters_are_equal():
    np.testing.assert_equal(Rotary(scaling={"type": "linear", "factor": 2.0}),
                            Rotary(scaling={"rope_type": "linear", "factor": 2}))  # fmt: skip
    assert Rotary() != Rotary(base=5.0)
    np.testing.assert_equal(repr(Rotary(width=4)), "Rotary(width=4)")


@pytest.mark.parametrize(
    "positions",
    [Rotary(), Alibi(SLOPES[:2]), RelativeBias(TABLE[:2], max_distance=6)],
    ids=lambda one: one.kind,
)
def test_a_layer_takes_positions_and_so_do_its_gradients(positions):
    rng = np.random.default_rng(5)
    x, grad, *weights = (
        rng.normal(size=(5, 4)),
        rng.normal(size=(5, 8)),
        *rng.normal(size=(3, 4, 8)),
    )
    layer = regard.MultiHeadAttention(*weights, heads=2)
    call = {"causal": True, "positions": positions}
    packed = [(x @ one).reshape(5, 2, 4).swapaxes(0, 1) for one in weights]
    heads = regard.attention(*packed, **call)
    np.testing.assert_allclose(layer(x, **call), heads.swapaxes(0, 1).reshape(5, 8), 1e-12)
    np.testing.assert_allclose(layer.explain(x, **call).output, layer(x, **call), 1e-12)
    way = 1e-6 * rng.normal(size=x.shape)
    slope = ((layer(x + way, **call) - layer(x - way, **call)) * grad).sum() / 2
    found = layer.gradients(x, grad, **call)
    np.testing.assert_allclose((found[0] * way).sum(), slope, 1e-6)
    for name, own in positions.parameters().items():
        way = 1e-6 * rng.normal(size=own.shape)
        sides = [
            layer(x, causal=True, positions=type(positions)(**{**vars(positions), name: moved}))
            for moved in (own + way, own - way)
        ]
        found = layer.gradients(x, grad, wrt=["x", f"positions.{name}"], **call).parameters
        slope = ((sides[0] - sides[1]) * grad).sum() / 2
        np.testing.assert_allclose((found[f"positions.{name}"] * way).sum(), slope, 1e-6)


WIDE = 5  # an odd width: the last wave is a sine
VECTORS = np.random.default_rng(9).normal(size=(4, WIDE))


@pytest.mark.parametrize("positions", [Learned(VECTORS), Sinusoidal(50.0)], ids=lambda p: p.kind)
def test_a_vector_for_each_place_is_added_to_embeddings(positions, tmp_path):
    rng = np.random.default_rng(8)
    x, grad, W_o = (rng.normal(size=size) for size in ((4, WIDE), (4, 3), (6, 3)))
    weights = {name: rng.normal(size=(WIDE, 6)) for name in ("W_q", "W_k", "W_v")} | {"W_o": W_o}
    added = VECTORS
    if isinstance(positions, Sinusoidal):
        waves = [(math.sin, math.cos)[m % 2] for m in range(WIDE)]
        angles = [[i * 50.0 ** (-(m // 2 * 2) / WIDE) for m in range(WIDE)] for i in range(4)]
        added = np.array([[f(a) for f, a in zip(waves, row, strict=True)] for row in angles])
    layer, call = regard.MultiHeadAttention(**weights, heads=2), {"causal": True}
    wanted = layer(x + added, **call)
    np.testing.assert_allclose(layer(x, positions=positions, **call), wanted, 1e-13, 1e-14)
    narrow = regard.MultiHeadAttention(**{n: w.astype("f") for n, w in weights.items()}, heads=2)
    assert narrow(x.astype("f"), positions=positions).dtype == np.float32

    names, own = ["x", "W_k"], [f"positions.{name}" for name in positions.parameters()]
    theirs = layer.gradients(x + added, grad, wrt=names, **call)
    batch = np.stack([x, x])
    ours = layer.gradients(batch, np.stack([grad, grad]), wrt=[*names, *own], positions=positions,
                           **call)  # fmt: skip
    np.testing.assert_allclose(ours.x, [theirs.x] * 2, 1e-12, 1e-14)
    np.testing.assert_allclose(ours.W_k, 2 * theirs.W_k, 1e-12, 1e-14)
    if own:
        np.testing.assert_allclose(ours.parameters[own[0]], 2 * theirs.x, 1e-12, 1e-14)

    problem = regard.Problem(embeddings=x, **weights, heads=2, causal=True, positions=positions)
    regard.save_problem(problem, tmp_path / "problem.toml")
    again = regard.load_problem(tmp_path / "problem.toml")
    np.testing.assert_equal(again.positions, positions)
    explanation = regard.explain(again, grad_output=grad)
    np.testing.assert_allclose(explanation.steps["projected_output"].value, wanted, 1e-13, 1e-14)
    np.testing.assert_allclose(explanation.steps["d_embeddings"].value, theirs.x, 1e-12, 1e-14)
    for name, step in explanation.steps.items():
        of_head = {"head": 1} if {"H", "G"} & {*step.axes} else {}
        sizes = step.value.shape[len(of_head) :]
        cell = explanation.why(name, *(size - 1 for size in sizes), **of_head)
        np.testing.assert_allclose(cell.recompute(), cell.value, 1e-13, 1e-15, err_msg=name)
        line = eval(cell.numpy(), {"np": np})
        np.testing.assert_allclose(line, cell.value, 1e-13, 1e-15, err_msg=name)


def test_a_vector_for_each_place_is_refused_where_there_are_no_embeddings_or_others():
    x = np.ones((3, 4))
    says = "positions=Sinusoidal adds vectors to embeddings, which are not here; pass it to Multi"
    for refused in (
        lambda: regard.attention(x, x, x, positions=Sinusoidal()),
        lambda: regard.KVCache(positions=Sinusoidal()),
        lambda: regard.Problem(queries=x, keys=x, values=x, positions=Sinusoidal()),
    ):
        with pytest.raises((OptionError, regard.ProblemError), match=says):
            refused()
    layer = regard.MultiHeadAttention(*np.ones((3, 4, 4)))
    with pytest.raises(ShapeError, match=r"\(9, 4\) but embeddings have \(3.*pass vectors\[:3"):
        layer(x, positions=Learned(np.ones((9, 4))))
    weights = {name: np.ones((4, 4)) for name in ("W_q", "W_k", "W_v")}
    with pytest.raises(regard.ProblemError, match=r"vectors has shape \(3, 5\) but"):
        regard.Problem(embeddings=x, **weights, positions=Learned(np.ones((3, 5))))
    with pytest.raises(OptionError, match=r"base is -1\.0; it must be above 0"):
        Sinusoidal(-1)


@pytest.mark.parametrize("own", [(1, 5, 8), (2, 1, 8), (2, 5, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("positions", [Rotary(), Rotary(interleaved=True, width=4)], ids=repr)
def test_broadcast_arrays_are_turned_as_copies_of_them(positions, own):
    rng = np.random.default_rng(6)
    wide = np.broadcast_to(rng.normal(size=own), (2, 5, 8))
    value, grad = rng.normal(size=(2, 2, 5, 8))
    call = {"positions": positions, "causal": True}
    whole = wide.copy()
    assert_same_bytes(
        regard.attention(wide, wide, value, **call), regard.attention(whole, whole, value, **call)
    )
    ours, theirs = (regard.gradients(x, x, value, grad, **call) for x in (wide, whole))
    assert_same_bytes(ours.query, theirs.query)
    assert_same_bytes(ours.key, theirs.key)
