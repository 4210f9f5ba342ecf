"""With AVX2 alone, does regard keep its lead? The same run twice, both sides held to AVX2 in one.

    python benchmarks/instructions.py [quick|full]

The environment variables are those by which torch and oneDNN choose instructions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HELD = {"REGARD_TARGET": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
PROMISED = 0.9


def main() -> None:
    grid = sys.argv[1] if len(sys.argv) > 1 else "quick"
    free, held = measured(grid, {}), measured(grid, HELD)
    print("× torch: free / held to AVX2 (their ratio, 0.9 is promised)")
    for name, ratio in free.items():
        if name in held:
            relative = held[name] / ratio
            mark = "" if relative >= PROMISED else "  less than promised"
            print(f"{name:<40}{ratio:8.2f} / {held[name]:<8.2f}({relative:.2f}){mark}")


def measured(grid: str, environment: dict[str, str]) -> dict[str, float]:
    """Case -> how many times as fast as torch."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "results.json"
        words = ["--grid", grid, "--against", "torch", "--json", str(target)]
        subprocess.run(
            [sys.executable, "-m", "regard", "bench", *words],
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        report: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return {case["name"]: case["ratio"] for case in report["cases"] if case["ratio"]}


if __name__ == "__main__":
    main()
