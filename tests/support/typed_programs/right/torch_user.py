"""A PyTorch user replaces one call, reads weights, and runs a layer's weights on regard."""

import torch
from torch import Tensor, nn

import regard
from regard.interop.torch import patched, scaled_dot_product_attention


def attend(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    return regard.attention(query, key, value, mask=padding[:, None, None, :], bias=None)


@torch.no_grad()
def layer_of(module: nn.MultiheadAttention) -> regard.MultiHeadAttention:
    width = module.embed_dim
    weights = module.in_proj_weight
    assert weights is not None
    q, k, v = (weights[start : start + width].T for start in range(0, 3 * width, width))
    return regard.MultiHeadAttention(q, k, v, module.out_proj.weight.T, heads=module.num_heads)


query = torch.randn(2, 4, 3, 8)
padding = torch.ones(2, 3, dtype=torch.bool)
print(attend(query, query, query, padding).shape)

result = regard.attention(query, query, query, causal=True, return_weights=True)
shares: Tensor = result.weights
print(shares.sum(dim=-1), regard.softmax(query).sum().item())

x = torch.randn(5, 8)
layer = layer_of(nn.MultiheadAttention(8, 2, bias=False))
print(layer(x, causal=True).mean().item(), layer(x, return_weights=True).weights.shape)

room = torch.empty_like(query)
regard.attention(query, query, query, out=room)
with patched() as calls:
    print(scaled_dot_product_attention(query, query, query, is_causal=True).dtype, calls.answered)

cache = regard.KVCache()
cache.append(query[0], query[0])
last, lse = cache.attend(query[0, :, -1:], return_lse=True)
print(last.device, lse.shape, torch.equal(last, last.clone()))
