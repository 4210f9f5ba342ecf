"""Small models of transformers that note by what their layers turn queries and keys.

Owns how a configuration of any class becomes a small one, and which functions of a model are
watched. Must not know how regard reads a configuration.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

TOKENS = 12

# Sizes of a small model, by the names that configurations have for them.
SIZES = {
    64: "hidden_size n_embd d_model",
    32: "intermediate_size n_inner ffn_hidden_size mamba_d_head",
    16: "head_dim moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank "
    "qk_nope_head_dim v_head_dim index_head_dim expert_ffn_hidden_size linear_key_head_dim "
    "linear_value_head_dim hidden_size_per_layer_input",
    8: "num_hidden_layers n_layer rotary_dim qk_rope_head_dim mamba_d_state mamba_chunk_size",
    4: "num_attention_heads n_head n_routed_experts num_experts num_local_experts index_topk "
    "moe_num_experts linear_num_value_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token index_n_heads moe_topk moe_k "
    "linear_num_key_heads eos_token_id",
    1: "n_group topk_group bos_token_id first_k_dense_replace",
    0: "pad_token_id",
    120: "vocab_size vocab_size_per_layer_input",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}


class Turned(NamedTuple):
    """One call of a function that turns rows: of which layer, how wide a head is, and arrays."""

    layer: int
    head: int
    before: tuple[np.ndarray, ...]  # (heads, tokens, width) each
    after: tuple[np.ndarray, ...]


def small(config_class: type, **more: Any) -> Any:
    """A configuration of this class with a few numbers for its sizes."""
    usual = config_class().to_dict()
    sizes = {n: x for n, x in SMALL.items() if type(usual.get(n)) is int}
    if "qk_rope_head_dim" in usual:
        sizes.pop("head_dim", None)  # follows from it
    if usual.get("num_key_value_heads") == usual.get("num_attention_heads"):
        sizes["num_key_value_heads"] = SMALL["num_attention_heads"]
    return config_class(**{**sizes, **more})


def turned_by(config: Any) -> list[Turned]:
    """What a small model of this configuration turns when it reads TOKENS tokens."""
    import torch

    name = type(config).__module__.replace("configuration_", "modeling_")
    module = importlib.import_module(name)
    seen: list[Turned] = []
    inside: list[tuple[str, Any]] = []
    torch.manual_seed(0)
    model = _class_for(config, module)(config).eval()
    for name, part in model.named_modules():
        if re.search("ttention|ndexer", type(part).__name__):
            part.register_forward_pre_hook(lambda part, _, n=name: inside.append((n, part)))
            part.register_forward_hook(lambda *_: inside.pop() and None)
    tokens = torch.randint(3, 100, (1, TOKENS))
    named = inspect.signature(model.forward).parameters
    given = {"input_ids": tokens} if "input_ids" in named else {
        "inputs_embeds": torch.randn(1, TOKENS, config.hidden_size)}  # fmt: skip
    if "use_cache" in named:
        given["use_cache"] = False
    with torch.no_grad(), _watched(module, inside, seen):
        model(**given)
    return seen


def _class_for(config: Any, module: Any) -> Any:
    """The model without a head for a task."""
    from transformers import PreTrainedModel

    found = [
        one
        for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, PreTrainedModel)
        and one.__module__ == module.__name__ and one.config_class is type(config)
        and not one.__name__.endswith("PreTrainedModel")
    ]  # fmt: skip
    return next((one for one in found if not re.search("For[A-Z]", one.__name__)), found[0])


@contextmanager
def _watched(module: Any, inside: list[Any], seen: list[Turned]) -> Iterator[None]:
    own = {
        n: f
        for n, f in vars(module).items()
        if re.match("apply_.*rot", n) and inspect.isfunction(f)
    }

    def watching(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            made = function(*args, **named)
            name, part = inside[-1] if inside else ("", None)
            number = re.search(r"\d+", name)
            if number and "index" not in name:  # which chooses keys, and turns rows of its own
                after = made if isinstance(made, tuple) else (made,)
                before = [*args, *named.values()][: len(after)]
                head = getattr(part, "head_dim", None) or getattr(part, "head_size", 0)
                seen.append(Turned(int(number[0]), head, _rows(before), _rows(after)))
            return made

        return call

    for name, function in own.items():
        setattr(module, name, watching(function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(module, name, function)


def _rows(arrays: Any) -> tuple[np.ndarray, ...]:
    found = (one.detach()[0].double().numpy().copy() for one in arrays)
    return tuple(x.swapaxes(0, 1) if x.shape[0] == TOKENS else x for x in found)
