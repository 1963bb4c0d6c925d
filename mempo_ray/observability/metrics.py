"""Where a step's numbers go: every sink gets the same flat mapping. Names are `group/name_unit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mempo_ray.errors import ConfigError
from mempo_ray.observability.run_folder import RunFolder
from mempo_ray.ports import MetricSink


class Fanout:
    """A MetricSink that feeds several."""

    def __init__(self, sinks: Sequence[MetricSink]):
        self._sinks = tuple(sinks)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, values)


class JsonlSink:
    """One line a step in metrics.jsonl."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._folder.append_jsonl("metrics.jsonl", [{"step": step, **values}])


class TrackerSink:
    """accelerate's tracker classes (TensorBoard, W&B, MLflow, …), chosen by name."""

    def __init__(self, names: Sequence[str], run_name: str, logging_dir: Path, config: Mapping[str, object]):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # imports torch: only where a tracker is wanted

        known = {f"{kind}": tracker for kind, tracker in LOGGER_TYPE_TO_CLASS.items()}
        if unknown := set(names) - set(known):
            raise ConfigError(f"trackers: unknown {sorted(unknown)}; known are {sorted(known)}")
        self._trackers = []
        for name in names:
            arguments: dict[str, Any] = (
                {"logging_dir": str(logging_dir)} if known[name].requires_logging_directory else {}
            )
            tracker = known[name](run_name, **arguments)
            tracker.store_init_configuration(dict(config))
            self._trackers.append(tracker)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(dict(values), step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
