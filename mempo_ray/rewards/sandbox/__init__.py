"""Running code that a policy wrote.

    source, stdin ──▶ CodeRunner.run ──▶ Outcome
                        ├── LocalSandbox    bubblewrap, cgroups, limits (levels.py)
                        └── RemoteSandbox   a service that speaks Sandbox-Fusion's HTTP form (remote.py)

What the code does is a status of the outcome: a score. What the sandbox fails to do is `sandbox_failed`: never a score.
"""

from mempo_ray.config.schema import Sandbox
from mempo_ray.rewards.sandbox.local import LocalSandbox
from mempo_ray.rewards.sandbox.outcome import CodeRunner
from mempo_ray.rewards.sandbox.remote import RemoteSandbox


def open_sandbox(settings: Sandbox) -> CodeRunner:
    """The configured sandbox. Raises ConfigError: this machine's is too weak (see `local.allowed_level`)."""
    return RemoteSandbox(settings) if settings.url else LocalSandbox(settings)
