"""A task: the fields that an adapter reads, and what the textbook makes of them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

import regard
from regard.diagnosis.given import Given, Sizes
from regard.diagnosis.task import PLAIN, Reading, Task
from regard.diagnosis.view import TaskView, changed_in, reads_of
from regard.masks import Causal, Window

# A few hundred roundings of numbers below 10.
WITHIN = 1e-12
SIZES = (Sizes(), Sizes(heads=4, key_heads=2, queries=3, keys=6, value_width=6))


def answered(adapter, given, reading=PLAIN):
    """What an adapter returns once all that it reads is known, and the task that it was asked."""
    for _ in range(4):
        view, out = TaskView(given), None
        with contextlib.suppress(ValueError):  # it has read fields that decide shapes
            out = adapter(view)
        if reads_of(view) <= given.fields:
            break
        given = replace(given, fields=given.fields | reads_of(view))
    wanted = tuple(out) if isinstance(out, dict) else ()
    return out, Task(given, reads_of(view), reading, wanted)


def assert_expected(adapter, given, reading=PLAIN):
    out, task = answered(adapter, given, reading)
    out = out if isinstance(out, dict) else {"output": out}
    for name, right in task.expected.items():
        own = np.asarray(out[name])
        if name == "output":
            rows = task.compared if own.ndim == 3 else task.compared[:, None]
            own, right = own * rows[..., None], right * rows[..., None]
        np.testing.assert_allclose(own, right, rtol=0, atol=WITHIN)


def attention(t, **options):
    return regard.attention(t.query, t.key, t.value, **options)


def projected(t, context=None):
    """Queries, keys and values of a layer."""
    source = t.embeddings if context is None else context
    rows = ((t.embeddings, t.W_q, t.heads), (source, t.W_k, t.key_heads))
    for x, weights, heads in (*rows, (source, t.W_v, t.key_heads)):
        yield (x @ weights).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def joined(past, new):
    """Keys and values of the past, and those after them."""
    return (np.concatenate(two, 2) for two in zip(past, new, strict=True))


def packed(output):
    return output.swapaxes(1, 2).reshape(output.shape[0], output.shape[2], -1)


CALLS = {
    "plain": (attention, ()),
    "mask": (lambda t: attention(t, mask=t.mask), ("mask",)),
    "padding": (lambda t: attention(t, mask=t.key_mask[:, None, None]), ("key_mask",)),
    "lengths": (
        lambda t: attention(
            t, mask=(np.arange(t.key.shape[2]) < t.lengths[:, None])[:, None, None]
        ),
        ("key_mask",),
    ),
    "causal with an offset": (
        lambda t: attention(t, mask=Causal() if t.causal else None, offset=t.offset),
        ("causal", "offset"),
    ),
    "window": (lambda t: attention(t, mask=Window(*t.window), offset=t.offset), ("window",)),
    "one side of a window": (
        lambda t: attention(t, mask=Window(t.window[0], t.window[0]), offset=t.offset),
        ("window",),
    ),
    "numbers": (
        lambda t: attention(t, bias=t.bias, scale=t.scale, softcap=t.softcap),
        ("scale",),
    ),
}


@pytest.mark.parametrize("sizes", SIZES, ids=("square", "rectangle"))
@pytest.mark.parametrize("name", CALLS)
def test_a_task_expects_what_attention_computes_of_the_fields_that_were_read(name, sizes):
    adapter, asks = CALLS[name]
    assert_expected(adapter, Given(name, sizes, asks=frozenset(asks)))


@pytest.mark.parametrize("sizes", SIZES, ids=("square", "rectangle"))
def test_a_layer_is_projected_from_its_embeddings_or_from_a_context(sizes):
    assert_expected(
        lambda t: packed(regard.attention(*projected(t))) @ t.W_o + t.b_o, Given("", sizes)
    )
    assert_expected(lambda t: packed(regard.attention(*projected(t, t.context))), Given("", sizes))


@pytest.mark.parametrize("sizes", SIZES, ids=("square", "rectangle"))
def test_keys_of_the_past_come_before_those_of_the_queries(sizes):
    def of_arrays(t):
        keys, values = joined(t.past, (t.key, t.value))
        return regard.attention(t.query, keys, values, mask=Causal(), offset="end")

    def of_layer(t):
        query, *new = projected(t)
        keys, values = joined(t.past, new)
        return packed(regard.attention(query, keys, values))

    assert_expected(of_arrays, Given("", sizes), Reading(causal=True))
    assert_expected(of_layer, Given("", sizes))


def test_embeddings_without_weights_attend_to_themselves():
    assert_expected(lambda t: regard.attention(*[t.embeddings] * 3), Given(""))


@pytest.mark.parametrize("pairs", [False, True])
def test_positions_turn_queries_and_keys_as_the_reading_says(pairs):
    def adapter(t):
        where = {"query_positions": t.positions, "key_positions": t.positions}
        return attention(t, positions=regard.positions.Rotary(interleaved=pairs, **where))

    assert_expected(adapter, Given(""), Reading(rotary="pairs" if pairs else "halves"))


@pytest.mark.parametrize("past", [False, True])
def test_tables_of_cosines_turn_new_tokens_and_no_keys_of_the_past(past):
    def turned(x, t):
        cosines, sines = t.rotary
        first, second = np.split(x, 2, -1)
        parts = first * cosines - second * sines, second * cosines + first * sines
        return np.concatenate(parts, -1)

    def adapter(t):
        keys, values = turned(t.key, t), t.value
        if past:
            keys, values = joined(t.past, (keys, values))
        return regard.attention(turned(t.query, t), keys, values)

    assert_expected(adapter, Given(""), Reading(rotary="halves"))


@pytest.mark.parametrize("sizes", SIZES, ids=("square", "rectangle"))
def test_gradients_are_expected_by_the_names_of_fields(sizes):
    def adapter(t):
        found = regard.gradients(t.query, t.key, t.value, t.grad_output)
        return {"query": found.query, "key": found.key, "value": found.value}

    assert_expected(adapter, Given("", sizes))


def test_every_reading_has_gradients():
    fields = frozenset({"embeddings", "W_q", "W_k", "W_v", "W_o", "grad_output"})
    for reading in (PLAIN, Reading(causal=True), Reading(rotary="pairs"), Reading(alibi=True)):
        task = Task(Given("", fields=fields), fields, reading, ("embeddings", "W_k"))
        assert task.expected["W_k"].shape == task.given.array("W_k").shape


def test_values_have_the_axes_that_are_said():
    fields = frozenset({"embeddings", "W_q", "W_k", "W_v"})
    task = Task(Given("", fields=fields), fields)
    lengths = {"B": 2, "H": 2, "G": 2, "L": 5, "S": 5, "D": 4}
    assert task.axes("scores") == ("B", "H", "L", "S")
    assert task.values["queries"].shape == tuple(lengths[x] for x in task.axes("queries"))
    assert "B" not in task.axes("W_q")


def test_a_field_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(AttributeError, match=r"t has no field keys; its fields are query, key, "):
        TaskView(Given("")).keys  # noqa: B018


def test_what_is_read_of_a_window_says_whether_it_has_two_sides():
    left, both = TaskView(Given("")), TaskView(Given(""))
    left.window[0]
    _, _ = both.window
    assert reads_of(left) == {"window"}
    assert reads_of(both) > {"window"}


def test_an_array_that_was_changed_is_told():
    view = TaskView(Given(""))
    view.query[:] = 0
    view.key.sum()
    assert changed_in(view, np.asarray) == ("query",)


def test_every_query_sees_a_key_whatever_else_hides_some():
    fields = frozenset({"mask", "key_mask", "causal"})
    for sizes in SIZES:
        for reading in (PLAIN, Reading(aligned="start")):
            given = Given("", sizes, fields, asks=fields)
            task = Task(given, fields, reading)
            assert task.visible.any(-1)[
                np.broadcast_to(task.compared[:, None], task.visible.shape[:3])
            ].all()
