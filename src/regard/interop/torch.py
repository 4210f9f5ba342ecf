"""PyTorch's attention call, computed by regard.

`scaled_dot_product_attention` has the signature of the function in `torch.nn.functional`; within
``with patched():`` that function itself runs on regard, also in PyTorch's layers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function

from regard.api import attention
from regard.boundary import answering
from regard.boundary.arrays import lent, untraced
from regard.errors import DtypeError, OptionError, ShapeError
from regard.interop import torch_gradients
from regard.rules.visibility import Mask

__all__ = ["Calls", "patched", "scaled_dot_product_attention"]


def __dir__() -> list[str]:
    return __all__


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@answering
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    r"""softmax(scale·Q·Kᵀ + attn_mask)·V on CPU tensors, with PyTorch's signature.

    Parameters
    ----------
    query : Tensor, (…, H, L, D)
        float16, bfloat16, float32 or float64; at least two axes, any strides, not copied.
    key, value : Tensor, (…, G, S, D) and (…, G, S, E)
        Of the same dtype. Leading axes and heads broadcast.
    attn_mask : Tensor broadcastable to (…, H, L, S), optional
        bool, True = attend, or numbers to add (float32 or the query's dtype), or
        `torch.nn.attention.bias.causal_upper_left` or `causal_lower_right`.
    dropout_p : float
        Must be 0.
    is_causal : bool
        Query i sees key j only if j ≤ i, also if L ≠ S. A mask applies too.
    scale : float, optional
        1/√D if None.
    enable_gqa : bool
        H may be a multiple of G: query head h reads key head h // (H // G).

    Returns
    -------
    Tensor, (…, H, L, E)
        Of the query's dtype, or of autocast's. A row that sees no key is 0.

    Raises
    ------
    DtypeError, OptionError, ShapeError
        For dropout, another device, nested, sparse and quantised tensors, tracing, forward mode
        (jvp), third derivatives, and whatever PyTorch refuses.

    Notes
    -----
    Gradients of query, key, value and a mask of numbers are those of `regard.gradients`; they have
    gradients too, made by the reference kernel with a matrix L × S for each head. `torch.func`
    maps and differentiates calls (vmap, grad, vjp, jacrev).

    ``torch.autocast("cpu")`` casts inputs and a mask of numbers as in PyTorch: all but float64.

    Unlike in PyTorch, a masked key or value, NaN included, has no influence; a NaN in a query is
    never hidden; scores that are all −inf without a mask give NaN.

    References
    ----------
    PyTorch's documentation of ``torch.nn.functional.scaled_dot_product_attention``.

    Examples
    --------
    >>> import torch
    >>> query = torch.eye(2)
    >>> value = torch.tensor([[10.0, 0.0], [0.0, 10.0]])
    >>> scaled_dot_product_attention(query, query, value, is_causal=True)
    tensor([[10.0000,  0.0000],
            [ 3.3024,  6.6976]])
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    involved = _involved(query, key, value, attn_mask)
    if _overridden(involved):
        # A subclass or mode may call this again with plain tensors.
        return handle_torch_function(scaled_dot_product_attention, involved, *arguments)
    return untraced(_answer)(*arguments)


@dataclass
class Calls:
    """How many calls regard computed, how many went to PyTorch, and why."""

    answered: int = 0
    passed_on: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


@contextmanager
@answering
def patched() -> Iterator[Calls]:
    """Run calls of ``torch.nn.functional.scaled_dot_product_attention`` on regard.

    `nn.MultiheadAttention` without ``need_weights`` and the transformer layers call it too, because
    their fast path in eval mode is switched off meanwhile (in all threads). Calls that regard
    cannot compute (dropout, another device), compiled and traced ones go to PyTorch.

    Only the thread or asyncio task that entered is affected. May be nested; each context counts its
    own calls. A function imported earlier by ``from torch.nn.functional import …`` is PyTorch's.

    Yields
    ------
    Calls
        `answered`, `passed_on` and the `reasons`, updated by each call.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.zeros(1, 3, 8)
    >>> with torch.no_grad(), patched() as calls:
    ...     output, _ = layer(x, x, x, need_weights=False)
    >>> calls.answered, calls.passed_on
    (1, 0)
    """
    calls = Calls()
    token = _counting.set((*_counting.get(), calls))
    _install(1)
    try:
        yield calls
    finally:
        _install(-1)  # first: `reset` fails if another thread closes the generator
        _counting.reset(token)


# --- the meaning of the arguments ----------------------------------------------------------------


def _answer(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, *more: Any) -> Any:
    is_causal, scale, enable_gqa = more
    query, key, value = map(as_autocast_has_it, (query, key, value))
    if not isinstance(attn_mask, CausalBias):
        attn_mask = as_autocast_has_it(attn_mask)
    _check({"query": query, "key": key, "value": value}, dropout_p)
    options = _visible(attn_mask, bool(is_causal), query, key) | {"scale": scale}
    followed = torch_gradients.is_followed(query, key, value, attn_mask)
    query, key, value = _matched(query, key, value, bool(enable_gqa))
    if followed:
        return torch_gradients.attend(query, key, value, **options)[0]
    for name in {"mask", "bias"} & options.keys():
        options[name] = lent("attn_mask", options[name])
    return attention(query, key, value, **options)


def as_autocast_has_it(tensor: Any) -> Any:
    """A tensor cast as ``torch.autocast("cpu")`` casts it; anything else unchanged."""
    if not torch.is_autocast_enabled("cpu") or not isinstance(tensor, torch.Tensor):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _check(tensors: dict[str, Any], dropout_p: float) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise DtypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
        if tensor.is_nested:
            raise DtypeError(f"{name} is a nested tensor; pass its parts, {name}.unbind(), singly")
        if tensor.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise DtypeError(f"{name} has dtype {tensor.dtype}; convert it to one of {known}")
        if tensor.ndim < 2:
            raise ShapeError(f"{name} has {tensor.ndim} axes but needs at least 2")
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise DtypeError(f"query, key and value must have one dtype, not {dtypes}")
    if dropout_p != 0:
        raise OptionError(f"dropout_p is {dropout_p}; regard has no dropout: pass 0.0")


def _visible(mask: Any, causal: bool, query: Any, key: Any) -> dict[str, Any]:
    """The mask and causality as options of `regard.attention`."""
    sizes = query.shape[-2], key.shape[-2]
    options: dict[str, Any] = {"causal": causal}
    if causal and sizes[0] != sizes[1]:
        options["offset"] = 0
    if mask is None:
        return options
    if isinstance(mask, CausalBias):
        if causal:
            raise OptionError("attn_mask is causal already; omit is_causal")
        if (mask.seq_len_q, mask.seq_len_kv) != sizes:
            raise ShapeError(
                f"attn_mask is for {mask.seq_len_q} queries and {mask.seq_len_kv} keys but there "
                f"are {sizes[0]} and {sizes[1]}"
            )
        at_the_end = mask.variant == CausalVariant.LOWER_RIGHT
        return {"causal": True, "offset": "end" if at_the_end else 0}
    if not isinstance(mask, torch.Tensor):
        kind = mask if isinstance(mask, type) else type(mask)
        rule = "; regard.attention takes rules as mask=, this call is_causal=True"
        hint = rule if issubclass(kind, Mask) else ""
        what = f"the class {kind.__name__}" if kind is mask else kind.__name__
        raise DtypeError(f"attn_mask must be a Tensor, not {what}{hint}")
    if mask.is_nested:
        raise DtypeError("attn_mask is a nested tensor; pad it to one shape")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise DtypeError(
            f"attn_mask has dtype {mask.dtype}; it must be torch.bool (True = attend), or "
            f"torch.float32 or the query's {query.dtype}, which is added"
        )
    if mask.ndim == 2 and mask.shape[0] not in (1, sizes[0]) and query.ndim > 2:
        axes = "[:, None, None, :]" if query.ndim > 3 else "[:, None, :]"
        raise ShapeError(
            f"attn_mask has shape {tuple(mask.shape)} but there are {sizes[0]} queries and "
            f"{sizes[1]} keys; if it has a row for each batch element, pass attn_mask{axes}"
        )
    options["mask" if mask.dtype == torch.bool else "bias"] = mask
    return options


def _matched(query: Any, key: Any, value: Any, grouped: bool) -> tuple[Any, Any, Any]:
    """Query, key and value with matching heads, which PyTorch broadcasts or shares in groups."""
    heads, *others = (t.shape[-3] if t.ndim > 2 else 1 for t in (query, key, value))
    if others == [heads, heads]:
        return query, key, value
    if grouped:
        if others[0] != others[1] and all(other and heads % other == 0 for other in others):
            key, value = (
                t.repeat_interleave(heads // other, -3) if other > 1 else _with_heads(t, heads)
                for t, other in zip((key, value), others, strict=True)
            )
        return query, key, value
    wanted = {heads, *others} - {1}
    if len(wanted) > 1:
        raise ShapeError(
            f"query has {heads} heads but key has {others[0]} and value {others[1]}; pass "
            "enable_gqa=True to share heads of key and value between query heads"
        )
    query, key, value = (_with_heads(t, *wanted) for t in (query, key, value))
    return query, key, value


def _with_heads(tensor: Any, heads: int) -> Any:
    return tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])


# --- replacing PyTorch's function ---------------------------------------------------------------

_own = torch.nn.functional.scaled_dot_product_attention
_fast_path = True
_installed = 0
_lock = threading.Lock()
# The open contexts of the current thread or task.
_counting: ContextVar[tuple[Calls, ...]] = ContextVar("regard_calls", default=())


def _install(change: int) -> None:
    """Count open contexts; replace the function for the first, restore it after the last."""
    global _own, _fast_path, _installed
    with _lock:
        before, _installed = _installed, _installed + change
        if not before:
            _own = torch.nn.functional.scaled_dot_product_attention
            _fast_path = torch.backends.mha.get_fastpath_enabled()
        if not before or not _installed:
            function = _answered_or_passed_on if _installed else _own
            torch.nn.functional.scaled_dot_product_attention = function
            torch.backends.mha.set_fastpath_enabled(not _installed and _fast_path)


def _answered_or_passed_on(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *more: Any, **options: Any
) -> Any:
    arguments = query, key, value, attn_mask, *more
    involved = _involved(query, key, value, attn_mask)
    # A compiled or traced call must record PyTorch's function: our results would be constants.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not _counting.get():
        reason = "the call is compiled or traced"
    elif _overridden(involved):
        return handle_torch_function(_answered_or_passed_on, involved, *arguments, **options)
    else:
        try:
            output = scaled_dot_product_attention(*arguments, **options)
        except (DtypeError, OptionError, ShapeError) as error:
            reason = str(error)
        else:
            _count()
            return output
    if isinstance(attn_mask, CausalBias) and has_torch_function((attn_mask,)):
        # Calls the current function of torch.nn.functional again, with a plain mask.
        return handle_torch_function(_answered_or_passed_on, (attn_mask,), *arguments, **options)
    _count(reason)
    return _own(*arguments, **options)


def _involved(query: Any, key: Any, value: Any, attn_mask: Any) -> tuple[Any, ...]:
    """The arguments that may override attention by `__torch_function__`; causal biases do not."""
    bias = isinstance(attn_mask, CausalBias)
    return (query, key, value) if bias else (query, key, value, attn_mask)


def _overridden(involved: tuple[Any, ...]) -> bool:
    tensors = all(one is None or isinstance(one, torch.Tensor) for one in involved)
    return tensors and has_torch_function(involved)


def _count(reason: str | None = None) -> None:
    with _lock:
        for calls in _counting.get():
            calls.answered += reason is None
            calls.passed_on += reason is not None
            if reason is not None:
                calls.reasons[reason] += 1
