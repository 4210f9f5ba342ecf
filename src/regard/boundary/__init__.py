"""What enters and leaves: arguments, arrays of other libraries, values from outside, files.

Owns how a public function answers arguments that it does not have. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def answering(function: F) -> F:
    """The function or class, whose TypeError about arguments says what to pass instead.

    Only a call that Python refuses costs anything more than a second frame.
    """
    if isinstance(function, type):
        setattr(function, "__init__", answering(getattr(function, "__init__")))  # noqa: B009, B010
        return function

    shown = vars(function).get("__signature__")  # of `taking`: Python takes any name
    taken = None if shown is None else frozenset(shown.parameters)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            if taken is not None and not taken.issuperset(options):
                raise TypeError
            return function(*args, **options)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # the function has begun, so that its arguments were its own
            refusal = refused(function, args, options)
        raise refusal

    return call  # type: ignore[return-value]


def refused(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> TypeError:
    """What to raise for a call whose arguments the function does not take."""
    from regard.boundary.elsewhere import misfit

    return misfit(function, args, options)


def absent(owner: Any, name: str) -> Any:
    """A `__getattr__` that says which attribute to use in place of one that is not there."""
    from regard.boundary.elsewhere import no_such_attribute

    raise no_such_attribute(owner, name)


NOTHING = object()


def taking(options: Mapping[str, Any], *but: str, before: str = "") -> Callable[[F], F]:
    """The function, which takes these **options `but` some: help() and inspect show each of them.

    The values are their defaults, unless the function names one itself. Its own arguments by name
    are shown first, or `before` one of these. `answering` refuses others.

    Parameters after one called `more` are shown as by name alone too, for `attention`, which no
    wrapper may slow down: Python reads parameters with a position faster than those by name alone,
    which are 14 look-ups in a dictionary, a tenth of a small call. It calls `refused` when `more`
    is not NOTHING, or when there are unknown names.
    """

    def shown(function: F) -> F:
        whole = signature(function)
        kept: list[Parameter] = []
        kind: Any = None
        for parameter in whole.parameters.values():
            if parameter.name == "more":
                kind = Parameter.KEYWORD_ONLY
            elif parameter.kind is not Parameter.VAR_KEYWORD:
                default = parameter.default
                if default is NOTHING:
                    default = Parameter.empty
                kept.append(parameter.replace(default=default, kind=kind or parameter.kind))
        by_name = [one for one in kept if one.kind is Parameter.KEYWORD_ONLY]
        named = {*whole.parameters, *but}
        for name, default in options.items():
            if name == before:
                kept = [one for one in kept if one not in by_name] + by_name
            if name not in named:
                kept.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
        setattr(function, "__signature__", whole.replace(parameters=kept))  # noqa: B010
        return function

    return shown
