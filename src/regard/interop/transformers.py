"""Hugging Face models that attend with regard, and records of their attention calls.

After `register()`, ``attn_implementation="regard"`` loads a model whose attention runs on regard.
Within ``with record() as layers:`` each call is kept, and can be explained.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from regard.boundary import answering
from regard.boundary.arguments import as_int, as_number
from regard.boundary.arrays import Array, home_of, lent
from regard.compute import dispatch
from regard.compute.request import make_request
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.explanation.build import explain_arrays, string_labels
from regard.faces import Explanation
from regard.interop import torch_gradients
from regard.interop.torch import as_autocast_has_it
from regard.masks import Boolean

try:  # says which outputs a forward pass collects; private in transformers
    from transformers.utils.output_capturing import _active_collector as collector
except ImportError:
    collector = None

__all__ = ["AttentionCall", "attend", "record", "register"]


def __dir__() -> list[str]:
    return __all__


# Arguments of models that do not change attention: the mask already has windows and positions.
NEUTRAL = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_hidden_states",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)

_recording: ContextVar[_Recording | None] = ContextVar("regard_recording", default=None)


def register(name: str = "regard") -> None:
    """Let transformers attend with regard: ``attn_implementation="regard"``.

    Parameters
    ----------
    name : str
        The name of the implementation. Names that contain one of transformers' own ("sdpa",
        "flash", "flex", "paged", "eager") or a slash are an OptionError.

    Notes
    -----
    A mask function is registered under the same name; without it transformers passes no mask, and
    padding would be visible.

    Some models compute attention in their own code, which transformers cannot replace. Built with
    this name, such a model keeps its own attention and mask, with a UserWarning.

    Examples
    --------
    >>> register()
    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...                     intermediate_size=8, vocab_size=8)
    >>> model = BertModel(config).eval()
    >>> model.set_attn_implementation("regard")
    """
    taken = ("sdpa", "flash", "flex", "paged", "eager", "/", "|")
    if not name or any(word in name for word in taken):
        raise OptionError(
            f"name is {safe_text(repr(name), 60)}; it must not contain {', '.join(taken)}, which "
            "transformers treats specially"
        )
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    if PreTrainedModel.get_correct_attn_implementation is not _implementation:
        PreTrainedModel.get_correct_attn_implementation = _implementation


_own_implementation = PreTrainedModel.get_correct_attn_implementation


def _implementation(model: Any, requested: str | None, *more: Any, **options: Any) -> Any:
    """The implementation for a model: ours if requested and if the model can use it.

    A model that does not look attention up by name would raise a KeyError, or add our boolean mask
    to its scores.
    """
    ours = requested is not None and AttentionInterface().get(requested) is attend
    if not ours or _looks_its_attention_up(type(model)):
        return _own_implementation(model, requested, *more, **options)
    kept = _own_implementation(model, None, *more, **options)
    warnings.warn(
        f"attention that {type(model).__name__} computes in its own code cannot be replaced: it "
        f'runs as attn_implementation="{kept}", not on regard',
        stacklevel=2,
    )
    return kept


def _looks_its_attention_up(model: Any) -> bool:
    """Whether a model looks attention up by name; transformers knows from its source."""
    module = sys.modules.get(model.__module__)
    return hasattr(module, "ALL_ATTENTION_FUNCTIONS") or model._can_set_attn_implementation()


@contextmanager
def record() -> Iterator[list[AttentionCall]]:
    """Record queries, keys, values, mask and log-sum-exp of each attention call in a block.

    At its end a UserWarning names models that were called and did not attend with regard.

    Yields
    ------
    list of AttentionCall
        One per call on regard, in order.

    Examples
    --------
    >>> with record() as layers:
    ...     pass  # model(**inputs)
    >>> layers
    []
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    recording = _Recording()
    token = _recording.set(recording)
    handle = register_module_forward_pre_hook(recording.note)
    try:
        yield recording.calls
    finally:
        handle.remove()
        _recording.reset(token)
    for model in recording.models:
        if recording.modules.isdisjoint(model.modules()):
            warnings.warn(
                f"no attention of {type(model).__name__} ran on regard (its attn_implementation is "
                f'"{model.config._attn_implementation}"), so none is recorded; call '
                'set_attn_implementation("regard"), or see docs/transformers.md for models whose '
                "attention cannot be replaced",
                stacklevel=3,
            )


class _Recording:
    """The models called within one `record`, and the attention calls that reached regard."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.modules: set[Any] = set()  # those that attended with regard
        self.models: list[Any] = []  # without parts of other models

    def keep(
        self, module: Any, tensors: Mapping[str, Any], options: Mapping[str, Any], lse: Any
    ) -> None:
        """Keep one call: copies, because a cache may overwrite its keys and values."""
        import torch

        self.modules.add(module)
        with torch.no_grad():
            arrays, named = _as_arrays(tensors, options)
            kept = {name: array.copy() for name, array in arrays.items()}
            lse = lent("lse", lse)
        layer = getattr(module, "layer_idx", None)
        self.calls.append(
            AttentionCall(type(module).__name__, layer, **kept, lse=lse, options=named)
        )

    def note(self, module: Any, _: Any) -> None:
        """Note a called module; PyTorch calls this for every module in every thread."""
        if _recording.get() is not self or not isinstance(module, PreTrainedModel):
            return
        if not any(module is part for model in self.models for part in model.modules()):
            self.models.append(module)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionCall:
    """One recorded attention call of a model.

    Nothing but the mask or bias is (L, S); it is shared with the model, not copied.
    """

    module: str
    layer: int | None
    query: Array  # (B, H, L, D)
    key: Array  # (B, G, S, D)
    value: Array  # (B, G, S, E)
    lse: Array  # (B, H, L)
    options: Mapping[str, Any]  # of `regard.attention`

    @answering
    def explain(
        self,
        labels: Sequence[str] | None = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        batch: int = 0,
        title: str | None = None,
    ) -> Explanation:
        """Every step of this call for one batch element, all heads.

        Parameters
        ----------
        labels : sequence of str, optional
            The tokens, one per key, also with a cache, whose queries are the last of them.
        query_labels, key_labels : sequence of str, optional
            One per query and one per key, as cross-attention needs them.
        batch : int
            The batch element.
        title : str, optional
            Default: the module and the layer.
        """
        elements = self.lse.shape[0]
        if not 0 <= as_int("batch", batch) < elements:
            raise OptionError(f"batch is {batch}; it must be 0 to {elements - 1}")
        queries, keys = self.query.shape[-2], self.key.shape[-2]
        if labels is not None and query_labels is key_labels is None and queries < keys:
            labels, key_labels = None, string_labels("labels", labels)
            query_labels = key_labels[-queries:]
        options = dict(self.options)
        if "mask" in options:
            options["mask"] = Boolean(_element(options["mask"], batch), name="attention mask")
        if "bias" in options:
            options["bias"] = _element(options["bias"], batch)
        trace = explain_arrays(
            *(_element(array, batch) for array in (self.query, self.key, self.value)),
            names={"labels": labels, "key_labels": key_labels, "query_labels": query_labels},
            title=repr(self) if title is None else title,
            **options,
        )
        return Explanation.of(trace)

    def __repr__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        heads, queries, keys = self.query.shape[1], self.query.shape[2], self.key.shape[2]
        return f"{self.module}{layer}: {heads} heads, {queries} queries, {keys} keys"


def _element(array: Array, batch: int) -> Array:
    """One batch element; an axis of size 1 is shared by all."""
    return np.asarray(array[batch if array.shape[0] > 1 else 0])


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Any = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **more: Any,
) -> tuple[Any, Any]:
    """The attention function that transformers calls.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module of the model.
    query, key, value : torch.Tensor, (B, H, L, D), (B, G, S, D), (B, G, S, E)
        On the CPU.
    attention_mask : torch.Tensor, broadcastable to (B, H, L, S), or None
        Booleans (True = attend), or numbers to add.
    scaling, softcap, s_aux, position_bias
        scale, softcap, sink and bias of `regard.attention`.
    dropout : float
        Must be 0.
    is_causal : bool, optional
        Without a mask: query i sees the first i + 1 keys. Default: the module's `is_causal`. A
        single query sees every key.
    **more
        Other arguments of models; unknown ones are refused.

    Returns
    -------
    tuple
        The output (B, L, H, E), and the weights (B, H, L, S) or None if they are not collected.

    Raises
    ------
    OptionError, DtypeError, ShapeError
        If regard cannot compute the call.
    """
    unknown = [name for name, given in more.items() if given is not None and name not in NEUTRAL]
    if unknown:
        raise OptionError(
            f"{type(module).__name__} passes {', '.join(safe_text(one, 60) for one in unknown)}, "
            "which regard does not know and which may change the result; use another "
            "attn_implementation for this model"
        )
    if dropout:
        raise OptionError(
            f"dropout is {dropout}, but regard has no dropout; call model.eval(), or train with "
            "an attention dropout of 0 in the model's configuration"
        )
    tensors = {"query": query, "key": key, "value": value}
    tensors = {n: _tensor(n, as_autocast_has_it(tensor)) for n, tensor in tensors.items()}
    for name, added in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if added is not None and getattr(added, "ndim", None) != 4:
            raise ShapeError(
                f"{name} must have 4 axes, (B, H, L, S), as transformers' mask functions make it, "
                f"but is {_described(added)}"
            )
    options = {
        "scale": scaling,
        "softcap": None if softcap is None else as_number("softcap", softcap) or None,
        "sink": _tensor("s_aux", s_aux),
        "bias": _tensor("position_bias", position_bias),
    }
    mask = _tensor("attention_mask", attention_mask)
    if mask is not None and not mask.is_floating_point():
        options["mask"] = mask
    elif mask is not None:
        options["bias"] = mask if options["bias"] is None else _sum(mask, options["bias"])
    elif tensors["query"].shape[2] > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Keys beyond the queries are unused space of a static cache.
        options |= {"causal": True, "offset": 0} if causal else {}
    options = {name: given for name, given in options.items() if given is not None}
    recording, collects = _recording.get(), _collects(more)
    if torch_gradients.is_followed(*tensors.values(), *options.values()):
        output, lse, *weights = torch_gradients.attend(
            **tensors, **options, return_weights=collects
        )
        output = output.transpose(1, 2).contiguous()
    else:
        arrays, named = _as_arrays(tensors, options)
        returned = {"return_weights": collects, "return_lse": recording is not None}
        result = dispatch.run(make_request(**arrays, **named, **returned))
        lse = result.lse
        home = home_of(tensors)
        assert home is not None  # they are tensors
        output = home(np.ascontiguousarray(result.output.swapaxes(1, 2)))
        weights = [] if result.weights is None else [home(result.weights)]
    if recording is not None:
        recording.keep(module, tensors, options, lse)
    return output, *(weights or [None])


def _sum(mask: Any, bias: Any) -> Any:
    try:
        return mask + bias
    except RuntimeError as error:
        reason = safe_text(str(error).partition("\n")[0], 120)
        raise OptionError(f"attention_mask and position_bias do not add up: {reason}") from None


def _as_arrays(
    tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors as arrays on their memory."""
    names = {"sink": "s_aux", "mask": "attention_mask", "bias": "attention_mask"}
    return (
        {name: lent(name, tensor) for name, tensor in tensors.items()},
        {name: lent(names.get(name, name), given) for name, given in options.items()},
    )


def _collects(more: Mapping[str, Any]) -> bool:
    """Whether the forward pass collects weights."""
    if collector is None or more.get("output_attentions"):
        return True
    wanted = collector.get()
    return wanted is not None and any("attentions" in name for name in wanted)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{tuple(shape)}"


def _tensor(name: str, tensor: Any) -> Any:
    """A tensor, checked; None for None."""
    import torch

    if tensor is not None and not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor is not None and torch.jit.is_tracing():
        raise OptionError(
            "tracing would keep regard's results as constants; trace with another "
            "attn_implementation"
        )
    return tensor
