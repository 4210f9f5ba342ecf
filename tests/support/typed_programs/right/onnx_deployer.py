"""A deployer checks an exported graph against regard, and computes its operator by hand."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from regard.interop.onnx import AttentionOutputs, Backend, attention


def exported() -> onnx.ModelProto:
    shapes = {"Q": [1, 2, 3, 4], "K": [1, 2, 3, 4], "V": [1, 2, 3, 4]}
    inputs = [make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    node = make_node("Attention", [*shapes], ["Y"], is_causal=1)
    graph = make_graph([node], "attention", inputs, [make_tensor_value_info("Y", 1, shapes["Q"])])
    return make_model(graph, opset_imports=[make_opsetid("", 23)])


rng = np.random.default_rng(0)
Q, K, V = (rng.normal(size=(1, 2, 3, 4)).astype(np.float32) for _ in range(3))
by_hand: AttentionOutputs = attention(Q, K, V, is_causal=1, qk_matmul_output_mode=3)
output: NDArray[np.float32] = by_hand.Y
scores = by_hand.qk_matmul_output
assert scores is not None
print(output.shape, scores.shape, by_hand.present_key.shape)
print(np.array_equal(Backend.prepare(exported()).run([Q, K, V])[0], output))
