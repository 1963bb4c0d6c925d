"""vLLM's AsyncLLM as an Engine: one actor-side client, one engine-core child process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
from pyarrow import fs
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats

from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import ConfigError, DeadlineExceeded, EngineFailed
from mempo_ray.generation.engine import NO_WEIGHTS, Continuation, check_scores, output_to, verified_gap
from mempo_ray.generation.vllm_forcing import FORCED
from mempo_ray.ports import GenerateRequest, Generation

_GIB = 1 << 30
_PREFILL_TOKENS = 8192
"""Tokens of a step at least; longer models get their whole length."""


def engine_args(model_dir: str, rollout: Rollout, weight_sync: WeightSync, scores: bool = False) -> AsyncEngineArgs:
    """vLLM's options for token ids in and out, reproducible by seed, on the platform that is here."""
    on_cpu = current_platform.is_cpu()
    executor = "TensorParallelExecutor" if rollout.tensor_parallel > 1 else "OneProcessExecutor"
    args = AsyncEngineArgs(
        model=model_dir,
        skip_tokenizer_init=not rollout.stop_at_tags,
        dtype=rollout.dtype,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        # A seeded prompt that is split over steps kills vLLM on CPU, so a prompt must always fit into one step.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(rollout.max_model_len, _PREFILL_TOKENS),
        enable_prefix_caching=True,
        enforce_eager=rollout.enforce_eager,
        tensor_parallel_size=rollout.tensor_parallel,
        # Of logits / temperature, as algorithm.md §1 wants. At temperature 1, where engines may score, that is the same
        # as the raw ones, which forced tokens leave alone.
        logprobs_mode="raw_logprobs" if scores else "processed_logprobs",
        logits_processors=["mempo_ray.generation.vllm_forcing:ForcedTokens"] if scores else None,
        generation_config="vllm",  # not the model folder's own top_p and the like
        seed=0,
        disable_log_stats=True,
        enable_log_requests=False,
        distributed_executor_backend=f"mempo_ray.generation.vllm_worker.{executor}",
        worker_extension_cls="mempo_ray.generation.vllm_worker.WeightLoader",
    )
    if on_cpu:
        args.kv_cache_memory_bytes = int(rollout.kv_cache_gb * _GIB)
        args.block_size = 32  # vLLM's 128 on CPU is longer than many a shared prefix
    else:
        args.gpu_memory_utilization = rollout.gpu_memory_utilization
        args.enable_sleep_mode = weight_sync.transport == "ipc"  # colocated: memory is lent to the policy
        if weight_sync.transport in ("nccl", "ipc"):
            from vllm.config.weight_transfer import WeightTransferConfig

            args.weight_transfer_config = WeightTransferConfig(backend=weight_sync.transport)
    return args


class _Load(StatLoggerBase):
    """What vLLM's scheduler says of itself after each of its steps. Nothing comes while it idles."""

    def __init__(self) -> None:
        self.num_queued, self.kv_use = 0, 0.0
        self.prompt_tokens = self.prefix_hit_tokens = 0  # since the start

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        if scheduler_stats is not None:
            self.num_queued, self.kv_use = scheduler_stats.num_waiting_reqs, scheduler_stats.kv_cache_usage
            self.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hit_tokens += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class VllmEngine:
    """See `engine.Engine`. Start it on the thread that will live longest: its child dies with that thread."""

    def __init__(
        self,
        name: str,
        model_dir: str,
        rollout: Rollout,
        weight_sync: WeightSync,
        end_of_turn_id: int,
        log_file: Path,
        scores: bool = False,
    ) -> None:
        self._name = name
        self._model_dir = model_dir
        self._rollout = rollout
        self._weight_sync = weight_sync
        self._end_of_turn_id = end_of_turn_id
        self._log_file = log_file
        self._scores = scores
        self._llm: AsyncLLM | None = None
        self._version = NO_WEIGHTS
        self._open = asyncio.Event()  # cleared during an update or a pause
        self._open.set()
        self._updating = asyncio.Lock()
        self._request_numbers = itertools.count()
        self._in_flight: dict[str, int] = {}  # request id → prompt + max_tokens
        self._output_tokens = 0
        self._load = _Load()

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def errored(self) -> bool:
        return self._llm is not None and self._llm.errored

    async def start(self) -> None:
        """Takes about 10 s and blocks the event loop: vLLM must be made on the loop that will serve."""
        with output_to(self._log_file), _as_engine_failure(f"{self._name}, log {self._log_file}"):
            try:
                args = engine_args(self._model_dir, self._rollout, self._weight_sync, self._scores)
                self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: self._load])
            except ValueError as error:  # found in this process, before any child
                raise ConfigError(f"rollout: vLLM refuses these options for {self._model_dir}: {error}") from error
        for handler in logging.getLogger("vllm").handlers:
            if type(handler) is logging.StreamHandler:  # vLLM's own; another's subclass is its owner's
                handler.setStream(self._log_file.open("a"))

    async def generate(self, request: GenerateRequest) -> Generation:
        num_prompt_tokens = len(request.prompt_ids)
        if num_prompt_tokens >= self._rollout.max_model_len:
            raise ConfigError(
                f"rollout.max_model_len={self._rollout.max_model_len} leaves no room after a prompt of "
                f"{num_prompt_tokens} tokens; raise it, or lower agent.limits"
            )
        async with self._deadline(f"turn of group {request.group}", request.deadline_s):
            version = await self._proven_version()
            with self._counted(num_prompt_tokens + request.max_tokens) as request_id:
                output = await self._final_output(
                    request_id, request.prompt_ids, self._sampling(request), cache_salt=f"weights-{version}"
                )
            sampled = output.outputs[0]
            if sampled.finish_reason not in ("stop", "length"):
                raise EngineFailed(f"{self._name}: a turn of group {request.group} ended as {sampled.finish_reason!r}")
            await self._proven_version()  # an update may have come in between, and failed
        ids = np.asarray(sampled.token_ids, dtype=np.int32)
        logprobs = _of_tokens(sampled.logprobs, sampled.token_ids)
        self._output_tokens += len(ids)
        return Generation(ids, logprobs, sampled.finish_reason, version)

    async def score(
        self, continuations: Sequence[Continuation], group: str, deadline_s: float
    ) -> tuple[int, list[np.ndarray]]:
        check_scores(self._name, self._scores)
        async with self._deadline(f"log-probs of group {group}", deadline_s):
            version = await self._proven_version()
            forced = [self._forced(continuation, version) for continuation in continuations]
            logprobs = await asyncio.gather(*forced)
            if await self._proven_version() != version:
                raise EngineFailed(f"{self._name}: its weights changed while it scored group {group}")
        return version, logprobs

    async def _forced(self, continuation: Continuation, version: int) -> np.ndarray:
        target_ids = continuation.target_ids.tolist()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(target_ids),
            ignore_eos=True,
            extra_args={FORCED: target_ids},
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        num_prefix_tokens = len(continuation.prefix_ids)
        with self._counted(num_prefix_tokens + len(target_ids)) as request_id:
            output = await self._final_output(
                request_id, continuation.prefix_ids, params, cache_salt=f"weights-{version}"
            )
        forced = output.outputs[0]
        if list(forced.token_ids) != target_ids:
            raise EngineFailed(
                f"{self._name}: {len(forced.token_ids)} of {len(target_ids)} forced tokens, ended as "
                f"{forced.finish_reason!r}"
            )
        return _of_tokens(forced.logprobs, target_ids)

    async def update(self, manifest: WeightManifest) -> float:
        llm = self._running()
        async with self._updating:
            self._open.clear()
            self._version = NO_WEIGHTS
            try:
                async with self._deadline(f"update to weights {manifest.version}", self._weight_sync.timeout_s):
                    if await llm.is_sleeping():
                        await llm.wake_up()
                    if manifest.uri:
                        # `keep` with a cleared cache is exact per token: old ones from old weights, new from new.
                        await llm.pause_generation(mode="keep", clear_cache=True)
                        with _local_folder(manifest.uri) as folder:
                            await llm.collective_rpc("load_folder", args=(folder,))
                    await llm.resume_generation()
                    logprobs = await self._score(manifest.proof, manifest.version)
                gap = verified_gap(manifest.proof, logprobs, self._weight_sync.max_gap, manifest.version)
                self._version = manifest.version
            finally:
                self._open.set()
                if self._version == NO_WEIGHTS and not self.errored:
                    with _as_engine_failure(self._name):
                        await llm.abort(list(self._in_flight))
            return gap

    async def transfer(self, step: str, info: Mapping[str, object] | None = None) -> None:
        llm = self._running()
        async with self._deadline(f"weight transfer, step {step!r}", self._weight_sync.timeout_s):
            match step:
                case "init":
                    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(info or {})))
                case "start":
                    self._open.clear()  # until `update` has proven what was pushed
                    self._version = NO_WEIGHTS
                    await llm.pause_generation(mode="keep", clear_cache=True)
                    await llm.start_weight_update()
                case "update":
                    await llm.update_weights(WeightTransferUpdateRequest(update_info=dict(info or {})))
                case "finish":
                    await llm.finish_weight_update()
                case _:
                    raise ValueError(f"unknown step {step!r}: init, start, update or finish")

    async def pause(self, *, release_memory: bool = False) -> None:
        llm = self._running()
        self._open.clear()
        async with self._deadline("pause", self._weight_sync.timeout_s):
            await llm.pause_generation(mode="keep", clear_cache=True)
            if release_memory:
                await llm.sleep(level=1, mode="keep")

    async def resume(self) -> None:
        llm = self._running()
        async with self._deadline("resume", self._weight_sync.timeout_s):
            if await llm.is_sleeping():
                await llm.wake_up()
            await llm.resume_generation()
        self._open.set()

    async def abort_all(self) -> int:
        requests = list(self._in_flight)
        async with self._deadline("abort", self._weight_sync.timeout_s):
            await self._running().abort(requests)
        return len(requests)

    def stats(self) -> dict[str, float]:
        return {
            "num_in_flight": len(self._in_flight),
            "in_flight_tokens": sum(self._in_flight.values()),
            "num_queued": self._load.num_queued,
            "kv_use": self._load.kv_use,
            "output_tokens": self._output_tokens,
            "prompt_tokens": self._load.prompt_tokens,
            "prefix_hit_tokens": self._load.prefix_hit_tokens,
        }

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        self._version = NO_WEIGHTS
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=5.0)

    def _running(self) -> AsyncLLM:
        if self._llm is None or self._llm.errored:
            raise EngineFailed(f"{self._name}: the engine is {'not running' if self._llm is None else 'dead'}")
        return self._llm

    async def _proven_version(self) -> int:
        """Waits out an update or a pause; refuses where the weights are not proven."""
        while not self._open.is_set():
            await self._open.wait()
        self._running()
        if self._version == NO_WEIGHTS:
            raise EngineFailed(f"{self._name}: no proven weights; it must be updated first")
        return self._version

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        tags = ["</search>", "</answer>"] if self._rollout.stop_at_tags else None
        return SamplingParams(
            # vLLM takes log-probs of greedy tokens at temperature 1.
            temperature=0.0 if request.greedy else self._rollout.temperature,
            top_p=self._rollout.top_p,
            top_k=self._rollout.top_k,
            seed=None if request.greedy else request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=[self._end_of_turn_id],
            ignore_eos=True,  # the end-of-turn token alone ends a turn, whatever else the folder calls an end
            stop=tags,
            include_stop_str_in_output=tags is not None,
            detokenize=tags is not None,
            logprobs=0,  # that of the sampled token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _score(self, proof: WeightProof, version: int) -> np.ndarray:
        """Log-probs, temperature 1, of `proof.ids[1:]`. vLLM never answers these from its prefix cache."""
        if not proof.logprobs:
            return np.empty(0, dtype=np.float32)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        number = next(self._request_numbers)
        ids = np.asarray(proof.ids, dtype=np.int32)
        output = await self._final_output(f"proof-{version}-{number}", ids, params, cache_salt=f"weights-{version}")
        return _of_tokens((output.prompt_logprobs or [])[1:], proof.ids[1:])

    async def _final_output(
        self, request_id: str, ids: np.ndarray, params: SamplingParams, cache_salt: str
    ) -> RequestOutput:
        prompt = {"prompt_token_ids": ids.tolist(), "cache_salt": cache_salt}
        outputs = [output async for output in self._running().generate(prompt, params, request_id)]
        if len(outputs) != 1:  # FINAL_ONLY
            raise EngineFailed(f"{self._name}: request {request_id} ended with {len(outputs)} outputs")
        return outputs[0]

    @contextmanager
    def _counted(self, num_tokens: int) -> Generator[str]:
        request_id = f"{self._name}-{next(self._request_numbers)}"
        self._in_flight[request_id] = num_tokens
        try:
            yield request_id
        finally:
            del self._in_flight[request_id]

    @asynccontextmanager
    async def _deadline(self, what: str, seconds: float) -> AsyncGenerator[None]:
        with _as_engine_failure(self._name):
            try:
                async with asyncio.timeout(seconds):
                    yield
            except TimeoutError:
                raise DeadlineExceeded(f"{self._name}: {what} not done within {seconds:g} s") from None


def _of_tokens(table: Sequence | None, ids: Sequence[int]) -> np.ndarray:
    """float32 [T]: of each position's table of log-probs, the entry of the token that is there."""
    entries = zip(table or (), ids, strict=True)
    return np.fromiter((at_position[token].logprob for at_position, token in entries), dtype=np.float32)


@contextmanager
def _as_engine_failure(name: str) -> Generator[None]:
    """What vLLM, its worker or the file system raises, as EngineFailed; our own errors and bugs pass."""
    try:
        yield
    except Exception as error:
        # A failed call into the engine core comes back as a bare Exception with the cause in its text.
        if type(error) is Exception or isinstance(error, (VLLMError, OSError, RuntimeError)):
            raise EngineFailed(f"{name}: {type(error).__name__}: {error}") from error
        raise


@contextmanager
def _local_folder(uri: str) -> Generator[str]:
    """The folder behind a path or URI; a remote one is copied beside the engine for as long as it is read."""
    source, path = fs.FileSystem.from_uri(uri if "://" in uri else str(Path(uri).resolve()))
    if isinstance(source, fs.LocalFileSystem):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mempo-weights-") as folder:
        fs.copy_files(path, folder, source_filesystem=source, destination_filesystem=fs.LocalFileSystem())
        yield folder
