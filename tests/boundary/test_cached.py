"""A property that is computed once, and that threads and forks do not wait for."""

from __future__ import annotations

import threading

from fresh_process import WATCHDOG
from regard.boundary.cached import cached_property


class Slow:
    def __init__(self, value, *waits):
        self.value, self.waits, self.computed = value, waits, 0

    @cached_property
    def found(self):
        """What it is."""
        self.computed += 1
        for one in self.waits:
            one.wait(WATCHDOG)
        return [self.value]


def test_it_is_computed_once_and_known_by_its_documentation():
    one = Slow(1)
    assert one.found is one.found
    assert one.computed == 1
    assert Slow.found.__doc__ == "What it is."


def test_one_object_does_not_wait_for_another():
    go = threading.Event()
    slow, results = Slow(1, go), []
    thread = threading.Thread(target=lambda: results.append(slow.found))
    thread.start()
    assert Slow(2).found == [2]  # while the other is computed
    go.set()
    thread.join(WATCHDOG)
    assert results == [[1]]


def test_threads_that_compute_it_at_once_get_the_same_object():
    both = threading.Barrier(2)
    shared, results = Slow(1, both), []
    threads = [threading.Thread(target=lambda: results.append(shared.found)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    assert len(results) == 2
    assert results[0] is results[1]
