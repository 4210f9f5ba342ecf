"""The fused kernel reads and writes nothing beyond its arrays, at either end, to the byte.

Every array of a call lies flush with a page that nobody may touch. One byte too far ends the
process, so the calls are made in a process of their own, which first shows that it can fail.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from calls import every_target
from places import SUPPORT

pytestmark = [
    pytest.mark.needs("fused"),
    pytest.mark.skipif(sys.platform != "linux", reason="mprotect as Linux has it"),
]

START = """
import itertools, sys
import numpy as np
from guarded import Pages
import regard
from regard.compute import native
from regard.compute.kernels import fused
native.use_target(sys.argv[1])
try:
    import ml_dtypes
    DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
except ImportError:
    DTYPES = [np.float32, np.float64, np.float16]
rng = np.random.default_rng(0)
pages = {name: Pages(1 << 20) for name in ("q", "k", "v", "mask", "bias", "out")}

def in_place(request, *rest, choose=fused._output):
    output = choose(request, *rest)
    out = request.options.out
    assert out is None or output.ctypes.data == out.ctypes.data, "not into out"
    return output

fused._output = in_place

def call(G, R, L, S, D, E, dtype, end, threads=1, mask=False, bias=False, plain=False, **options):
    shapes = {"q": (G * R, L, D), "k": (G, S, D), "v": (G, S, E)}
    arrays = {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}
    if mask:
        arrays["mask"] = rng.random((G * R, L, S)) < 0.8
    if bias:
        arrays["bias"] = rng.normal(size=(G * R, L, S)).astype(bias)
    placed = {n: pages[n].place(x, end) for n, x in arrays.items()}
    q, k, v = (placed.pop(n) for n in "qkv")
    out = pages["out"].place(np.empty((G * R, L, E), dtype), end, writable=True)
    if plain:
        result = native.fast_path(q, k, v, None, None, False, None, None, None, None, None,
                                  "working", False, False, out, None, None)
    else:
        result = regard.attention(
            q, k, v, kernel="fused", threads=threads, out=out, **placed, **options
        )
    assert result is out
    copies = [x.copy() for x in arrays.values()]
    expected = regard.attention(
        *copies[:3], **dict(zip(placed, copies[3:])), kernel="fused", **options
    )
    assert result.tobytes() == expected.tobytes(), (G, R, L, S, D, E, dtype, end)

"""

# Every array that native code is handed in a backward pass lies flush with such a page.
BACKWARD = """
pages = [Pages(1 << 18) for _ in range(30)]

class Guarded:
    def __init__(self, native):
        self.native = native

    def __getattr__(self, name):
        return getattr(self.native, name)

    def run_backward(self, *arguments):
        free, back = iter(pages), []

        def put(x):
            if isinstance(x, list):
                return [tuple(map(put, rule)) for rule in x]
            if not isinstance(x, np.ndarray):
                return x
            own = x[tuple(slice(None if s else 1) for s in x.strides)]  # broadcast axes once
            at = next(free).place(np.ascontiguousarray(own), end, writable=x.flags.writeable)
            back.append((own, at))
            strides = [s if t else 0 for s, t in zip(at.strides, x.strides)]
            return np.lib.stride_tricks.as_strided(at, x.shape, strides)

        self.native.run_backward(*map(put, arguments))
        for own, at in back:
            if own.flags.writeable:
                own[...] = at

def call(G, R, L, S, D, E, dtype, given=False, mask=False, bias=None, **options):
    shapes = (G * R, L, D), (G, S, D), (G, S, E), (G * R, L, E)
    arrays = [rng.normal(size=s).astype(dtype) for s in shapes]
    for x in arrays:
        x.flags.writeable = False
    options |= {"wrt": ("query", "key", "value", "scale"), "kernel": "fused"}
    if mask:
        options["mask"] = rng.random((G * R, L, S)) < 0.8
    if bias is not None:
        options["bias"] = rng.normal(size=bias).astype(dtype)
        options["wrt"] += ("bias",)
    if "sink" in options:
        options["wrt"] += ("sink",)
    own = {n: x for n, x in options.items() if n not in ("wrt", "kernel")}
    if given:
        options["output"], options["lse"] = regard.attention(
            *arrays[:3], return_lse=True, kernel="fused", **own
        )
        options["grad_lse"] = rng.normal(size=(G * R, L))
    native.module = module
    expected = regard.gradients(*arrays, threads=1, **options)
    native.module = Guarded(module)
    result = regard.gradients(*arrays, threads=1 + S % 3, **options)
    for one, other in zip(result, expected):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), (G, R, L, S, D, E, dtype)

module = native.module
for n in range(1, 131):
    end, dtype = n % 2 == 0, DTYPES[n // 2 % len(DTYPES)]
    small = 1 + n * 7 % 40
    call(1, 1, 1 + n % 14, (1, 17, 65, 130)[n % 4], n, small, dtype, given=n % 3 == 0)
    call(1, 1, 1 + n % 14, (130, 65, 17, 1)[n % 4], small, n, dtype, given=n % 3 == 1)
    call(1, 2, 7, n, 16, small, dtype, mask=n % 3 == 0, bias=(2, 7, n)[n % 4 :])
    call(1, 1, n, 33, small, 16, dtype, causal=True, offset=5, sink=0.5)
for S in (127, 128, 129, 255, 256, 257, 513):
    for end, dtype in itertools.product((True, False), DTYPES):
        call(1, 2, 97, S, 16, 24, dtype, given=True, mask=True, sink=0.1, softcap=3.0)
        call(2, 1, 100, S, 24, 16, dtype, bias=(1, 1, S), causal=True, offset=S - 100)
"""

# The buffers of a cache lie flush with such a page; a cache that is full has no room behind them.
CACHES = """
def call(H, G, L, S, D, E, end, **options):
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((H, L, D), (G, S, D), (G, S, E)))
    cache = regard.KVCache(dtype="int8", capacity=S)
    cache.append(k, v)
    options |= {"kernel": "fused", "causal": False}
    expected = cache.attend(q, threads=1, **options)
    cache._buffers = [pages[n].place(x, end) for n, x in zip("kv", cache._buffers)]
    result = cache.attend(pages["q"].place(q, end), **options)
    assert result.tobytes() == expected.tobytes(), (H, G, L, S, D, E, end)

for n in range(1, 131):
    end, small = n % 2 == 0, 1 + n * 7 % 40
    call(2, 2, 1 + n % 3 % 2, (1, 17, 65, 130)[n % 4], n, small, end)
    call(6, 2, 1, (130, 65, 17, 1)[n % 4], small, n, end, softcap=2.0)
    call(2, 1, 1 + n % 14, n, (16, 64)[n % 3 % 2], (64, 33)[n % 5 % 2], not end)
for S, L, end in itertools.product((255, 257, 512), (1, 4, 13), (True, False)):
    call(2, 2, L, S, 64, 128, end)
    call(4, 1, L, S, 130, 65, end, mask=rng.random((4, L, S)) < 0.5)
"""

CALLS = {
    "gradients": BACKWARD,
    "int8 caches": CACHES,
    "every width": """
for D in range(1, 131):
    for n, (S, end) in enumerate(itertools.product((1, 17, 65, 130), (True, False))):
        call(1, 1, 1 + D % 14, S, D, 1 + (D * 7 + n) % 40, DTYPES[(D + n) % len(DTYPES)], end)
        call(1, 1, 3, S, D, D, DTYPES[(D + n // 2) % 2], end, plain=True)
""",
    "every value width": """
for E in range(1, 131):
    for n, (S, end) in enumerate(itertools.product((1, 17, 65, 130), (True, False))):
        call(1, 1, 1 + E % 14, S, 1 + (E * 5 + n) % 40, E, DTYPES[(E + n) % len(DTYPES)], end)
        call(1, 1, 1 + n, S, 8, E, DTYPES[(E + n // 2) % 2], end, plain=True)
""",
    "every number of keys": """
for S in range(1, 131):
    for n, (D, end) in enumerate(itertools.product((1, 16, 33, 64), (True, False))):
        E = (16, 64, 8, 5)[n // 2]
        call(1, 1, 1 + S % 14, S, D, E, DTYPES[(S + n) % len(DTYPES)], end)
        call(1, 2, 7, S, D, E, DTYPES[(S + n // 2) % 2], end, plain=True)
""",
    "every number of queries": """
for L in range(1, 131):
    for end in (True, False):
        dtype = DTYPES[L % len(DTYPES)]
        call(1, 1, L, 33, 16, 16, dtype, end)
        call(2, 3, L, 20, 5, 7, dtype, end)
""",
    "around the chunks": """
for S in (255, 256, 257, 511, 512, 513):
    for D, E, dtype, end in itertools.product((16, 24), (16, 21), DTYPES, (True, False)):
        for L in (1, 13, 100):
            call(1, 1, L, S, D, E, dtype, end)
        call(1, 1, 100, S, D, E, dtype, end, causal=True, offset=S - 100)
        call(1, 1, 9, S, D, E, dtype, end, window=(40, 3), offset=S - 20)
""",
    "few rows": """
for S, R, end in itertools.product((1, 17, 33, 65, 257, 513), range(1, 9), (True, False)):
    for n, D in enumerate((32, 64, 72)):
        call(1, R, 1, S, D, (64, 48, 96)[(n + R) % 3], DTYPES[(S + n) % len(DTYPES)], end)
        for dtype in DTYPES[2:]:
            call(1, R, 1, S, D, (64, 96, 48)[(n + R) % 3], dtype, end)
""",
    "split over threads": """
for S in (5000, 4999, 4864):
    for dtype, end in itertools.product(DTYPES[:3], (True, False)):
        D, E = (32, 32) if dtype != np.float64 else (16, 16)
        call(1, 36, 1, S - S % 3, D, E, dtype, end, threads=3)
        call(1, 1, 97, S // 4, D, E, dtype, end, threads=3)
""",
    "masks and biases": """
for S in range(1, 131):
    for n, end in enumerate((True, False)):
        dtype = DTYPES[(S + n) % len(DTYPES)]
        call(1, 1, 1 + S % 14, S, 16, 16, dtype, end, mask=True)
        call(1, 1, 1 + S % 14, S, 16, 16, dtype, end, bias=DTYPES[(S + n) // 2 % len(DTYPES)])
        call(1, 2, 3, S, 3, 5, dtype, end, mask=True, bias=np.float32, softcap=2.0)
for S in (255, 256, 257, 511, 513):
    for end in (True, False):
        call(1, 2, 13, S, 16, 16, np.float32, end, mask=True, bias=np.float32)
        call(1, 2, 13, S, 16, 16, np.float32, end, mask=True, causal=True, offset=S - 20)
""",
}


def ends(target: str, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", START + program, target],
        cwd=SUPPORT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.sweep
@every_target
@pytest.mark.parametrize("what", CALLS)
def test_nothing_is_touched_beyond_the_arrays(target, what):
    process = ends(target, CALLS[what])
    assert process.returncode == 0, process.stderr[-2000:]


@pytest.mark.parametrize("end", [True, False])
def test_one_byte_too_far_ends_the_process_of_these_tests(end):
    place = "np.ones(5, np.int8)"
    step = "x.strides[0] * x.size" if end else "-1"
    process = ends(
        "baseline",
        f"x = pages['q'].place({place}, {end})\n"
        f"import ctypes; ctypes.string_at(x.ctypes.data + {step}, 1)",
    )
    assert process.returncode == -signal.SIGSEGV, process.stderr
