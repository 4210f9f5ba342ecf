from typing import Any

from numpy.typing import NDArray

def run(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    output: NDArray[Any],
    weights: NDArray[Any] | None,
    lse: NDArray[Any] | None,
    bias: NDArray[Any] | None,
    sink: NDArray[Any] | None,
    offset: NDArray[Any],
    length: NDArray[Any] | None,
    left: int,
    right: int,
    rules: list[Any],
    scale: float,
    softcap: float,
    narrow: bool,
    wide: bool,
    threads: int,
    target: str,
) -> None: ...
def plain(*arguments: Any) -> Any: ...
def use(target: str, threads: int) -> None: ...
def exponential(x: NDArray[Any], target: str) -> NDArray[Any]: ...
def usable_cpus() -> int: ...
def lanes(target: str) -> int: ...
def multiply_add_peak(threads: int, seconds: float, wide: bool, target: str) -> float: ...
def read_bandwidth(array: NDArray[Any], threads: int, seconds: float, target: str) -> float: ...
def clock_frequency(threads: int, seconds: float) -> float: ...
def targets() -> list[tuple[str, bool]]: ...
