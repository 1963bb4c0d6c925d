"""Every failure of the system has a type here; the category decides who must act.

    MempoError
    ├── ConfigError           the user: a key of the configuration (exit code 2)
    ├── DataError             the user: a file or a row (exit code 2)
    ├── PlacementError        the user or the cluster's owner: what is short, in words (exit code 2)
    ├── InfrastructureError   nobody's reward: a process, a network, a deadline (exit code 3)
    │   ├── DeadlineExceeded
    │   ├── EngineFailed      a rollout engine or its actor died or answered nonsense
    │   ├── ToolFailed        a search that failed after its retries
    │   ├── WorkerFailed      a worker died or answered nonsense
    │   │   └── GangLost      the policy's ranks or their executor; a new gang goes on from the newest checkpoint
    │   ├── CallFailed        a scorer's call in a process of its own; `kind` is that of the `Unscored`
    │   ├── PayloadLost       a payload left the object store before its last reader
    │   └── Overloaded        a bounded queue refused a request
    ├── TrainingError         the run itself: drift, unverified sync, too many exclusions (exit code 4)
    └── GivenUp               nobody's fault: a stopped job left work undone (exit code 130)

Messages name the key, file or row and end with the remedy. Exceptions that cross a Ray actor arrive
stripped of their type's attributes, so anything that must be told apart remotely is a *value*
(`contracts.scoring.Unscored`, `EndReason`), classified where the information still exists.
"""

from __future__ import annotations


class MempoError(Exception):
    """Root of all errors of this project. `exit_code` is what the driver's process returns."""

    exit_code = 1


class ConfigError(MempoError):
    """A key of the configuration is wrong. The message names the key and the remedy."""

    exit_code = 2


class DataError(MempoError):
    """A file or a row is wrong. The message names file, row number and the remedy."""

    exit_code = 2


class PlacementError(MempoError):
    """The cluster cannot hold the plan. The message says which role lacks what."""

    exit_code = 2


class InfrastructureError(MempoError):
    """Something failed that is not the policy's doing; it must never become a reward."""

    exit_code = 3


class DeadlineExceeded(InfrastructureError):
    """A wait ended at its deadline. The message names what was awaited and for how long (seconds)."""


class EngineFailed(InfrastructureError):
    """A rollout engine died, is draining, or returned something that is not an answer."""


class ToolFailed(InfrastructureError):
    """A tool call failed after its retries."""


class WorkerFailed(InfrastructureError):
    """An agent worker, reward worker or policy rank died or answered something that is not an answer."""


class GangLost(WorkerFailed):
    """All policy ranks have been ended, because one died, hung or broke, or their executor died."""


class CallFailed(InfrastructureError):
    """A call in a process of its own gave no result. kind: timeout | scorer_error | infrastructure."""

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason)
        self.kind = kind


class PayloadLost(InfrastructureError):
    """A payload is no longer in the object store.

    Where it was to be scored, its trajectory is `Unscored`, by the rewards as by the engines; a rank's reader ends the
    gang (GangLost), so the step is done again; the trajectory log's ends the run.
    """


class Overloaded(InfrastructureError):
    """A bounded queue refused a request; the caller may retry after the queue drains."""


class TrainingError(MempoError):
    """The run cannot go on without training on something wrong."""

    exit_code = 4


class GivenUp(MempoError):
    """Work was left undone, because the time that a job has for stopping goes by."""

    exit_code = 130
