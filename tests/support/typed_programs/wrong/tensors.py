"""Mistakes with tensors; each is found by a type checker, and fails when it runs."""

import torch

import regard
from regard.interop.torch import scaled_dot_product_attention

x = torch.randn(2, 3, 4)

print(regard.attention(x, x, x).weights)  # wrong: return_weights is missing
print(regard.attention(x, x, x, return_lse=True).lse.asnumpy())  # wrong: a tensor has .numpy()
regard.attention(x, x, x, attn_mask=x[0] > 0)  # wrong: the option is called mask
regard.attention(x, x, x, out=[0.0])  # wrong: a list instead of a tensor
scaled_dot_product_attention(x, x, x, causal=True)  # wrong: torch calls it is_causal
