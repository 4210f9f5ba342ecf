"""The reference kernel: evaluates the textbook's steps, forward and backward, in NumPy.

Owns what happens where numbers leave the range of the working dtype. Must not know any formula:
the textbook has those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import round_once
from regard.boundary.arrays import Array
from regard.compute.evaluation import Run
from regard.compute.extended_range import HeadInFloat64, extended_range_rows
from regard.compute.gradients import GradientRequest, row_products
from regard.compute.request import Request, Result
from regard.textbook.gradients import backward

if TYPE_CHECKING:
    from numpy.typing import NDArray


name = "reference"

_FLOAT64 = np.dtype(np.float64)


def status() -> str:
    """Always usable: it needs nothing but NumPy."""
    return "usable"


def knows(part: str) -> bool:
    """True: the textbook declares every score and normalisation."""
    return True


def supports(request: Request) -> str | None:
    """None: the textbook answers every request."""
    return None


def run(request: Request) -> Result:
    """The answer in the working dtype, or in float64 rounded once for precision="exact".

    Scores and normalisations other than the plain ones are always computed in float64.
    """
    request = request.with_floats()
    working = Run.of_request(request, _FLOAT64 if request.parts else request.accumulator)
    output = np.empty((*request.shape[:-1], request.value.shape[-1]), request.output_dtype)
    weights = np.empty(request.shape, request.dtype) if request.options.return_weights else None
    lse = np.empty(request.shape[:-1], request.lse_dtype) if request.options.return_lse else None
    results = {"output": output, "weights": weights, "lse": lse}

    head_of = lru_cache(maxsize=1)(partial(HeadInFloat64, request))
    for batch in np.ndindex(*request.lead):
        for head in range(request.shape[-3]):
            for rows in working.row_blocks():
                blocks = {
                    step: working.block(step, batch, head, rows)
                    for step, array in results.items()
                    if array is not None
                }
                if not request.parts:
                    _redo(working, request, (batch, head, rows), head_of, blocks)
                for step, block in blocks.items():
                    array = results[step]
                    assert array is not None
                    with np.errstate(all="ignore"):
                        array[(*batch, head)][rows.start : rows.stop] = round_once(
                            block, array.dtype
                        )
                working.forget()
    if request.options.out is not None:
        request.options.out[...] = request.natural(output)
    return Result(
        output=request.options.out if request.options.out is not None else request.natural(output),
        weights=None if weights is None else request.natural(weights),
        lse=None if lse is None else request.natural(lse),
    )


def _redo(
    working: Run,
    request: Request,
    at: tuple[tuple[int, ...], int, range],
    head_of: Callable[[tuple[int, ...], int], HeadInFloat64],
    blocks: dict[str, Array],
) -> None:
    """Compute again what left the range of the working dtype, and what NaN or infinity reaches.

    Where a number that the softmax sees did, the row is redone; else only the cells of the output
    that are not finite.
    """
    batch, head, rows = at
    broken, seen = _broken_rows(working, request, batch, head, rows)
    redone = broken | ~np.isfinite(blocks["output"]).all(axis=-1)
    if not redone.any():
        return
    own = head_of(batch, head)
    fresh = extended_range_rows(own, np.asarray(rows)[redone], seen[redone])
    for step, block in blocks.items():
        old = block[redone]
        again = broken[redone].reshape((-1,) + (1,) * (block.ndim - 1))
        if step == "output":
            again = again | ~np.isfinite(old)
        blocks[step] = block.astype(np.float64)
        blocks[step][redone] = np.where(again, fresh[step], old)


def _broken_rows(
    working: Run, request: Request, batch: tuple[int, ...], head: int, rows: range
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """In which rows a number that the softmax sees left the range of the dtype; what is seen."""
    finite = np.isfinite(working.block("scaled", batch, head, rows))
    if request.options.bias is not None:
        finite &= np.isfinite(working.block("biased", batch, head, rows))
    seen: NDArray[np.bool_] = np.ones(finite.shape, np.bool_)
    if request.rules is not None:
        seen = working.block("visible", batch, head, rows)
    broken = np.asarray((seen & ~finite).any(axis=-1))
    broken |= ~np.isfinite(working.block("weights", batch, head, rows)).all(axis=-1)
    return broken, seen


# --- gradients -----------------------------------------------------------------------------------

# The steps whose gradients a call may ask for, and the backward step of one head.
_STEPS = {
    "query": ("queries", "d_queries"),
    "key": ("keys", "d_keys_by_head"),
    "value": ("values", "d_values_by_head"),
    "bias": ("bias", "d_bias"),
    "sink": ("sink", "d_sink"),
    "scale": ("scale", "d_scale_by_head"),
}


def gradients(call: GradientRequest) -> dict[str, Array]:
    """The gradients by the textbook's backward steps, head by head, in ascending order.

    A head whose numbers leave the range of the working dtype is computed again in float64.
    """
    request = call.request
    if request.parts or request.options.positions is not None:
        return _of_steps(call)
    shapes = {name: () if name == "scale" else call.whole(name) for name in call.wrt}
    made = {name: np.zeros(shape) for name, shape in shapes.items()}
    deviations = None if call.output is None else np.zeros((*request.shape[:-1], 2))
    run_of = lru_cache(maxsize=3)(partial(_backward_run, call))
    for batch in np.ndindex(*request.lead):
        for head in range(request.shape[-3]):
            found, whole = _of_head(
                run_of(request.accumulator), call, batch, head, deviations=deviations
            )
            if not (whole and _is_finite(found)):
                found = _of_head_again(call, run_of, batch, head)
            for name, one in found.items():
                with np.errstate(all="ignore"):
                    made[name][_place(call, name, batch, head)] += one
    if deviations is not None:
        with np.errstate(all="ignore"):
            squares = {
                "query": row_products(request.query, request.query),
                "grad_output": row_products(call.grad_output, call.grad_output),
                "key": row_products(request.key, request.key).max(axis=-1, initial=0),
                "value": row_products(request.value, request.value).max(axis=-1, initial=0),
            }
        call.check_given(deviations, squares)
    for name in call.wrt & {"query", "key", "value"}:
        with np.errstate(all="ignore"):
            once = round_once(made[name], call.dtype(name))
            made[name] = once.astype(call.dtype(name), copy=False)
    return made


def _of_steps(call: GradientRequest) -> dict[str, Array]:
    """The gradients by all declared steps of a call, in float64."""
    call = _without_unseen(call)
    run = _backward_run(call, _FLOAT64)
    made = {}
    for name in call.wrt:
        step = _STEPS[name][0] if name in _STEPS else name.replace(".", "_")
        made[name] = run.value(f"d_{step}")
        if name in ("query", "key", "value"):
            with np.errstate(all="ignore"):
                once = round_once(made[name], call.dtype(name))
                made[name] = once.astype(call.dtype(name), copy=False)
    if "scale" in made:
        made["scale"] = made["scale"].sum()  # over the leading axes
    return made


def _without_unseen(call: GradientRequest) -> GradientRequest:
    """The call with zeros for NaN and infinity in what takes part in nothing.

    A gradient of 0 goes back through the slopes of lengths and features, which are NaN there.
    """
    request = call.request
    names = ("query", "key", "value")
    if request.rules is None or all(np.isfinite(getattr(request, one)).all() for one in names):
        return call
    run = Run.of_request(request, _FLOAT64)
    rows, keys = (np.zeros(x.shape[:-1], np.bool_) for x in (request.query, request.key))
    for batch in np.ndindex(*request.lead):
        for head in range(request.shape[-3]):
            group = (*batch, head // (request.shape[-3] // request.key.shape[-3]))
            for block in run.row_blocks():
                seen = run.block("visible", batch, head, block)
                rows[(*batch, head)][block.start : block.stop] = seen.any(axis=-1)
                keys[group] |= seen.any(axis=0)
                run.forget()

    def shown(array: Array, seen: NDArray[np.bool_]) -> Array:
        return np.where(seen[..., None], array, np.zeros((), array.dtype))

    query, key, value = request.query, request.key, request.value
    arrays = shown(query, rows), shown(key, keys), shown(value, keys)
    request = replace(request, query=arrays[0], key=arrays[1], value=arrays[2])
    return replace(call, request=request)


def _is_finite(found: dict[str, Array]) -> bool:
    return all(bool(np.isfinite(one).all()) for one in found.values())


def _place(call: GradientRequest, name: str, batch: tuple[int, ...], head: int) -> tuple[int, ...]:
    """Where in a gradient a head's part is."""
    request = call.request
    match name:
        case "scale":
            return ()
        case "key" | "value":
            return (*batch, head // (request.shape[-3] // request.key.shape[-3]))
        case "bias":
            sizes = call.whole("bias")[:-2]
            return tuple(n if s > 1 else 0 for n, s in zip((*batch, head), sizes, strict=True))
    return (*batch, head)


def _backward_run(call: GradientRequest, dtype: np.dtype[Any], power: int = 0) -> Run:
    """A run of the forward and backward steps, with the given gradients divided by 2^power."""
    forward = Run.of_request(call.request, dtype)
    arrives: dict[str, Array] = {"d_output": call.grad_output}
    if call.grad_lse is not None:
        arrives["d_lse"] = call.grad_lse
    if power:
        arrives = {name: np.ldexp(x.astype(np.float64), -power) for name, x in arrives.items()}
    steps = backward(
        tuple(forward.steps.values()),
        {_STEPS[name][0] if name in _STEPS else name.replace(".", "_") for name in call.wrt},
        {name.removeprefix("d_") for name in arrives},
    )
    return forward.continued(steps, arrives)


def _of_head_again(
    call: GradientRequest, run_of: Callable[..., Run], batch: tuple[int, ...], head: int
) -> dict[str, Array]:
    """What one head adds, in float64, with logits of any size.

    Gradients are linear in those of the output and of lse. Where products of finite numbers
    overflow on the way, they are computed from a fraction of these, and multiplied back.
    """
    wide, own = np.dtype(np.float64), HeadInFloat64(call.request, batch, head)
    found, _ = _of_head(run_of(wide), call, batch, head, own=own)
    power = _power(call)
    if power and not _is_finite(found):
        again, _ = _of_head(run_of(wide, power), call, batch, head, own=own)
        with np.errstate(over="ignore"):
            again = {name: np.ldexp(one, power) for name, one in again.items()}
        found = {name: np.where(np.isfinite(x), x, again[name]) for name, x in found.items()}
    return found


def _power(call: GradientRequest) -> int:
    """The power of two by which to divide, so that no product of finite numbers overflows."""
    request = call.request

    def size(x: Any) -> int:
        x = np.abs(np.asarray(x, np.float64))
        return int(np.frexp(np.where(np.isfinite(x), x, 0).max(initial=0))[1])

    *_, rows, keys = (count.bit_length() for count in request.shape)
    width, value_width = (x.shape[-1].bit_length() for x in (request.query, request.value))
    query, key, value = (size(x) for x in (request.query, request.key, request.value))
    grad, grad_lse = size(call.grad_output), 0 if call.grad_lse is None else size(call.grad_lse)
    logits = max(grad + max(value, 0) + value_width, grad_lse) + 2
    scores = logits + max(0, size(1 if request.options.scale is None else request.options.scale))
    largest = [scores, grad + rows, scores + query + rows, scores + key + keys]
    if "scale" in call.wrt:
        largest.append(logits + query + key + width + rows + keys)
    return int(max(0, *largest, 1000)) - 1000


def _of_head(
    run: Run,
    call: GradientRequest,
    batch: tuple[int, ...],
    head: int,
    *,
    deviations: Array | None = None,
    own: HeadInFloat64 | None = None,
) -> tuple[dict[str, Array], bool]:
    """What one head adds to each gradient, and whether all its visible logits are finite.

    With `own`, rows whose logits are not get the weights that numbers of any size give.
    """
    totals = {step.name: np.zeros(()) for step in run.steps.values() if step.running == "i"}
    found: dict[str, Array] = {}
    if "query" in call.wrt:
        found["query"] = np.zeros(call.request.query.shape[-2:])
    if "bias" in call.wrt:
        found["bias"] = np.zeros(call.whole("bias")[-2:])
    whole = True
    for rows in run.row_blocks():
        broken, seen = _broken_rows(run, call.request, batch, head, rows)
        whole = whole and not broken.any()
        if own is not None:
            _extend(run, own, rows, broken, seen)
        here = slice(rows.start, rows.stop)
        with np.errstate(all="ignore"):
            for name in totals:
                totals[name] = totals[name] + run.part(run.steps[name], batch, head, rows)
            if "query" in found:
                found["query"][here] = run.block("d_queries", batch, head, rows)
            if "bias" in found:
                _add_rows(found["bias"], run.block("d_bias", batch, head, rows), here)
        if deviations is not None:
            deviations[(*batch, head)][here] = _deviations(run, call, batch, head, rows)
        run.forget()
    for name, total in totals.items():
        run.keep(name, batch, head, None, total)
    for name in call.wrt - found.keys():
        found[name] = np.asarray(run.block(_STEPS[name][1], batch, head, None), np.float64)
    run.forget()
    return found, whole


def _add_rows(bias: Array, block: Array, here: slice) -> None:
    """Add some rows to the gradient of a bias, summed over the axes that it is broadcast along."""
    block = block.astype(np.float64)
    if bias.shape[1] == 1:
        block = block.sum(axis=1, keepdims=True)
    if bias.shape[0] == 1:
        bias += block.sum(axis=0, keepdims=True)
    else:
        bias[here] += block


def _extend(
    run: Run,
    own: HeadInFloat64,
    rows: range,
    broken: NDArray[np.bool_],
    seen: NDArray[np.bool_],
) -> None:
    """Give rows that left the range of float64 the weights that logits of any size have."""
    names = [x for x in ("scores", "weights", "output", "sink_weights") if x in run.steps]
    blocks = {name: np.array(run.block(name, own.batch, own.head, rows)) for name in names}
    broken = broken | ~np.isfinite(blocks["output"]).all(axis=-1)
    if not broken.any():
        return
    chosen = np.asarray(rows)[broken]
    fresh = extended_range_rows(own, chosen, seen[broken])
    with np.errstate(all="ignore"):
        fresh["scores"] = own.scores(chosen)
    if own.request.options.sink is not None:
        sink = float(own.request.options.sink[(*own.batch, own.head)])
        fresh["sink_weights"] = np.exp(sink - fresh["lse"])
    run.forget()
    for name, block in blocks.items():
        block[broken] = fresh[name]
        run.keep(name, own.batch, own.head, rows, block)


def _deviations(
    run: Run, call: GradientRequest, batch: tuple[int, ...], head: int, rows: range
) -> Array:
    """What `check_given` asks of some rows: how far the given output and lse are from ours."""
    assert call.output is not None
    assert call.lse is not None
    at, here = (*batch, head), slice(rows.start, rows.stop)
    found = np.zeros((len(rows), 2))
    own_lse, own = (run.block(x, batch, head, rows).astype(np.float64) for x in ("lse", "output"))
    with np.errstate(all="ignore"):
        found[:, 0] = np.expm1(own_lse - call.lse[at][here].astype(np.float64))
        other = own - call.output[at][here].astype(np.float64)
        found[:, 1] = (call.grad_output[at][here].astype(np.float64) * other).sum(axis=-1)
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


def second_gradients(
    call: GradientRequest, arrives: Mapping[str, Array], wrt: Collection[str]
) -> dict[str, Array]:
    """The gradients of what `gradients` returns, by the backward steps of the backward steps.

    `arrives` has the gradients of the loss with respect to the gradients in `call.wrt`, each
    broadcast from its input's shape; `wrt` may name inputs, "grad_output" and "grad_lse".
    The results have the axes that `call.whole` says, and a bias all of (…, H, L, S).
    Left out is what they do not depend on: the gradient of values knows no values.
    """
    dtype = call.request.accumulator
    run = _backward_run(call, dtype)
    names = {name: step for name, (step, _) in _STEPS.items()}
    names |= {"grad_output": "d_output", "grad_lse": "d_lse"}
    shapes = {name: run.shape(f"d_{names[name]}") for name in arrives}
    given = {
        f"dd_d_{names[name]}": np.broadcast_to(np.asarray(array, dtype), shapes[name])
        for name, array in arrives.items()
    }
    needed = {name.removeprefix("dd_") for name in given}
    for step in reversed(run.steps.values()):
        if step.name in needed:
            needed |= {ref.step for ref in step.operands}
    steps = backward(
        tuple(run.steps.values()),
        {names[name] for name in wrt} & needed,
        {name.removeprefix("dd_") for name in given},
        compact=False,
        sign="dd",
    )
    run = run.continued(steps, given)
    made = {name: run.value(f"dd_{names[name]}") for name in wrt if names[name] in needed}
    if "scale" in made:
        made["scale"] = made["scale"].sum()  # over the leading axes
    return made
