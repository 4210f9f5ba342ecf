"""Wrong attentions that take some keys at a time, as people write them: what has to be named.

Written without a look at the catalogue, and shares no code with the package.
"""

from __future__ import annotations

import numpy as np

INFINITY = float("inf")


def streaming(wrong, block=2):
    """One pass over the keys with a running maximum, sum and output, for matrices."""

    def f(q, k, v):
        n, s = len(q), len(k)
        m = np.full((n, 1), -INFINITY)
        z, out = np.zeros((n, 1)), np.zeros((n, v.shape[1]))
        step = 1 if wrong in ("first_key_lost", "last_key_lost") else block
        stop = {"last_block_lost": s // block * block, "final_block_lost": (s - 1) // block * block}
        stop["last_key_lost"] = s - 1
        begin = {"first_block_skipped": block, "first_key_lost": 1}.get(wrong, 0)
        for start in range(begin, stop.get(wrong, s), step):
            kj, vj = k[start : start + step], v[start : start + step]
            if wrong == "block_padding_counts" and len(kj) < block:
                kj = np.concatenate([kj, np.zeros((block - len(kj), k.shape[1]))])
                vj = np.concatenate([vj, np.zeros((block - len(vj), v.shape[1]))])
            a = q @ kj.T / np.sqrt(q.shape[1])
            top = a.max(axis=1, keepdims=True)
            new = np.maximum(m, top)
            fade = np.exp(m - new)
            p = np.exp(a - (top if wrong == "block_shifted_by_own_maximum" else new))
            of_out = of_sum = fade
            if wrong in ("block_output_not_rescaled", "blocks_not_rescaled"):
                of_out = 1.0
            if wrong in ("block_sum_not_rescaled", "blocks_not_rescaled"):
                of_sum = 1.0
            back = np.where(np.isinf(m), 0.0, np.exp(np.where(np.isinf(m), 0, new - m)))
            if wrong in ("block_correction_inverted", "block_output_correction_inverted"):
                of_out = back
            if wrong == "block_correction_inverted":
                of_sum = back
            z = z * of_sum + p.sum(axis=1, keepdims=True)
            out = out * of_out + p @ vj
            if wrong == "block_divided_each_time":
                out = out / z
            m = new
        return out if wrong == "block_divided_each_time" else out / z

    return f


def merging(wrong, count=2):
    """Every block by itself, merged at the end."""

    def f(q, k, v):
        outs, maxima, sums = [], [], []
        folded = ("merged_lse_is_the_larger", "blocks_merged_by_each_others_share")
        parts = 3 if wrong in folded else count
        for kj, vj in zip(np.array_split(k, parts, -2), np.array_split(v, parts, -2), strict=True):
            if not kj.size:
                continue
            a = q @ kj.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
            m = a.max(-1, keepdims=True)
            e = np.exp(a - m)
            outs.append(e @ vj / e.sum(-1, keepdims=True))
            maxima.append(m)
            sums.append(e.sum(-1, keepdims=True))
        outs, maxima, sums = np.stack(outs), np.stack(maxima), np.stack(sums)
        lse = maxima + np.log(sums)
        if wrong == "blocks_averaged":
            return outs.mean(axis=0)
        if wrong == "blocks_added":
            return outs.sum(axis=0)
        if wrong == "only_last_block":
            return outs[-1]
        if wrong == "only_first_block":
            return outs[0]
        if wrong == "blocks_merged_by_each_others_share":
            out, so_far = outs[0], lse[0]
            for other, its in zip(outs[1:], lse[1:], strict=True):
                out = other + (out - other) / (1 + np.exp(so_far - its))
                so_far = np.logaddexp(so_far, its)
            return out
        if wrong == "merged_lse_is_the_larger":
            out, so_far = outs[0], lse[0]
            for other, its in zip(outs[1:], lse[1:], strict=True):
                top = np.maximum(so_far, its)
                old, new = np.exp(so_far - top), np.exp(its - top)
                out, so_far = (old * out + new * other) / (old + new), top
            return out
        share = {
            "blocks_merged_by_lse": lse,
            "blocks_merged_by_sum": sums,
            "blocks_merged_by_maximum": np.exp(maxima),
            "blocks_merged_inverted": np.exp(-lse),
        }.get(wrong, np.exp(lse))
        return (share / share.sum(axis=0) * outs).sum(axis=0)

    return f


def causal_in_blocks(wrong, block=2):
    """Causal attention that looks only at whole blocks on and under the diagonal."""

    def f(q, k, v):
        n = q.shape[-2]
        i, j = np.arange(n)[:, None], np.arange(n)[None, :]
        see = j <= i
        if wrong == "block_on_the_diagonal_not_masked":
            see = j // block <= i // block
        if wrong == "block_on_the_diagonal_skipped":
            see = (j // block < i // block) | (i < 0)
        a = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        a = np.where(see, a, -1e9)
        e = np.exp(a - a.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ v

    return f


STREAMING = (
    "block_output_not_rescaled",
    "block_sum_not_rescaled",
    "blocks_not_rescaled",
    "block_correction_inverted",
    "block_output_correction_inverted",
    "block_shifted_by_own_maximum",
    "block_divided_each_time",
    "last_key_lost",
    "first_key_lost",
    "last_block_lost",
    "final_block_lost",
    "first_block_skipped",
    "block_padding_counts",
)
MERGING = (
    "blocks_averaged",
    "blocks_added",
    "blocks_merged_by_lse",
    "blocks_merged_by_sum",
    "blocks_merged_by_maximum",
    "blocks_merged_inverted",
    "blocks_merged_by_each_others_share",
    "merged_lse_is_the_larger",
    "only_last_block",
    "only_first_block",
)
CAUSAL = ("block_on_the_diagonal_not_masked", "block_on_the_diagonal_skipped")
