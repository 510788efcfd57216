"""The exceptions of the engine: one class per kind of failure, each with the facts a caller needs.

Owns the vocabulary of failure. Knows nothing of gRPC: the server maps these classes to status
codes in one table. Expected scarcity ("not scheduled because ...") is a value, not an exception.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error this project raises on purpose; `str()` is one clear line.

    Errors can be pickled (they travel between front and step loop): a subclass with facts of its
    own keeps them as attributes named like its constructor's arguments.
    """

    def __reduce__(self) -> tuple[object, ...]:
        facts = tuple(self.__dict__.values())
        return (type(self), facts or self.args)


class InvalidRequest(EngineError):
    """A request that can never be served as asked.

    `field` is the request field, `limit` what it must satisfy, `given` what was sent.
    """

    def __init__(self, field: str, limit: str, given: object) -> None:
        self.field = field
        self.limit = limit
        self.given = given
        super().__init__(f"{field} must be {limit}, got {given!r}")


class InvalidConfig(EngineError):
    """An option that can't be honoured: names the option, its limit and the value given."""

    def __init__(self, option: str, limit: str, given: object) -> None:
        self.option = option
        self.limit = limit
        self.given = given
        super().__init__(f"option {option} must be {limit}, got {given!r}")


class InvalidModel(EngineError):
    """A model file or directory that can't be loaded as it is: names the file and the part."""


class Overloaded(EngineError):
    """Refused for now because a budget or quota is full; the same request may succeed later."""

    def __init__(self, budget: str, limit: int, given: int, retry_after_s: float) -> None:
        self.budget = budget
        self.limit = limit
        self.given = given
        self.retry_after_s = retry_after_s
        super().__init__(
            f"overloaded: {budget} is limited to {limit}, this request would make it {given}; "
            f"retry after {retry_after_s:g} s"
        )


class CompileMiss(EngineError):
    """A step asked for a shape without an executable; `why` says how that came about."""

    def __init__(self, shape: object, request_ids: tuple[int, ...], why: str) -> None:
        self.shape = shape
        self.request_ids = request_ids
        self.why = why
        super().__init__(
            f"no executable for {shape} ({why}), asked for by requests {list(request_ids)}"
        )


class DeviceFault(EngineError):
    """The device failed while a step was in flight."""
