"""Errors of `retrieval_index` as errors of this project. Imports no Ray: the preflight uses it too."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from mempo_ray.errors import ConfigError, DataError, DeadlineExceeded, Overloaded, ToolFailed
from retrieval_index.errors import (
    CorpusError,
    RetrievalIndexError,
    SearchTimeout,
    ServiceError,
    ServiceOverloaded,
)

KEYS = ("corpus", "disk_cache", "embeddings", "encoder", "index", "kind")
"""Fields of the package's errors that are keys of the `retrieval` section by the same name."""


@contextmanager
def typed_errors() -> Generator[None]:
    """Name the keys of the `retrieval` section.

    Raises:
        DeadlineExceeded, Overloaded, ToolFailed: a search that did not happen.
        DataError: the corpus. ConfigError: everything else.
    """
    try:
        yield
    except SearchTimeout as error:
        raise DeadlineExceeded(str(error)) from error
    except ServiceOverloaded as error:
        raise Overloaded(str(error)) from error
    except ServiceError as error:
        raise ToolFailed(str(error)) from error
    except RetrievalIndexError as error:
        key = error.field if error.field in KEYS else "index"
        kind = DataError if isinstance(error, CorpusError) else ConfigError
        raise kind(f"retrieval.{key}: {error.problem} ({error.remedy})") from error
