"""Mechanisms of model repositories: streams that attend together, and others beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard

Array = Any


def _softmax(scores: Array) -> Array:
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def _heads(rows: Array, count: int) -> Array:
    return rows.reshape(*rows.shape[:-1], count, -1).swapaxes(-2, -3)


def _together(q: Array, k: Array, v: Array) -> Array:
    out = _softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    return out.swapaxes(-2, -3).reshape(*out.shape[:-3], out.shape[-2], -1)


class JointInNumPy:
    """Two streams, each with weights of its own; the text comes first."""

    wrong = False

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        rng = np.random.default_rng(0)
        self.heads = heads
        self.w_qkv_x, self.w_qkv_c = rng.normal(size=(2, dim, 3 * dim))
        self.w_out_x, self.w_out_c = rng.normal(size=(2, dim, dim))

    def __call__(self, x: Array, c: Array) -> tuple[Array, Array]:
        own = [np.split(x @ self.w_qkv_x, 3, axis=-1), np.split(c @ self.w_qkv_c, 3, axis=-1)]
        q = np.concatenate((own[1][0], own[0][0]), axis=1)
        k = np.concatenate((own[1][1], own[0][1]), axis=1)
        v = np.concatenate((own[1][2], own[0][2]), axis=1)
        out = _together(*(_heads(one, self.heads) for one in (q, k, v)))
        n = x.shape[1] if self.wrong else c.shape[1]
        first, second = out[:, :n], out[:, n:]
        if self.wrong:
            return first @ self.w_out_x, second @ self.w_out_c
        return second @ self.w_out_x, first @ self.w_out_c


class JointInNumPySplitWrongly(JointInNumPy):
    wrong = True


def joint_of_dictionaries(
    img: Array, txt: Array, p_img: dict[str, Array], p_txt: dict[str, Array], heads: int = 4
) -> tuple[Array, Array]:
    q = np.concatenate((img @ p_img["wq"], txt @ p_txt["wq"]), axis=1)
    k = np.concatenate((img @ p_img["wk"], txt @ p_txt["wk"]), axis=1)
    v = np.concatenate((img @ p_img["wv"], txt @ p_txt["wv"]), axis=1)
    out = _together(_heads(q, heads), _heads(k, heads), _heads(v, heads))
    n = img.shape[1]
    return out[:, :n] @ p_img["wo"], out[:, n:] @ p_txt["wo"]


def joint_of_dictionaries_split_wrongly(
    img: Array, txt: Array, p_img: dict[str, Array], p_txt: dict[str, Array], heads: int = 4
) -> tuple[Array, Array]:
    q = np.concatenate((img @ p_img["wq"], txt @ p_txt["wq"]), axis=1)
    k = np.concatenate((img @ p_img["wk"], txt @ p_txt["wk"]), axis=1)
    v = np.concatenate((img @ p_img["wv"], txt @ p_txt["wv"]), axis=1)
    out = _together(_heads(q, heads), _heads(k, heads), _heads(v, heads))
    n = txt.shape[1]
    return out[:, n:] @ p_img["wo"], out[:, :n] @ p_txt["wo"]


def _in_torch(wrong: str = "") -> Any:
    import torch

    class Joint(torch.nn.Module):  # type: ignore[misc]
        """As in diffusers: added projections for the text."""

        def __init__(self, dim: int = 16, heads: int = 4) -> None:
            super().__init__()
            self.heads = heads
            self.to_q, self.to_k, self.to_v = (torch.nn.Linear(dim, dim) for _ in range(3))
            self.add_q_proj = torch.nn.Linear(dim, dim)
            self.add_k_proj = torch.nn.Linear(dim, dim)
            self.add_v_proj = torch.nn.Linear(dim, dim)
            self.to_out = torch.nn.ModuleList([torch.nn.Linear(dim, dim), torch.nn.Dropout(0.0)])
            self.to_add_out = torch.nn.Linear(dim, dim)

        def forward(self, hidden_states: Any, encoder_hidden_states: Any) -> tuple[Any, Any]:
            b, n, _ = hidden_states.shape
            query = torch.cat(
                [self.to_q(hidden_states), self.add_q_proj(encoder_hidden_states)], dim=1
            )
            key = torch.cat(
                [self.to_k(hidden_states), self.add_k_proj(encoder_hidden_states)], dim=1
            )
            value = torch.cat(
                [self.to_v(hidden_states), self.add_v_proj(encoder_hidden_states)], dim=1
            )
            query, key, value = (
                one.view(b, -1, self.heads, one.shape[-1] // self.heads).transpose(1, 2)
                for one in (query, key, value)
            )
            if wrong == "scale":
                query = query / query.shape[-1] ** 0.5
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            out = out.transpose(1, 2).reshape(b, -1, self.heads * out.shape[-1])
            n = encoder_hidden_states.shape[1] if wrong == "split" else n
            own, other = out[:, :n], out[:, n:]
            if wrong == "split":
                own, other = other, own
            return self.to_out[0](own), self.to_add_out(other)

    return Joint


JOINT_WRONG = "streams_split_in_another_order"


@pytest.mark.parametrize("function", [JointInNumPy, joint_of_dictionaries])
def test_two_streams_that_attend_together_are_right(function: Any) -> None:
    assert regard.diagnose(function).verdict in ("right", "fragile")


@pytest.mark.parametrize(
    "function", [JointInNumPySplitWrongly, joint_of_dictionaries_split_wrongly]
)
def test_two_streams_whose_output_is_split_in_another_order_are_named(function: Any) -> None:
    assert [one.name for one in regard.diagnose(function).mistakes] == [JOINT_WRONG]


@pytest.mark.needs("torch")
def test_two_streams_in_torch() -> None:
    assert regard.diagnose(_in_torch()).verdict == "right"
    assert [x.name for x in regard.diagnose(_in_torch("split")).mistakes] == [JOINT_WRONG]
    assert [x.name for x in regard.diagnose(_in_torch("scale")).mistakes] == ["scale_by_width"]


class HeadsOverlap:
    """Each head has its columns."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        rng = np.random.default_rng(0)
        self.heads, self.d = heads, width // heads
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(size=(4, width, width))

    def __call__(self, x: Array) -> Array:
        q, k, v = x @ self.W_q, x @ self.W_k, x @ self.W_v
        out = []
        for h in range(self.heads):
            own = slice(h, h + self.d)
            a = _softmax(q[..., own] @ k[..., own].swapaxes(-1, -2) / np.sqrt(self.d))
            out.append(a @ v[..., own])
        return np.concatenate(out, axis=-1) @ self.W_o


def test_heads_that_share_columns_are_named() -> None:
    assert [one.name for one in regard.diagnose(HeadsOverlap).mistakes] == ["heads_overlap"]


def _of_images(*, zeroes: bool, bias: bool = False) -> Any:
    import torch

    class GatedCrossAttention(torch.nn.Module):  # type: ignore[misc]
        """Tokens of the text attend to the last image; those before the first get nothing."""

        def __init__(self, dim: int = 16, dim_visual: int = 16, heads: int = 2) -> None:
            super().__init__()
            self.heads = heads
            self.to_q = torch.nn.Linear(dim, dim, bias=False)
            self.to_k = torch.nn.Linear(dim_visual, dim, bias=False)
            self.to_v = torch.nn.Linear(dim_visual, dim, bias=False)
            self.to_out = torch.nn.Linear(dim, dim, bias=bias)
            self.gate = torch.nn.Parameter(torch.tensor([0.5]))

        def forward(self, y: Any, vis_x: Any, media_locations: Any = None) -> Any:
            t, n = vis_x.shape[1:3]
            rows = vis_x.flatten(1, 2)
            q, k, v = (
                one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for one in (self.to_q(y), self.to_k(rows), self.to_v(rows))
            )
            sim = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            number = media_locations.cumsum(-1)
            own = torch.arange(t).repeat_interleave(n) + 1
            keep = number[:, None, :, None] == own
            sim = sim.masked_fill(~keep, torch.finfo(sim.dtype).min)
            attn = sim.softmax(-1)
            if zeroes:
                attn = attn.masked_fill((number == 0)[:, None, :, None], 0.0)
            out = (attn @ v).transpose(1, 2).flatten(2)
            return y + self.gate.tanh() * self.to_out(out)

    return GatedCrossAttention


@pytest.mark.needs("torch")
def test_a_text_that_attends_to_its_last_image() -> None:
    assert regard.diagnose(_of_images(zeroes=True)).verdict == "right"
    assert regard.diagnose(_of_images(zeroes=True, bias=True)).verdict == "right"
    wrong = regard.diagnose(_of_images(zeroes=False)).mistakes
    assert [one.name for one in wrong] == ["images_seen_before_the_first"]
