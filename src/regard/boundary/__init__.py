"""What enters and leaves: arguments, arrays of other libraries, values from outside, files.

Owns how a public function answers arguments that it does not have. Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
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

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
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


def taking_names(**more: Any) -> Callable[[F], F]:
    """The function, whose parameters after `more` may only be given by name.

    For `attention`, which no wrapper may slow down. It calls `refused` when `more` is not NOTHING,
    or when there are unknown names. Python reads parameters with a position faster than those by
    name alone, which are 14 look-ups in a dictionary: a tenth of a small call. The parameters
    given here, with their defaults, are rare: the function finds them among the unknown names.
    help() and inspect show what holds.
    """

    def shown(function: F) -> F:
        whole = signature(function)
        parameters = [p for p in whole.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        parameters = [
            p.replace(default=Parameter.empty) if p.default is NOTHING else p for p in parameters
        ]
        at = list(whole.parameters).index("more")
        named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters[at + 1 :]]
        rare = [Parameter(n, Parameter.KEYWORD_ONLY, default=own) for n, own in more.items()]
        whole = whole.replace(parameters=[*parameters[:at], *named, *rare])
        setattr(function, "__signature__", whole)  # noqa: B010
        return function

    return shown
