"""The training loop.

    tasks ─▶ AgentLoopWorkers ◀─▶ RolloutActors (vLLM)      RetrievalActors
                │ finished trajectories, by reference
                ├─▶ RewardManagerWorkers ─▶ Scored | Unscored
                └─▶ BatchExecutor ─▶ PolicyWorkers (FSDP): P_mem, P_full
    advantages ─▶ TrainPlan ─▶ BatchExecutor ─▶ PolicyWorkers: update ─▶ weight sync ─▶ RolloutActors

    python -m mempo_ray.driver [--config FILE] [--dry-run] [key=value ...]

Without arguments it is the quickstart.
Exit codes: 0 done · 2 the user's to fix · 3 infrastructure · 4 training · 130 stopped.
SIGINT or SIGTERM stops after the step, with a checkpoint. `ray job stop` kills after RAY_JOB_STOP_WAIT_TIME_S: when
half of that has gone, a step that is still sampling is given up, and the checkpoint is that of the step before.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mempo_ray.config.job import Job
from mempo_ray.config.load import USAGE, fail, load_file, parse_command_line
from mempo_ray.config.schema import Config
from mempo_ray.errors import GangLost, GivenUp, MempoError
from mempo_ray.preflight import joins_a_cluster, preflight

if TYPE_CHECKING:
    from mempo_ray.session import Session

STOPPED = 130


async def train(session: Session, checkpoint: str | None) -> dict[str, object] | None:
    """Synchronous MemPO: every token of a step is sampled, scored and trained at one weight version.

    Returns the summary, or None where a signal asked to stop (a checkpoint is written first).

    Raises:
        GivenUp: the time to stop ended before the first step, or in the last evaluation; nothing is left to save.
    """
    async with session.may_be_given_up("before its first step"):
        await session.start(checkpoint)
    while session.progress.step < session.config.run.steps:
        try:
            stopped = await take_step(session, session.progress.step + 1)
        except GangLost as lost:
            await session.recover(lost)  # back to the newest checkpoint
            continue
        except GivenUp:
            await session.save_last_step()
            return None
        if stopped:
            return None
    async with session.may_be_given_up("in its last evaluation"):
        return await session.finish()


async def take_step(session: Session, step: int) -> bool:
    """One step with its evaluation and checkpoint, where they are due. True: a signal asked to stop."""
    run = session.config.run
    async with session.deadline(step):
        with session.timer.stage("rollout"):
            async with session.may_be_given_up("in its sampling"):
                assembled, collected = await session.sample_and_score(step)
        with session.timer.stage("update"):
            values = await session.train(assembled, collected)
        with session.timer.stage("sync"):
            values |= await session.sync()
    values |= await session.step_metrics(assembled, collected)
    if step < run.steps and due(step, session.config.eval.every, last=0):  # `finish` has the last one
        with contextlib.suppress(GivenUp):  # the step counts without it
            async with session.may_be_given_up("in an evaluation"):
                values |= (await session.evaluate(f"step_{step:04d}"))[1]
    session.log_metrics(step, values)
    stopping = session.stop.is_set()
    if stopping or due(step, run.checkpoint_every, last=run.steps):
        await session.save(step, values)
    session.progress.step = step
    return stopping


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step`, or it is the last one.

    Example:
        >>> [step for step in range(1, 8) if due(step, every=3, last=7)]
        [3, 6, 7]
    """
    return step == last or (every > 0 and step % every == 0)


def stop_on_signals(session: Session, within_s: float | None, at_once: Callable[[], object]) -> None:
    """The first SIGINT or SIGTERM stops after the step, with a checkpoint; the same one again stops at once.

    Args:
        at_once: what a second SIGTERM does (a second SIGINT is Python's KeyboardInterrupt).
        within_s: after so long the process will be killed; None: nobody waits for it.
    """
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        session.ask_to_stop(within_s)
        session.display.say("stopping after this step; once more to stop at once")
        loop.remove_signal_handler(number)
        if number == signal.SIGTERM:
            loop.add_signal_handler(number, at_once)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)


async def run(config: Config) -> int:
    """Open everything, train, close everything in order. Returns the exit code."""
    from mempo_ray.launch import open_session  # imports ray, which a user's mistake should not wait for

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # closes all, as Ctrl-C does by itself
    job = Job.current()
    async with open_session(config) as (session, checkpoint):
        stop_on_signals(session, job.stop_wait_s if job is not None else None, at_once=task.cancel)
        summary = await train(session, checkpoint)
        session.report(summary)
    return 0 if summary is not None else STOPPED


def dry_run(config: Config) -> int:
    """Print the plan, for the running cluster that the configuration names, or else as `preflight` knows it."""
    view = None
    if joins_a_cluster(config):
        from mempo_ray.launch import look_at_cluster

        view = look_at_cluster(config)
    checked = preflight(config, dry_run=True, view=view)
    print(checked.describe())
    return checked.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check from cheap to dear, then run. A user's mistake is one message, never a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    try:
        line = parse_command_line(argv)
        config = load_file(line.file, line.overrides)
        if line.dry_run:
            return dry_run(config)
        preflight(config)
        return asyncio.run(run(config))
    except (KeyboardInterrupt, asyncio.CancelledError):  # at once: everything is closed, nothing is saved
        return STOPPED
    except MempoError as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
