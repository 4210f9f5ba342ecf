"""What is computed once for an object: a property, or the result of a function of it.

Unlike `functools.cached_property` of Python 3.11 the property has no lock. There one lock serves
all objects of a class: threads wait for each other, and without end in a process that was forked
meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """What a method without arguments returns, kept in the object's `__dict__`.

    Where two threads compute it at once, both get the value that was kept first.

    >>> class Circle:
    ...     @cached_property
    ...     def area(self):
    ...         print("computed")
    ...         return 3.14
    >>> circle = Circle()
    >>> circle.area + circle.area
    computed
    6.28
    """

    def __init__(self, method: Callable[[Any], T]) -> None:
        self.method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return instance.__dict__.setdefault(self.name, self.method(instance))


def kept_while_it_exists(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of one object that computes its result once for as long as the object exists.

    Objects need no hash; those that cannot be referred to weakly are given to it every time.

    >>> @kept_while_it_exists
    ... def name_of(thing):
    ...     print("computed")
    ...     return thing.__name__
    >>> name_of(weakref) + name_of(weakref)
    computed
    'weakrefweakref'
    """
    known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def result(thing: Any) -> T:
        number = id(thing)
        if number not in known:
            found = function(thing)
            try:
                reference = weakref.ref(thing, lambda _: known.pop(number, None))
            except TypeError:
                return found
            known[number] = reference, found
        return known[number][1]

    return result
