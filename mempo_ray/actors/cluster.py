"""Connecting to Ray: the cluster of this job, a named one, or a local one for a laptop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

import grpc
import ray
import ray.util
from ray._private.grpc_utils import init_grpc_channel
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import state
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest  # pyrefly: ignore[missing-module-attribute]
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import AuthenticationError

from mempo_ray.config.schema import Config
from mempo_ray.errors import ConfigError, InfrastructureError

GIB = 2**30


def draining_nodes() -> frozenset[str]:
    """Ids of nodes that Ray is emptying: preempted, or to be removed (`ray drain-node`, KubeRay, the autoscaler).

    Ray shows this to its own libraries only (Serve and Train use the same call).
    """
    return frozenset(state.get_draining_nodes()) if ray.is_initialized() else frozenset()


ANSWER_S = 5.0
"""For the cluster's head to say who it is."""

TOKEN_REMEDY = (
    "The cluster asks for a token (Ray's default). Set RAY_AUTH_MODE=token and put its token (`ray get-auth-token` on "
    "the head) in ~/.ray/auth_token or RAY_AUTH_TOKEN; the same for `ray job submit`, which else answers 401."
)


TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"
"""Where Ray warns at every start that tokens are on, its safe default, about which nobody need do anything. That they
are off it says here too: this stays."""


def is_worth_saying(record: logging.LogRecord) -> bool:
    """Filter of TOKEN_LOGGER."""
    return not record.getMessage().startswith("Token authentication is enabled")


@contextmanager
def connected(config: Config, namespace: str) -> Generator[None]:
    """Inside, `ray` is connected under a namespace of the run's own; a local cluster ends with the block.

    Raises:
        InfrastructureError: the cluster at `placement.address` (or RAY_ADDRESS) does not answer.
        ConfigError: it answers, but not to the token that this process has; or another process goes on with this run.
    """
    address = config.placement.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {}
    if address == "local":
        options = {
            "num_cpus": max(2, os.cpu_count() or 2),
            "object_store_memory": int(config.placement.object_store_gb * GIB),
            "include_dashboard": False,
        }
    logging.getLogger(TOKEN_LOGGER).addFilter(is_worth_saying)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address != "local":
            ask_for_id(address)
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
    except SystemExit:  # from the handler of SIGTERM that `ray.init` installs
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        if names := ray.util.list_named_actors():
            raise ConfigError(
                f"run.resume: another process goes on with {namespace} (it has the actor {names[0]}); stop that one, "
                "or give this run another run.name"
            )
        yield
    finally:
        ray.shutdown()


def ask_for_id(address: str) -> None:
    """Is there a cluster, and does it take our token? `ray.init` tries for 20 s and tells neither from the other.

    Raises:
        ConfigError: no token, a wrong one, or the dashboard's address.
        ConnectionError: no answer within ANSWER_S.
    """
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"placement.address: {address} is the dashboard's, for `ray job submit`; inside the cluster leave "
            "RAY_ADDRESS unset or use 'auto', else give the head as host:6379"
        )
    try:
        head = canonicalize_bootstrap_address(address)
        with closing(init_grpc_channel(head or "")) as channel:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=ANSWER_S)
    except AuthenticationError:
        raise ConfigError(f"placement.address: no token for the cluster at {address}. {TOKEN_REMEDY}") from None
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(
                f"placement.address: the cluster at {address} refused this process (401: its token is missing or "
                f"wrong). {TOKEN_REMEDY}"
            ) from None
        raise ConnectionError(error.details()) from None
