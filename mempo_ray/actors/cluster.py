"""Connecting to Ray: the cluster of this job, a named one, or a local one for a laptop."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray

from mempo_ray.config.schema import Config
from mempo_ray.errors import InfrastructureError

GIB = 2**30


@contextmanager
def connected(config: Config, namespace: str) -> Generator[None]:
    """Inside, `ray` is connected under a namespace of the run's own; a local cluster ends with the block.

    Raises:
        InfrastructureError: the cluster at `placement.address` (or RAY_ADDRESS) does not answer.
    """
    address = config.placement.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {}
    if address == "local":
        options = {
            "num_cpus": max(2, os.cpu_count() or 2),
            "object_store_memory": int(config.placement.object_store_gb * GIB),
            "include_dashboard": False,
        }
    try:
        ray.init(
            address=address,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfrastructureError(
            f"placement.address: no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}); start one with "
            "`ray start --head`, or unset RAY_ADDRESS to run a local one"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
