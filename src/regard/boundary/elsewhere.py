"""What other libraries call the arguments of attention, and which argument of regard does the same.

Owns the table of their names, which docs/coming-from.md shows, and the message for a call with an
argument that a function does not have. Loaded when such a call has failed. Must not know more about
a function than its signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any

from regard.errors import safe_text


def _placed(text: str, offset: str) -> tuple[str, str]:
    """A text about positions, for a function that takes an offset and for one that does not."""
    return f"{text}, with `offset={offset}` where L ≠ S", text


CAUSAL = _placed("`causal={}`", "0")
MASK_OR_BIAS = "`mask={}` if it is boolean, True = attend; `bias={}` if it is added to the scores"
NO_DROPOUT = "leave it out: there is no dropout"
NO_CACHE = "leave it out: `regard.KVCache` keeps earlier keys and values"
JOINED = NO_CACHE + "; if they are joined by hand, `offset=past_key.shape[2]`"
GROUPED = "leave it out: H query heads read G key heads wherever H is a multiple of G"
AXES = (
    "leave it out: heads are an axis; packed arrays go in as `x.reshape(B, L, H, D).swapaxes(1, 2)`"
)
SOFTCAP = "`softcap={}`; leave it out instead of 0"
SHAPES = "leave it out: the shapes of the weights tell it"
LENGTHS = "`mask=regard.masks.Lengths({})`"
AT_THE_END = '; with causal, a window or ALiBi also `offset="end"`'
PACKED = (
    "`mask=regard.masks.Segments.from_lengths(np.diff(cu_seqlens_q), np.diff(cu_seqlens_k))`"
    + AT_THE_END
)
STEPS = "leave it out: `regard.explain` gives the scores of every step"
OUT_IS = "leave it out: results have the dtype of the inputs; convert those with `.astype`"

# Library → its name → what does the same here. In a text `{}` is the argument, and `name=` at the
# beginning of a piece of code an argument of regard; of several texts the first holds whose
# arguments the called function has.
ELSEWHERE: dict[str, dict[str, str | tuple[str, ...]]] = {
    "torch.nn.functional.scaled_dot_product_attention": {
        "attn_mask": MASK_OR_BIAS,
        "dropout_p": NO_DROPOUT,
        "is_causal": CAUSAL,
        "scale": "`scale={}`",
        "enable_gqa": GROUPED,
    },
    "torch.nn.MultiheadAttention": {
        "embed_dim": SHAPES,
        "num_heads": ("`heads={}`", AXES),
        "dropout": NO_DROPOUT,
        "bias": "`b_q=`, `b_k=`, `b_v=` and `b_o=`, the arrays themselves",
        "add_bias_kv": "leave it out: append the row to keys and values",
        "add_zero_attn": "`sink=0`, which is a key of zeros with a value of zeros",
        "kdim": SHAPES,
        "vdim": SHAPES,
        "batch_first": "leave it out: arrays are batch first; others go in as `x.swapaxes(0, 1)`",
        "device": "leave it out: regard computes on the CPU",
        "dtype": OUT_IS,
        "key_padding_mask": "`mask=~{}[:, None, None, :]`, because True = hidden there;"
        " `bias={}[:, None, None, :]` if it is added to the scores",
        "need_weights": "`return_weights={}`",
        "attn_mask": "`mask=~{}` if it is boolean, because True = hidden there; `bias={}` if it is"
        " added to the scores",
        "average_attn_weights": "leave it out: `return_weights=True` gives the weights of each"
        " head; their mean is `.weights.mean(axis=-3)`",
        "is_causal": CAUSAL,
    },
    "torch.nn.attention.flex_attention": {
        "score_mod": "`bias=` with the array that it adds to the scores, or `softcap=`",
        "block_mask": "`mask=` with an array of booleans, or rules of `regard.masks` and `offset=0`"
        " where L ≠ S",
        "scale": "`scale={}`",
        "enable_gqa": GROUPED,
        "return_lse": "`return_lse={}`",
        "return_aux": "`return_lse=True`",
        "kernel_options": "leave it out",
    },
    "jax.nn.dot_product_attention": {
        "bias": "`bias={}`",
        "mask": "`mask={}`",
        "scale": "`scale={}`",
        "is_causal": CAUSAL,
        "query_seq_lengths": "leave it out, and ignore the rows of padding",
        "key_value_seq_lengths": LENGTHS,
        "local_window_size": _placed("`window={pair}`; a single n is `window=(n, n)`", "0"),
        "implementation": "leave it out; `kernel=` names a kernel of regard",
        "return_residual": "`return_lse={}`, (B, N, T) instead of (B, T, N)",
    },
    "ONNX Attention": {
        "Q": "`query={}`",
        "K": "`key={}`",
        "V": "`value={}`",
        "attn_mask": MASK_OR_BIAS,
        "past_key": JOINED,
        "past_value": JOINED,
        "nonpad_kv_seqlen": LENGTHS + '; with causal or a window also `offset="end"`',
        "is_causal": CAUSAL,
        "scale": "`scale={}`",
        "softcap": SOFTCAP,
        "q_num_heads": ("`heads={}`", AXES),
        "kv_num_heads": ("`key_heads={}`", AXES),
        "left_window_size": _placed("`window=({}, …)`, None instead of -1", "0"),
        "right_window_size": _placed("`window=(…, {})`, None instead of -1", "0"),
        "qk_matmul_output_mode": STEPS + ", and `return_weights=True` the weights",
        "softmax_precision": 'leave it out; `precision="exact"` sums in float64',
    },
    "flash-attn": {
        "dropout_p": NO_DROPOUT,
        "softmax_scale": "`scale={}`",
        "causal": '`causal={}, offset="end"`',
        "window_size": _placed("`window={pair}`, None instead of -1", '"end"'),
        "softcap": SOFTCAP,
        "alibi_slopes": '`positions=regard.positions.Alibi({})`, with `offset="end"` where L ≠ S;'
        " slopes of each text, (B, H), go in as `bias=`",
        "deterministic": "leave it out: results are always the same bytes",
        "return_attn_probs": (
            "`return_weights={}` and `return_lse={}`, which comes second there",
            "`return_weights={}`",
        ),
        "return_softmax_lse": "`return_lse={}`",
        "cu_seqlens_q": PACKED,
        "cu_seqlens_k": PACKED,
        "max_seqlen_q": "leave it out",
        "max_seqlen_k": "leave it out",
        "cache_seqlens": LENGTHS + ", the lengths after appending" + AT_THE_END,
        "block_table": NO_CACHE,
        "k_cache": NO_CACHE,
        "v_cache": NO_CACHE,
        "num_splits": "leave it out: results do not depend on how the work is divided",
        "learnable_sink": "`sink={}`",
    },
    "xformers.ops.memory_efficient_attention": {
        "attn_bias": "`bias={}` if it is an array; `causal=True` or `mask=` with rules of"
        " `regard.masks` if it is one of the classes",
        "p": NO_DROPOUT,
        "scale": "`scale={}`",
        "op": "leave it out",
    },
    "FlashInfer, Triton, MLX": {
        "sm_scale": "`scale={}`",
        "logits_soft_cap": SOFTCAP,
        "window_left": _placed("`window=({}, None)`, None instead of -1", '"end"'),
        "custom_mask": "`mask={}`",
        "sinks": "`sink={}`",
    },
    "Hugging Face transformers": {
        "attention_mask": "`mask=({} == 1)[:, None, None, :]` if it is a tokenizer's, 1 = attend;"
        " with four axes `mask={}` if it is boolean, `bias={}` if it is added to the scores",
        "scaling": "`scale={}`",
        "dropout": NO_DROPOUT,
        "sliding_window": _placed(
            "`window=({} - 1, 0)`, because it counts the query's own key, or `window=({}, {})` if"
            " the model looks both ways",
            '"end"',
        ),
        "softcap": "`softcap={}`",
        "s_aux": "`sink={}`",
        "position_bias": "`bias={}`, with `scale=1` in T5, which does not scale",
        "output_attentions": "`return_weights={}`",
        "head_mask": "leave it out: multiply the output of each head",
        "past_key_values": NO_CACHE,
        "use_cache": NO_CACHE,
        "cache_position": NO_CACHE,
        "layer_idx": "leave it out: each layer has a `regard.KVCache` of its own",
        "max_cache_len": "`capacity={}`",
        "num_attention_heads": ("`heads={}`", AXES),
        "num_key_value_heads": ("`key_heads={}`", AXES),
    },
    "Keras": {
        "attention_mask": "`mask={}[:, None]`, (B, L, S) with an axis for heads",
        "is_causal": CAUSAL,
        "use_causal_mask": CAUSAL,
        "return_attention_scores": "`return_weights={}`",
        "attn_logits_soft_cap": "`softcap={}`",
        "flash_attention": "leave it out",
        "training": NO_DROPOUT,
        "query_mask": "leave it out, and ignore the rows of padding",
        "value_mask": "`mask={}[:, None, None, :]`",
        "key_mask": "`mask={}[:, None, None, :]`",
        "key_dim": SHAPES,
        "value_dim": SHAPES,
        "use_bias": "`b_q=`, `b_k=`, `b_v=` and `b_o=`, each array as `.ravel()`",
    },
    "softmax of PyTorch and SciPy": {
        "input": "`scores={}`",
        "x": "`scores={}`; without an axis SciPy sums over all numbers: `scores={}.ravel()`",
        "dim": "`axis={}`",
        "dtype": OUT_IS,
    },
}

# Names that people try, and those of other libraries that are in no table.
TRIED: dict[str, str | tuple[str, ...]] = {
    "q": "`query={}`",
    "k": "`key={}`",
    "v": "`value={}`",
    "padding_mask": "`mask={}[:, None, None, :]` if True = attend",
    "attention_axes": "leave it out: rows are the last axis but one; move others there with"
    " `np.moveaxis`",
    "position_ids": "`positions=regard.positions.Rotary(query_positions={}, key_positions={})` if"
    " the model turns queries and keys; positions that count up from a number are `offset=`",
    "query_seq_offsets": "`offset={}`, the position of the first query of each batch element",
    "rotary_cos": "`positions=regard.positions.Rotary(…)`, which makes cosines and sines itself",
    "rotary_sin": "`positions=regard.positions.Rotary(…)`, which makes cosines and sines itself",
    "segment_ids": "`mask=regard.masks.Segments({})`",
    "return_attention": "`return_weights={}`",
    "temperature": "`scale=1 / ({} * D**0.5)`",
    "max_length": "`capacity={}`",
    "max_len": "`capacity={}`",
    "max_seq_len": "`capacity={}`",
    "n_heads": "`heads={}`",
    "num_threads": "`threads={}`",
    "n_jobs": "`threads={}`",
    "tokens": "`labels={}`",
    "words": "`labels={}`",
    "query_tokens": "`query_labels={}`",
    "key_tokens": "`key_labels={}`",
    "labels": "`labels={}`",
    "head": ("`heads={}`", "leave it out: every head is computed; `why` and the views take head"),
}

# What regard calls the functions of others.
FUNCTIONS: dict[str, str] = {
    "scaled_dot_product_attention": "regard.attention, or regard.interop.torch."
    "scaled_dot_product_attention with PyTorch's arguments",
    "dot_product_attention": "regard.attention, or regard.interop.jax.dot_product_attention with "
    "JAX's arguments",
    "flex_attention": "regard.attention",
    "sdpa": "regard.attention",
    "flash_attn_func": "regard.attention",
    "memory_efficient_attention": "regard.attention",
    "MultiheadAttention": "regard.MultiHeadAttention",
    "logsumexp": "regard.attention(…, return_lse=True)",
    "merge_attentions": "regard.merge",
    "grad": "regard.gradients",
    **{
        f"grad_{name}": f"regard.gradients(…).{name}"
        for name in ("query", "key", "value", "bias", "sink")
    },
    "DynamicCache": "regard.KVCache",
    "StaticCache": "regard.KVCache",
    "torch": "regard.interop.torch",
    "jax": "regard.interop.jax",
    "onnx": "regard.interop.onnx",
    "transformers": "regard.interop.transformers",
}

# What the objects of regard have in place of attributes that people try.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "KVCache": {"update": "append(key, value), then attend(query)", "clear": "reset()"},
    "Explanation": {
        "save": "to_html(path), to_npz(path) or, for a Problem, regard.save_problem(problem, path)",
        "to_dict": "{name: explanation[name].value for name in explanation.steps}",
        "to_csv": "to_dataframe(step).to_csv(path)",
        "to_pandas": "to_dataframe(step)",
    },
    "ExplainedStep": {
        "values": "value, the array",
        "numpy": "value, the array",
        "to_numpy": "value, the array",
        "to_pandas": "to_dataframe()",
        "to_csv": "to_dataframe().to_csv(path)",
    },
}


def misfit(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> TypeError:
    """What to raise for a call whose arguments do not fit the function's signature."""
    parameters = list(signature(function).parameters.values())
    call = f"{function.__name__}()"
    if parameters and parameters[0].name == "self":  # a method's own object is no argument
        (owner, *args), parameters = args, parameters[1:]
        call = f"{type(owner).__name__}.{call}".replace(".__init__", "")
    by_position = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    by_name = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    taken = [*by_position, *by_name]
    unknown = {name: value for name, value in options.items() if name not in taken}
    kinds = {p.kind for p in parameters}
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        query = options.get("query", args[0] if args and by_position[:1] == ["query"] else None)
        return no_such_argument(call, unknown, taken, query)
    if len(args) > len(by_position) and Parameter.VAR_POSITIONAL not in kinds:
        meant = _meant_by(args[len(by_position)])
        names = [meant] if meant in by_name else by_name
        only = f"only {_listed(by_position)}" if by_position else "nothing"
        mend = f"; pass the next as {_either(names)}" if names else ""
        if call == "KVCache.attend()" and len(args) > 2:
            mend = "; give keys and values to append(key, value) first"
        return TypeError(f"{call} takes {only} by position{mend}")
    given = by_position[: len(args)]
    for name in given:
        if name in options:
            return TypeError(f"{call} was given {name} twice, by position and by name")
    needed = [p.name for p in parameters if p.default is Parameter.empty and p.name in taken]
    missing = [name for name in needed if name not in given and name not in options]
    source = ""
    if {"lse", "lses"} & {*missing}:
        source = "; attention(…, return_lse=True) returns it as .lse"
    elif by_position[:1] == ["W_q"] and args and isinstance(args[0], int):
        source = ", the arrays of weights themselves, whose shapes tell the sizes"
    return TypeError(
        f"{call} needs {_listed(missing)} too: {call[:-1]}{', '.join(needed)}){source}"
    )


def no_such_argument(
    call: str, unknown: Mapping[str, Any], taken: Sequence[str], query: Any = None
) -> TypeError:
    """What to raise for arguments that are not among those that a call takes."""
    alike: dict[str, list[str]] = {}
    for name, value in unknown.items():
        alike.setdefault(_answer(name, value, taken), []).append(safe_text(name, 40))
    answer = "; nor ".join(f"{_listed(names)}: {text}" for text, names in alike.items())
    # What the call takes is said once, at the end of the last answer that has it.
    earlier, said, last = answer.rpartition(_takes(taken))
    answer = re.sub(f"[:;] {re.escape(_takes(taken))}", "", earlier) + said + last
    # A mask of keys needs an axis for the queries, and for heads where there are any.
    fitting = {2: "", 3: "[:, None, :]"}.get(getattr(query, "ndim", 4), "[:, None, None, :]")
    return TypeError(f"{call} has no argument {answer.replace('[:, None, None, :]', fitting)}")


def no_such_attribute(owner: object, name: str, hint: str = "") -> AttributeError:
    """What to raise for an attribute that an object does not have."""
    kind = type(owner).__name__
    if instead := ATTRIBUTES.get(kind, {}).get(name):
        hint = f"use {instead}"
    elif not hint and not name.startswith("_") and (near := _nearest(name, dir(owner))):
        hint = f"did you mean {near}?"
    text = f"{kind} has no attribute {safe_text(name, 60)}{'; ' * bool(hint)}{hint}"
    return AttributeError(text, name=name, obj=owner)


def no_such_name(name: str, names: Iterable[str]) -> str:
    """The message for a name that the package does not have."""
    message = f"module 'regard' has no attribute {name!r}"
    if name in FUNCTIONS:
        return f"{message}; use {FUNCTIONS[name]}"
    near = _nearest(name, names)
    return f"{message}; did you mean {near}?" if near else message


def _answer(name: str, value: Any, taken: Sequence[str]) -> str:
    """What to pass instead of one argument."""
    known = [(library, names[name]) for library, names in ELSEWHERE.items() if name in names]
    if known and value is None:
        return "leave it out: None is no mask and no number here"
    known += [("", texts) for texts in [TRIED.get(name)] if texts]
    answers: dict[str, str] = {}
    for library, texts in known:
        for text in (texts,) if isinstance(texts, str) else texts:
            if all(argument in taken for argument in _arguments(text)):
                answers.setdefault(_filled(text, name, value), library)
                break
    if len(answers) == 1:
        return next(iter(answers))
    if answers:
        return "; ".join(f"coming from {library}, {text}" for text, library in answers.items())
    for theirs in taken:  # regard's own name, in a call with the arguments of another library
        if theirs not in TRIED and name in _arguments(*_texts(theirs)):
            return f"pass {theirs}={_spelled(value, name)}"
    takes = _takes(taken)
    if known:
        text = known[0][1] if isinstance(known[0][1], str) else known[0][1][0]
        return f"for {_home(_arguments(text)[0])} {_filled(text, name, value)}; {takes}"
    if near := _nearest(name, taken):
        return f"did you mean {near}={_spelled(value, '')}?"
    if name in _arguments(*_texts()):
        return f"it is an argument of {_home(name)}; {takes}"
    if near := _nearest(name, (*TRIED, *(one for names in ELSEWHERE.values() for one in names))):
        return f"if it is what others call {near}, {_answer(near, value, taken)}"
    return takes


def _takes(taken: Sequence[str]) -> str:
    """What a call takes."""
    return f"it takes {_listed(taken)}" if taken else "it takes none"


def _texts(only: str | None = None) -> Iterable[str]:
    """What the tables answer, to one name or to any."""
    for table in (TRIED, *ELSEWHERE.values()):
        names = table if only is None else {only: table.get(only, ())}
        for texts in names.values():
            yield from (texts,) if isinstance(texts, str) else texts


def _arguments(*texts: str) -> list[str]:
    """The arguments of regard that texts begin a piece of code with."""
    return [argument for text in texts for argument in re.findall(r"`(\w+)=", text)]


def _home(argument: str) -> str:
    """The function that takes an argument of regard."""
    homes = {
        "scores axis": "softmax",
        "capacity": "KVCache",
        "heads key_heads b_q b_k b_v b_o": "MultiHeadAttention",
        "labels query_labels key_labels": "explain",
    }
    own = (home for arguments, home in homes.items() if argument in arguments.split())
    return f"regard.{next(own, 'attention')}"


def _filled(text: str, name: str, value: Any) -> str:
    verb = "pass " if text.startswith("`") else ""
    text = text.replace("{pair}", _spelled(_pair(value), name))
    return verb + text.replace("{}", _spelled(value, name)).replace("`", "")


def _pair(value: Any) -> Any:
    """A window of another library as regard has it."""
    pair = (value, value) if type(value) is int else value
    if isinstance(pair, (list, tuple)) and all(type(side) is int for side in pair):
        return tuple(None if side == -1 else side for side in pair)
    return value


def _spelled(value: Any, name: str) -> str:
    """A value in Python if it is short; else the name."""
    simple = (bool, int, float, str, type(None))
    short = isinstance(value, simple) or (
        isinstance(value, tuple) and all(isinstance(one, simple) for one in value)
    )
    text = safe_text(repr(value), 41) if short else ""
    return text if 0 < len(text) <= 40 else safe_text(name, 40)


def _nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant."""
    spellings = {one.lower(): one for one in reversed([*names])}
    near = get_close_matches(name.lower(), spellings, 1, 0.75)
    return spellings[near[0]] if near else None


def _meant_by(value: Any) -> str:
    """The argument that a value without a name was probably meant for."""
    if isinstance(value, bool):
        return "causal"
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
        return "query_labels"
    if not hasattr(value, "shape"):
        return ""
    return "mask" if "bool" in str(getattr(value, "dtype", "")) else "bias"


def _listed(names: Sequence[str]) -> str:
    *most, last = names or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _either(names: Sequence[str]) -> str:
    *most, last = [f"{name}=" for name in names]
    return f"{', '.join(most)} or {last}" if most else last
