"""Tables for pandas, which is imported when one is asked for.

Must not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.errors import OptionError

Level = tuple[str | None, Sequence[Any]]  # a name, and the labels along it


def dataframe(data: Any, rows: Sequence[Level] = (), columns: Level | None = None) -> Any:
    """A pandas DataFrame; with several levels of rows, one row for each combination of labels.

    Labels that only count, "0", "1", "2", …, become integers.

    Raises
    ------
    OptionError
        If pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise OptionError(
            'a DataFrame needs pandas, which is not installed: pip install "regard[pandas]"'
        ) from None
    levels = [pandas.Index(_counted(labels), name=name) for name, labels in rows]
    index = pandas.MultiIndex.from_product(levels) if len(levels) > 1 else (levels or [None])[0]
    across = None if columns is None else pandas.Index(_counted(columns[1]), name=columns[0])
    return pandas.DataFrame(data, index=index, columns=across)


def _counted(labels: Sequence[Any]) -> Sequence[Any]:
    count = range(len(labels))
    return count if list(labels) == [str(number) for number in count] else labels
