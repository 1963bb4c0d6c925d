"""`mempo-ray reward-check`: score responses without training (R9).

    --responses FILE   a run's trajectories/*.parquet, or rows with a `response` ──▶ Response ─┐
    without it         fresh episodes of the configuration's policy ──▶ payload ───────────────┴─▶ Score ─▶ RewardReport

Given responses are scored in this process by the worker that a run has; only fresh ones start Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from mempo_ray import preflight
from mempo_ray.actors.reward import RewardManagerWorker, longest_call_s, scored_at_once
from mempo_ray.agent.group import siblings
from mempo_ray.agent.protocol import extract_answer, format_report, parse_turn
from mempo_ray.config.schema import Config
from mempo_ray.contracts import Score, Task, TrajectoryBatch, Unscored
from mempo_ray.data.tasks import KEPT_COLUMNS, read_tasks
from mempo_ray.errors import DataError, InfrastructureError
from mempo_ray.evaluation.reward_report import Checked, RewardReport
from mempo_ray.observability.progress import make_display
from mempo_ray.rewards.contract import Response, extra_info_of, response_of
from mempo_ray.rewards.rows import row_check
from mempo_ray.serving import check, serving

RESPONSE = "response"
"""Column of a given response: a text, or a list of texts, one a turn."""

Judge = Callable[[], Awaitable[Score]]


async def check_given(config: Config, file: Path, limit: int) -> RewardReport:
    """Scores of the first `limit` responses of a file. Starts nothing but what the reward section asks for.

    Raises:
        ConfigError: the reward section. DataError: the file.
    """
    preflight.import_plugins(config)
    preflight.check_names(config)
    responses = read_responses(config, file)[:limit]
    worker = RewardManagerWorker(config.reward, config.plugins)
    display = make_display(0, Console(stderr=True))
    display.stage("scoring", len(responses))
    sources = {response.data_source for response in responses}
    places = asyncio.Semaphore(min((scored_at_once(config.reward, source) for source in sources), default=1))

    async def one(response: Response) -> Checked:
        async with places:  # a latency is of the scoring, not of waiting for it
            checked = await _timed(config, response, lambda: worker.judge(response))
        display.advance()
        return checked

    try:
        return RewardReport(tuple(await asyncio.gather(*map(one, responses))))
    finally:
        display.close()
        await worker.close()


async def check_sampled(config: Config, limit: int) -> RewardReport:
    """Scores of `limit` fresh episodes, one of each of the first training tasks, sampled as in training.

    Raises:
        ConfigError, DataError: what the preflight finds. InfrastructureError: no episode came to its own end.
    """
    keys = config.data.question_key, config.data.answer_key
    tasks = read_tasks(config.data.train, *keys, row_check(config.reward))[:limit]
    check(config, tasks)
    display = make_display(0, Console(stderr=True))
    checked: list[Checked] = []
    broken: list[str] = []
    try:
        async with serving(config, "reward-check", display) as fleet:
            display.stage("sampling and scoring", len(tasks))
            requests = [request for task in tasks for request in siblings(task, 1, config.run.seed)]
            async for finished in fleet.rollouts.run(requests):
                if finished.payload is None or finished.summary.end_reason.is_infrastructure:
                    broken.append(f"{finished.summary.end_reason.value}: {finished.summary.detail}")
                else:
                    payload = finished.payload
                    (trajectory,) = (await fleet.payloads.read(payload)).trajectories()
                    response = response_of(trajectory)
                    checked.append(await _timed(config, response, lambda p=payload: fleet.rewards.score(p)))
                display.advance()
            if not checked:
                why = "; ".join(set(broken))
                raise InfrastructureError(f"reward-check: all {len(tasks)} episodes were broken: {why}")
    finally:
        display.close()
    return RewardReport(tuple(checked))


async def _timed(config: Config, response: Response, judge: Judge) -> Checked:
    began = time.monotonic()
    try:
        async with asyncio.timeout(longest_call_s(config.reward)):
            score = await judge()
    except TimeoutError:
        score = Unscored("no score within the longest call of reward", "timeout")
    return Checked(
        task_id=str(response.extra_info["task_id"]),
        data_source=response.data_source,
        text=response.solution,
        gold="; ".join(" | ".join(aliases) for aliases in response.golds),
        score=score,
        seconds=time.monotonic() - began,
        failed_rules=tuple(name for name, passed in response.format_report.items() if not passed),
    )


def read_responses(config: Config, file: Path) -> list[Response]:
    """From a trajectory log as it lies in a run folder, or from rows as in `data.train` with a column `response`.

    Raises:
        DataError: neither, or rows that nobody could score.
    """
    if _is_trajectory_log(file):
        batch = TrajectoryBatch.from_arrow(pq.read_table(file))
        return [response_of(t, transcript=True) for t in batch.trajectories() if not t.end_reason.is_infrastructure]
    keys = config.data.question_key, config.data.answer_key
    tasks = read_tasks(str(file), *keys, row_check(config.reward), (*KEPT_COLUMNS, RESPONSE))
    return [_response_of_row(task, file) for task in tasks]


def _is_trajectory_log(file: Path) -> bool:
    try:
        return file.suffix == ".parquet" and file.is_file() and "output_ids" in pq.read_schema(file).names
    except pa.ArrowException:  # no Parquet; `read_tasks` says so
        return False


def _response_of_row(task: Task, file: Path) -> Response:
    metadata = dict(task.metadata)
    given = metadata.pop(RESPONSE, None)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{file}: {task.task_id}: column {RESPONSE!r} must hold the response's text, or a list of texts, one a turn"
        )
    turns = [parse_turn([text.encode()]) for text in texts]
    answer = extract_answer(turns)
    report = format_report(turns, [True] * (len(turns) - 1) + [False])
    known = {"answer": answer, "num_turns": len(texts), "format_valid": all(report.values())}
    return Response(
        data_source=task.data_source,
        golds=task.golds,
        turns=tuple(texts),
        answer=answer,
        format_report=report,
        extra_info=extra_info_of(replace(task, metadata=metadata), **known),
    )


def write_report(report: RewardReport, folder: Path) -> None:
    """reward_check.json and reward_check.png, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward_check.json").write_text(report.to_json() + "\n")
    report.draw(folder / "reward_check.png")
