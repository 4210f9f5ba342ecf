"""A JAX user calls attention on its arrays, and within jit."""

import jax
import jax.numpy as jnp

import regard
from regard.interop.jax import dot_product_attention


@jax.jit
def model(x: jax.Array) -> jax.Array:
    heads = x[:, None]
    return dot_product_attention(heads, heads, heads, is_causal=True)[:, 0] @ x.T


x = jnp.eye(3)
output, lse = regard.attention(x, x, x, return_lse=True, offset="end", causal=True)
moved: jax.Array = output.at[0].set(0.0)
print(moved, lse.sum(), model(x))

residual: jax.Array
_, residual = dot_product_attention(x[:, None], x[:, None], x[:, None], return_residual=True)
print(residual.shape, regard.weights(x, x, lse, rows=slice(1), causal=True).devices())
