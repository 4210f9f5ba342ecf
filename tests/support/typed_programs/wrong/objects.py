"""Mistakes with caches, layers, explanations and diagnoses; each is found by a type checker."""

import numpy as np

import regard
from regard.testing import assert_attention_correct

x = np.random.default_rng(0).normal(size=(3, 4))

cache = regard.KVCache()
cache.append(x, x)
cache.attend(x, offset=0)  # wrong: a cache knows where its queries are
print(cache.attend(x, return_lse=True).weights)  # wrong: return_weights is missing
cache.append(x, x, lengths="3")  # wrong: a string instead of a number
regard.KVCache(16)  # wrong: capacity is passed by name

print(regard.merge([x], [x[:, 0]]).weights)  # wrong: there is no such result
regard.merge([x])  # wrong: the log-sum-exps are missing

layer = regard.MultiHeadAttention(np.eye(4), np.eye(4), np.eye(4), heads=2)
layer(x, is_causal=True)  # wrong: the option is called causal
layer(x, return_lse=True)  # wrong: a layer has no log-sum-exp
print(layer(x).weights)  # wrong: return_weights is missing
layer.explain(x, rows=3)  # wrong: no such option
layer.gradients(x)  # wrong: the gradient of the output is missing
print(layer.gradients(x, x).W_p)  # wrong: there is no such weight
print(layer.gradients(x, x, wrt="x").W_q + 1)  # wrong: it may be None, not asked for
print(regard.gradients(x, x, x, x, wrt="query").key + 1)  # wrong: it may be None, not asked for

regard.explain(x, x)  # wrong: the values are missing
regard.explain(x, x, x, key_label=["a", "b", "c"])  # wrong: a misspelt option
regard.explain(x, w_q=np.eye(4), w_k=np.eye(4), w_v=np.eye(4))  # wrong: they are called W_q …
regard.explain(x, x, x, softmax="plain")  # wrong: no such softmax
explanation = regard.explain(x, x, x)
explanation.step["weights"]  # wrong: it is called steps
explanation.why("weights", 0, 0).latx()  # wrong: a typo
regard.softmax(x, dim=-1)  # wrong: the option is called axis

regard.diagnose(x)  # wrong: an array is no function
regard.diagnose(regard.attention, timeout=3.0)  # wrong: there is no such option
assert_attention_correct(regard.attention, head=2)  # wrong: a misspelt option
problem = regard.Problem(queries=[1, 0], keys=[[2, 1], [0, 3]], values=[[1], [0]])
problem.replace(titel="Pets")  # wrong: a misspelt field
regard.Problem(query=x, keys=x, values=x)  # wrong: the field is called queries
regard.atention(x, x, x)  # wrong: a misspelt function
regard.set_threads("all")  # wrong: a number of threads
