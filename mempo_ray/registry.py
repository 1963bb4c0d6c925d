"""Names of the configuration → the functions behind them. One class for every kind of piece."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from mempo_ray.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Pieces of one kind. `key` is the configuration key that selects among them and appears in messages.

    A module listed in `plugins` registers its own pieces by the same decorator:

        @ADV_ESTIMATORS.register("mine")
        @per_group
        def mine(scores_G, settings): ...

    A built-in that needs torch is registered by path, so that checking a name imports nothing heavy.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self._entries: dict[str, tuple[T | str, str]] = {}  # name → (piece or "module:attribute", where it was made)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator.

        Raises:
            ConfigError: the name is taken by another piece; names both places.
        """

        def add(piece: T) -> T:
            self.add(name, piece, place_of(piece))
            return piece

        return add

    def register_path(self, name: str, path: str) -> None:
        """Register `module:attribute`, imported at the first `get`."""
        self.add(name, path, path)

    def add(self, name: str, piece: T | str, place: str) -> None:
        """Register a piece that was made at `place`. Raises ConfigError as `register` does."""
        if name in self._entries and self._entries[name][1] != place:
            raise ConfigError(
                f"{self.key}: {name!r} is registered twice, at {self._entries[name][1]} and at {place}; rename one"
            )
        self._entries[name] = (piece, place)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def check(self, name: str) -> None:
        """Is `name` known? Imports nothing.

        Raises:
            ConfigError: says the nearest name and lists the known ones.
        """
        if name not in self._entries:
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{self.key}: unknown name {name!r}{hint} (known: {', '.join(self.names)})")

    def get(self, name: str) -> T:
        """The piece. Raises ConfigError as `check` does."""
        self.check(name)
        piece, _ = self._entries[name]
        if not isinstance(piece, str):
            return piece
        module, _, attribute = piece.partition(":")
        return getattr(importlib.import_module(module), attribute)


def place_of(piece: Any) -> str:
    """`file:line` of a function or class, for messages."""
    try:
        target = inspect.unwrap(piece)
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (TypeError, OSError):  # made in C or at a prompt: no source to point at
        return repr(piece)
