"""The operations of the block around attention: the factor of a norm, and activations.

One entry each, as in operations.py, which has them in its table. All else in a block, such as the
mean of a row, is made of the operations of attention. Must not know which steps there are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.textbook.activations import (
    gelu,
    gelu_slope,
    gelu_tanh,
    gelu_tanh_slope,
    relu,
    silu,
    silu_slope,
)
from regard.textbook.operation import Operation, wide

_GELU = Operation(
    value=gelu,
    formula="$0·Φ($0)",
    latex=r"$0 \, \Phi($0)",
    names="$n0 · Φ($n0)",
    numbers="$0 × Φ($0)",
    latex_numbers=r"$b0 \, \Phi\left($0\right)",
    numpy="$0 * math.erfc(-($0) / math.sqrt(2)) / 2",
    hidden=0.0,
    adjoint=("gelu_slope 0, multiply d _",),
)
_CUBE = "np.sqrt(2 / np.pi) * ($0 + 0.044715 * ($0) ** 3)"

BLOCK_OPERATIONS: dict[str, Operation] = {
    # What the numbers of a row are multiplied by, from the mean of their squares.
    "norm_factor": Operation(
        value=lambda mean, epsilon: 1 / np.sqrt(wide(mean) + epsilon),
        formula="1 / √($0 + $1)",
        latex=r"1 / \sqrt{$0 + $1}",
        names="1 / √($n0 + $n1)",
        numbers="1 / √($0 + $1)",
        latex_numbers=r"1 / \sqrt{$0 + $1}",
        numpy="1 / np.sqrt($0 + $1)",
        # −½ y / ($0 + $1)
        adjoint=("add 0 0 1 1, divide y _, negate _, multiply _ d", ""),
    ),
    "gelu": _GELU,
    "gelu_slope": replace(
        _GELU,
        value=gelu_slope,
        formula="Φ($0) + $0·φ($0)",
        latex=r"\Phi($0) + $0 \, \varphi($0)",
        names="Φ($n0) + $n0·φ($n0)",
        numbers="Φ($0) + $0 × φ($0)",
        latex_numbers=r"\Phi\left($0\right) + $b0 \, \varphi\left($0\right)",
        numpy="math.erfc(-($0) / math.sqrt(2)) / 2 "
        "+ $0 * np.exp(-($0) ** 2 / 2) / np.sqrt(2 * np.pi)",
        adjoint=("",),
    ),
    "gelu_tanh": replace(
        _GELU,
        value=gelu_tanh,
        formula="½·$0·(1 + tanh(√(2/π)·($0 + 0.044715·$0³)))",
        latex=r"\frac{1}{2} $0 (1 + \tanh(\sqrt{2 / \pi} ($0 + 0.044715 \, $0^3)))",
        names="½·$n0·(1 + tanh(√(2/π)·($n0 + 0.044715·$n0³)))",
        numbers="½ × $0 × (1 + tanh(√(2/π) × ($0 + 0.044715 × ($0)³)))",
        latex_numbers=r"\frac{1}{2} \cdot $b0 \cdot \left(1 + \tanh\left(\sqrt{2 / \pi} "
        r"\left($0 + 0.044715 \cdot $b0^3\right)\right)\right)",
        numpy=f"$0 * (1 + np.tanh({_CUBE})) / 2",
        adjoint=("gelu_tanh_slope 0, multiply d _",),
    ),
    "gelu_tanh_slope": replace(
        _GELU,
        value=gelu_tanh_slope,
        formula="½·(1 + tanh u) + ½·$0·u′·(1 − tanh² u), where u = √(2/π)·($0 + 0.044715·$0³)",
        latex=r"\frac{1}{2} (1 + \tanh u) + \frac{1}{2} $0 u' (1 - \tanh^2 u),\; "
        r"u = \sqrt{2 / \pi} ($0 + 0.044715 \, $0^3)",
        names="the slope of gelu at $n0",
        numbers="the slope of gelu at $0",
        latex_numbers=r"\mathrm{gelu}'\left($0\right)",
        numpy=f"(1 + np.tanh({_CUBE})) / 2 + $0 * np.sqrt(2 / np.pi) * "
        f"(1 + 0.134145 * ($0) ** 2) / (2 * np.cosh({_CUBE}) ** 2)",
        adjoint=("",),
    ),
    "silu": replace(
        _GELU,
        value=silu,
        formula="$0 / (1 + exp(−$0))",
        latex=r"$0 / (1 + \exp(-$0))",
        names="$n0 / (1 + exp(−$n0))",
        numbers="$0 / (1 + exp(−$b0))",
        latex_numbers=r"\frac{$0}{1 + \exp\left(-$b0\right)}",
        numpy="$0 / (1 + np.exp(-($0)))",
        adjoint=("silu_slope 0, multiply d _",),
    ),
    "silu_slope": replace(
        _GELU,
        value=silu_slope,
        formula="σ($0)·(1 + $0·(1 − σ($0))), where σ(x) = 1 / (1 + exp(−x))",
        latex=r"\sigma($0) (1 + $0 (1 - \sigma($0))),\; \sigma(x) = 1 / (1 + \exp(-x))",
        names="σ($n0)·(1 + $n0·(1 − σ($n0)))",
        numbers="σ($0) × (1 + $0 × (1 − σ($0)))",
        latex_numbers=r"\sigma\left($0\right) \left(1 + $b0 \left(1 - "
        r"\sigma\left($0\right)\right)\right)",
        numpy="(1 + $0 / (1 + np.exp($0))) / (1 + np.exp(-($0)))",
        adjoint=("",),
    ),
    "relu": replace(
        _GELU,
        value=relu,
        formula="max($0, 0)",
        latex=r"\max($0, 0)",
        names="max($n0, 0)",
        numbers="max($0, 0)",
        latex_numbers=r"\max\left($0, 0\right)",
        numpy="np.maximum($0, 0.0)",
        adjoint=("positive 0, multiply d _",),
    ),
}
