"""Every failure of the package has a type here; each names its field and a remedy.

    RetrievalIndexError
    ├── CorpusError          a corpus or question file: missing, or a bad line (its number is in the message)
    ├── EncoderError         an encoder that cannot be found or loaded
    │   └── EncoderDown      its process died or hung
    ├── BuildError           a build that cannot start: target exists, too few passages, wrong embeddings
    │   └── BuildRunning     another process builds the same folder
    ├── EmbeddingFailed      workers of an encoder pass failed; the next run goes on from there
    ├── ManifestError        an index folder that must not be opened
    │   ├── IndexMissing     no such folder, or no manifest in it
    │   ├── ForeignVersion   written by another version of this package
    │   ├── EncoderMismatch  built with another encoder (or other settings of it)
    │   ├── DimensionMismatch
    │   ├── DamagedIndex     a file is missing, truncated or altered
    │   └── StaleIndex       its corpus has changed since
    ├── CacheError           the file of the disk cache cannot be used
    ├── ServeError           a server that cannot start: its address is taken, a replica dies
    ├── QueryError           a query that cannot be searched: empty
    └── ServiceError         a search that did not happen; never a statement about the query
        ├── SearchFailed     encoder or index raised
        ├── SearchTimeout    the caller's deadline passed
        ├── ServiceOverloaded  too many queries wait
        └── ServiceClosed    the service is shut down, or its batching task died

The arguments are plain strings, so that the errors survive pickling on their way between processes.
"""

from __future__ import annotations


class RetrievalIndexError(Exception):
    """Root. `field` is the setting to look at (`index`, `encoder`, `corpus`, …), `remedy` what to do."""

    def __init__(self, problem: str, field: str = "", remedy: str = "") -> None:
        super().__init__(problem, field, remedy)
        self.problem, self.field, self.remedy = problem, field, remedy

    def __str__(self) -> str:
        head = f"{self.field}: {self.problem}" if self.field else self.problem
        return f"{head} ({self.remedy})" if self.remedy else head


class CorpusError(RetrievalIndexError):
    """A corpus or question file is missing or has a bad line; the message names file and line."""


class EncoderError(RetrievalIndexError):
    """The encoder cannot be found or loaded."""


class EncoderDown(EncoderError):
    """The encoder's process died, hung, or has done so too often to be tried now. Nothing is known of the texts."""


class BuildError(RetrievalIndexError):
    """The build cannot start or go on."""


class BuildRunning(BuildError):
    """Another process builds the same folder."""


class EmbeddingFailed(RetrievalIndexError):
    """Workers failed; what they had encoded is kept, and the same build goes on from there."""


class ManifestError(RetrievalIndexError):
    """The index folder must not be opened."""


class IndexMissing(ManifestError):
    """There is no index at this path."""


class ForeignVersion(ManifestError):
    """The index was written in another format."""


class EncoderMismatch(ManifestError):
    """The index was built with another encoder, or with other settings of the same one."""


class DimensionMismatch(ManifestError):
    """The index holds vectors of another width."""


class DamagedIndex(ManifestError):
    """A file of the index is missing, truncated or altered."""


class StaleIndex(ManifestError):
    """A file that the index was built from has changed since."""


class QueryError(RetrievalIndexError):
    """The query cannot be searched; asking again changes nothing."""


class CacheError(RetrievalIndexError):
    """The file of the disk cache cannot be opened, or is no cache."""


class ServeError(RetrievalIndexError):
    """The server cannot start."""


class ServiceError(RetrievalIndexError):
    """A search did not happen. The query may be fine: ask again, here or at another replica."""


class SearchFailed(ServiceError):
    """The encoder or the index raised; the cause is chained."""


class SearchTimeout(ServiceError):
    """The deadline passed before the result came."""


class ServiceOverloaded(ServiceError):
    """Too many queries wait already; this call was refused whole."""


class ServiceClosed(ServiceError):
    """The service no longer serves."""
