"""Every error that Phloem raises on purpose, in one tree.

PhloemError
|-- UserError                 the caller can mend it; `status` is the HTTP status, `param` the field
|   |-- BadRequest       400  a value that cannot be right (also: a feature not supported yet)
|   |-- Unauthorized     401  a missing or wrong API key
|   |-- NotFound         404  an unknown model, route or request
|   |-- Unprocessable    422  a body that cannot be parsed
|   `-- Overloaded       503  draining, or the queue is full: the same request may pass later
|-- ConfigError               a setting or checkpoint that cannot be used; CLI: exit code 2
|-- GroupError                a rank is gone, late, or does other things than the rest; `ranks`
|-- NoRoom                    the cache cannot hold it now; the caller waits, evicts or retracts
`-- EngineDead                the engine process ended; nothing more will be answered
"""

from __future__ import annotations

__all__ = [
    "BadRequest",
    "ConfigError",
    "EngineDead",
    "GroupError",
    "NoRoom",
    "NotFound",
    "Overloaded",
    "PhloemError",
    "Unauthorized",
    "Unprocessable",
    "UserError",
]


class PhloemError(Exception):
    """The root of the tree."""


class UserError(PhloemError):
    """Something that the caller of the API can mend."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(UserError):
    """A value that cannot be right, or that asks for what is not supported yet."""


class Unauthorized(UserError):
    """A missing or wrong API key."""

    status = 401
    kind = "authentication_error"


class NotFound(UserError):
    """An unknown model, route or request."""

    status = 404
    kind = "not_found_error"


class Unprocessable(UserError):
    """A body that cannot be parsed."""

    status = 422


class Overloaded(UserError):
    """Refused for now: draining, or the queue is full."""

    status = 503
    kind = "overloaded_error"


class ConfigError(PhloemError):
    """A setting, file or checkpoint that cannot be used. One line that says what to do."""


class GroupError(PhloemError):
    """A group of ranks that cannot go on. `ranks`: who is to blame, as far as it is known."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class NoRoom(PhloemError):
    """The cache cannot hold what was asked, even after eviction. The cache is unchanged."""


class EngineDead(PhloemError):
    """The engine process ended."""
