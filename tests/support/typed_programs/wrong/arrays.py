"""Mistakes in calls on NumPy arrays; each is found by a type checker, and fails when it runs."""

import numpy as np

import regard
from regard import masks

rng = np.random.default_rng(0)
query, key, value = (rng.normal(size=(3, 4)) for _ in range(3))
literal = np.array([[1.0, 0.0], [0.0, 1.0]])

result = regard.attention(query, key, value, return_weights=True)
print(result.weigths)  # wrong: a typo in the name of a result
print(result.lse)  # wrong: return_lse is missing
print(regard.attention(query, key, value).lse)  # wrong: return_lse is missing
print(regard.attention(literal, literal, literal, return_lse=True).lsee)  # wrong: a typo
regard.attention(query, key, value, casual=True)  # wrong: a misspelt option
regard.attention(query, key, value, causal="yes")  # wrong: an option of another type
regard.attention(query, key, value, window=4)  # wrong: a window is a pair
regard.attention(query, key, value, offset="start")  # wrong: only "end" is a word
regard.attention(query, key, value, precision="highest")  # wrong: no such precision
regard.attention(query, key, value, mask=masks.Causal)  # wrong: the class instead of a mask
regard.attention(query, key, value, mask=np.zeros((3, 3)))  # wrong: numbers belong to bias
regard.attention(query, key, value, out=[[0.0] * 4] * 3)  # wrong: a list instead of an array
regard.attention(query, key, None)  # wrong: no value
regard.attention(query, key)  # wrong: no value
regard.attention("query", key, value)  # wrong: a string instead of an array
