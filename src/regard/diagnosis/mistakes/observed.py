"""What several calls show, or how many digits come out: mistakes that replace no step.

Owns their words. How each is asked is in `properties.py`.
"""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import Mistake, written

MISTAKES: tuple[Mistake, ...] = ()
