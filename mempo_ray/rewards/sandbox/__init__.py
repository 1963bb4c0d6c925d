"""Running code that a policy wrote.

    source, stdin ──▶ CodeRunner.run ──▶ Outcome
                        ├── LocalSandbox    bubblewrap, cgroups, limits (levels.py)
                        └── RemoteSandbox   a service that speaks Sandbox-Fusion's HTTP form (remote.py)

What the code does is a status of the outcome: a score. What the sandbox fails to do is `sandbox_failed`: never a score.
"""

from mempo_ray.config.schema import Sandbox
from mempo_ray.errors import ToolFailed
from mempo_ray.ports import RunCode
from mempo_ray.rewards.sandbox.local import LocalSandbox
from mempo_ray.rewards.sandbox.outcome import CodeRunner, Outcome, Status
from mempo_ray.rewards.sandbox.remote import RemoteSandbox


def code_service(settings: Sandbox) -> RunCode:
    """The sandbox as the `python` tool uses it, opened at the first program: most runs have no such tool."""
    opened: list[CodeRunner] = []

    async def run_code(source: str) -> str:
        if not opened:
            opened.append(open_sandbox(settings))
        return as_text(await opened[0].run_async(source))

    return run_code


def as_text(outcome: Outcome) -> str:
    """What a policy may know of its program: both outputs, and how it ended unless that was well.

    Raises:
        ToolFailed: the sandbox failed.
    """
    if outcome.status is Status.SANDBOX_FAILED:
        raise ToolFailed(f"sandbox: {outcome.detail}")
    parts = [outcome.stdout, outcome.stderr]
    if outcome.status is not Status.OK:
        parts.append(f"[{outcome.status}: {outcome.detail}]")
    elif outcome.exit_code:
        parts.append(f"[exit code {outcome.exit_code}]")
    return "\n".join(part.rstrip("\n") for part in parts if part)


def open_sandbox(settings: Sandbox) -> CodeRunner:
    """The configured sandbox. Raises ConfigError: this machine's is too weak (see `local.allowed_level`)."""
    return RemoteSandbox(settings) if settings.url else LocalSandbox(settings)
