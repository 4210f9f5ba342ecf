"""What having regard costs: seconds of `import regard` beyond NumPy's, and bytes of the wheel.

python benchmarks/footprint.py [wheel ...]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

PROGRAM = "import time; import numpy; a = time.perf_counter(); import regard; " + (
    "print(time.perf_counter() - a)"
)
RUNS = 21


def main() -> None:
    times = sorted(import_seconds() for _ in range(RUNS))
    median, best = statistics.median(times), times[0]
    print(f"import regard after numpy: {median * 1e3:.1f} ms median, {best * 1e3:.1f} ms at best")
    for wheel in sys.argv[1:]:
        print(f"{Path(wheel).name}: {Path(wheel).stat().st_size / 1e6:.2f} MB")


def import_seconds() -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    main()
