"""What `regard.diagnose` says of each `eager_attention_forward` in the installed transformers.

    python benchmarks/eager_functions.py

Functions with the same text count once. Prints those that are not found right, then how many there
are of each verdict. Takes some minutes, most of them to import transformers' models.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections import Counter

import transformers.models as models

import regard


def main() -> None:
    warnings.simplefilter("ignore")
    known: set[str] = set()
    verdicts: Counter[str] = Counter()
    families = 0
    for family in (one.name for one in pkgutil.iter_modules(models.__path__)):
        try:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except (ImportError, RuntimeError):  # needs what is not installed
            continue
        function = getattr(module, "eager_attention_forward", None)
        if function is None or function.__module__ != module.__name__:
            continue
        families += 1
        text = inspect.getsource(function)
        if text in known:
            continue
        known.add(text)
        found = regard.diagnose(function)
        verdicts[found.verdict] += 1
        if found.verdict != "right":
            print(f"{family}: {str(found).splitlines()[0]}")
    print(f"{len(known)} functions in {families} families: {dict(verdicts)}")


if __name__ == "__main__":
    main()
