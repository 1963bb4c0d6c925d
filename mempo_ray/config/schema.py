"""The whole configuration, one section a box of the dataflow. Frozen; unknown keys are refused.

A default lives here and nowhere else. Names of estimators, losses, managers and scorers are resolved by the
driver's preflight, not here. Derived numbers are properties. Units stand in the names: `_s`, `_tokens`, `_gb`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Files = Annotated[tuple[str, ...], Field(min_length=1)]
NonNegative = Annotated[float, Field(ge=0)]
LabelValue = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")]


class Section(BaseModel):
    """Base of all sections: immutable, and a key that nobody reads is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True, protected_namespaces=()
    )


class Run(Section):
    name: str = "mempo"
    """Name of the run: part of the run folder, of actor names and of metric tags."""
    dir: str = "runs"
    """Folder (or pyarrow filesystem URI) under which `<name>-<time>` is made; `latest` points at the newest. A relative
    one lies under $MEMPO_RUN_DIR; without it, in the current folder, or in ~/mempo-runs for a submitted Ray job."""
    steps: Annotated[int, Field(ge=0)] = 30
    """Optimisation steps. 0 runs the cold start and the evaluation only."""
    seed: int = 0
    """Seeds data order, sampling (per run, task, sibling, turn) and initial weights."""
    resume: str = ""
    """'auto' continues from the newest complete checkpoint of this run's name; a path: from there; '' = new run."""
    deterministic: bool = False
    """Score and train in (task, sibling, turn) order, cut by token budget only: a resumed run is bitwise the same."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept, besides the best by EM."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints; the last step always writes one. 0 = only the last."""
    max_excluded_share: Share = 0.2
    """Above this share of a step's trajectories excluded by infrastructure failures, the run ends with the reasons."""
    step_timeout_s: Positive = 3600
    """Deadline of one whole step."""


class Data(Section):
    train: str | Files = "synthetic:train"
    """Training tasks: a .jsonl or .parquet file, a list of them, or the synthetic world (see docs/data.md)."""
    eval: str | Files = "synthetic:eval"
    """Held-out tasks."""
    question_key: str = "question"
    """Column that holds the question, or `extra_info.question`: a key of an object in a column."""
    answer_key: str = "golden_answers"
    """Column (or column.key) of the gold answer(s): str, list of aliases, or list of lists (several objectives)."""
    tasks_per_step: Count = 16
    """Tasks (questions) per step; each is sampled `algorithm.group_size` times."""
    shuffle: bool = True
    """Seeded shuffle each epoch."""


class ColdStart(Section):
    """Supervised fine-tuning on oracle trajectories before RL. Absent section = no cold start."""

    tasks: Count = 512
    """Oracle trajectories to keep: training tasks are walked in a seeded order until so many are kept."""
    epochs: Count = 1
    """Passes over the kept rows."""
    lr: Positive = 1e-3
    """Peak learning rate of the cold start."""
    batch_tokens: Count = 16384
    """Tokens (prompt + output) per optimiser step, over all ranks."""
    warmup_share: Share = 0.05
    """Share of the steps over which the rate rises from 0."""
    probe_share: Share = 0.0
    """Share of additional rows in the two scoring forms of §3: memory context → answer, full history → answer."""


class AgentLimits(Section):
    turn_tokens: Count = 512
    """Largest output of one turn."""
    tool_tokens: Count = 2048
    """Largest tool response; cut at a passage border and marked."""
    episode_tokens: Count = 12288
    """Budget of output and tool tokens over an episode; reaching it ends it as `length`."""
    episode_s: Positive = 600
    """Wall-clock budget of an episode (end reason `deadline`)."""
    search_retries: Annotated[int, Field(ge=0)] = 5
    """Retries of a failed search, with back-off and jitter; of other tools where `tools_file` gives none."""
    search_s: Positive = 30
    """Deadline of one search call; of other tools where `tools_file` gives none."""


class Agent(Section):
    context: Literal["last_turn", "full", "k_turns", "memory_only"] = "last_turn"
    """What the next prompt holds (algorithm.md §1)."""
    k_turns: Count = 2
    """Tool rounds kept under `context: k_turns`."""
    max_turns: Count = 16
    """Turns per episode."""
    limits: AgentLimits = AgentLimits()
    max_resamples: Annotated[int, Field(ge=0)] = 1
    """How often an episode that infrastructure broke is sampled again, under the same seeds."""
    system_prompt: str = ""
    """Text of the system message; '' = none."""
    chat_template: str = "auto"
    """'auto' = the model folder's own template; or a path of a jinja file."""
    tools: tuple[str, ...] = ("search",)
    """Registered tools that the policy may call: search, calculator, python, and those of `plugins`."""
    tools_file: str = ""
    """YAML file with settings of tools, tools by import path and MCP servers (agent/tools/catalogue.py); '' = none."""
    tool_parser: str = "tags"
    """Registered form of a call: 'tags' (a tag a tool: <search>…</search>) or 'hermes' (<tool_call> with JSON)."""
    top_k: Count = 3
    """Passages per search."""
    workers: Count = 1
    """AgentLoopWorker actors."""
    episodes_per_worker: Count = 256
    """Episodes in flight per worker."""


class Scaling(Section):
    """When a pool between `min_replicas` and `max_replicas` changes its size (placement/elastic.py)."""

    up_wait_s: Positive = 10
    """How long requests must have queued before the pool grows."""
    down_idle_s: Positive = 300
    """How long fewer replicas must have been enough before the pool shrinks; longer than an update takes."""
    cooldown_s: NonNegative = 30
    """Rest after a change."""
    min_waiting_share: Share = 0.2
    """Where the run waited for the pool in less of a step than this share, the pool does not limit it: no growth."""


class Rollout(Section):
    replicas: Count = 1
    """Engines at the start."""
    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Lower bound of the elastic pool. Fewer live engines than this for `startup_timeout_s` ends the run."""
    max_replicas: Count = 1
    """Upper bound of the elastic pool; equal to `min_replicas`: the pool is fixed."""
    scaling: Scaling = Scaling()
    max_kv_use: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Mean share of the KV caches in use above which an elastic pool is too small, even if nothing queues."""
    temperature: Positive = 1.0
    """Sampling temperature in training; evaluation is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1 in training: a truncated distribution makes log-probs of another policy."""
    top_k: int = 0
    """0 = off; must be 0 in training."""
    stop_at_tags: bool = False
    """Stop after </search> or </answer>; the end-of-turn id is then added with mask 0."""
    engine: Literal["vllm", "fake"] = "vllm"
    """'fake' is a scripted engine for tests and benchmarks."""
    fake_turn_s: NonNegative = 0.0
    """Mean time of a turn of the scripted engine (log-normal); 0 = none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Weights and activations of the engine."""
    max_model_len: Count = 4096
    """Longest prompt + output."""
    max_num_seqs: Count = 128
    """Sequences that an engine runs at once."""
    kv_cache_gb: Positive = 1.0
    """KV cache on CPU (GiB)."""
    gpu_memory_utilization: Share = 0.85
    """Share of GPU memory for weights and KV cache."""
    tensor_parallel: Count = 1
    """GPUs per engine."""
    enforce_eager: bool = True
    """No graph capture or compilation; on CPU that saves minutes of start-up."""
    threads: Count = 1
    """OpenMP threads of a CPU engine."""
    request_timeout_s: Positive = 120
    """Deadline of one turn, queueing included."""
    startup_timeout_s: Positive = 300
    """Deadline of an engine's start or restart."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """Restarts over all engines of a run, after which the run ends."""


class Retrieval(Section):
    mode: Literal["live", "record", "replay"] = "live"
    """'record' also writes every search of the run to `record`; 'replay' answers from such a file, without an index."""
    record: str = ""
    """Arrow file of recorded searches; '' = searches.arrow in the run folder ('record' only)."""
    backend: Literal["local", "http"] = "local"
    """'local' = RetrievalActors of this run; 'http' = the server at `url`."""
    url: str = ""
    """Where `backend: http` posts queries, e.g. http://host:8000/retrieve (Search-R1's form, see docs/retrieval.md)."""
    index: str = ""
    """Folder of a built index; '' = build one from `corpus` into the run folder."""
    corpus: str = "synthetic"
    """JSONL or Parquet of passages (id, title, text), or 'synthetic' for the worlds of `data`."""
    encoder: str = "hash"
    """'hash' (no model), 'minilm', or a local sentence-encoder folder."""
    embeddings: str = ""
    """Prepared passage embeddings (.npy, row i = passage i) in place of the encoder pass."""
    kind: Literal["flat", "ivf", "hnsw", "ivfpq", "bm25", "hybrid"] = "flat"
    """Index to build: FAISS, BM25 (no encoder), or flat and BM25 fused (hybrid)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where encoder and index run."""
    replicas: Count = 1
    """RetrievalActors at the start."""
    min_replicas: Annotated[int, Field(ge=0)] = 0
    """Lower bound of the elastic pool; 0 = `replicas`. Fewer live ones than this for policy.startup_timeout_s ends the
    run."""
    max_replicas: Annotated[int, Field(ge=0)] = 0
    """Upper bound of the elastic pool; 0 = `replicas`. Equal to the lower bound: the pool is fixed."""
    scaling: Scaling = Scaling()
    threads: Count = 1
    """Threads of encoder and FAISS per replica."""
    max_batch: Count = 64
    """Queries per encoder batch; an elastic pool is too small where more than so many a replica wait or run."""
    max_wait_s: NonNegative = 0.005
    """Longest wait of a query for company."""
    max_queued: Count = 4096
    """Queries that may wait at a replica; a search that would bring more is asked elsewhere."""
    cache_entries: Annotated[int, Field(ge=0)] = 100_000
    """Entries of the LRU cache (query, k)."""
    disk_cache: str = ""
    """SQLite file of a second cache, kept over runs and shared by the replicas of a machine; '' = none."""
    disk_cache_entries: Count = 1_000_000
    """Entries of the disk cache, the oldest out first."""

    @property
    def needs_index(self) -> bool:
        """Whether this run searches an index of its own, with RetrievalActors."""
        return self.mode != "replay" and self.backend == "local"

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most replicas."""
        return self.min_replicas or self.replicas, self.max_replicas or self.replicas

    @property
    def is_elastic(self) -> bool:
        least, most = self.bounds
        return self.needs_index and least < most


class CustomFunction(Section):
    path: str = ""
    """Python file that holds the function; '' = none."""
    name: str = "compute_score"
    """Name of the function in it."""
    kwargs: dict[str, Any] = {}
    """More keyword arguments of the function."""


WALL_FACTOR = 3
"""Seconds of the clock for each CPU second that code may use: it may have to share its processor."""


class Sandbox(Section):
    """Where code that a policy wrote runs: for scorers of code tasks, and for the `python` tool."""

    allow_weak: bool = False
    """Run code even where nothing but process limits shuts it in (`mempo-ray doctor` names the level of a machine)."""
    run_s: Positive = 8
    """CPU seconds of one run (of each of its processes, rounded up); it ends after three times as long by the clock. A
    service is told the latter."""
    memory_mb: Count = 1024
    """Memory of one run (MiB)."""
    output_kb: Count = 1024
    """Output of one run (KiB), on stdout and on stderr; more ends it."""
    files_mb: Count = 64
    """Size of the working folder (MiB), which is empty at the start and gone at the end."""
    processes: Count = 32
    """Processes and threads of one run."""
    concurrency: Count = 2
    """Runs at once, per worker. A call of the `python` tool that waits for its run uses only its episode's time."""
    url: str = ""
    """Address of a service in Sandbox-Fusion's form ('http://…/run_code'); '' = run on the worker's own machine."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further tries of a request to that service that failed (5xx, 429, network)."""


class Overlong(Section):
    """`manager: dapo`: the last tokens of the response budget cost, linearly (DAPO, eq. 13)."""

    max_response_tokens: Count = 4096
    """Sampled tokens of a whole trajectory at which the penalty is `penalty_factor`; it goes on rising beyond."""
    buffer_tokens: Count = 512
    """Tokens before that over which it rises from 0."""
    penalty_factor: Positive = 1.0
    """What is taken off the score at `max_response_tokens`."""


class Judge(Section):
    """`style: api`: a model behind an OpenAI-compatible endpoint reads the response and names a score."""

    url: str = ""
    """Address below which `/chat/completions` lies, e.g. http://host:8000/v1."""
    model: str = ""
    """Name of the model in the request."""
    template: str = ""
    """Jinja file of the prompt; it sees question, solution, turns, answer, golds, data_source and extra_info."""
    score_pattern: str = r"(?i)\bscore\W{1,4}(-?\d+(?:\.\d+)?)"
    """Regular expression; group 1 of its last match in the reply is the score."""
    lowest: float = 0.0
    """Score of the judge's scale that becomes 0; a reply below it is not a score."""
    highest: float = 1.0
    """Score of the judge's scale that becomes 1; a reply above it is not a score."""
    max_tokens: Count = 512
    """Longest reply."""
    temperature: NonNegative = 0.0
    """Of the judge."""
    api_key_env: str = ""
    """Environment variable that holds the bearer token; '' = none is sent."""
    timeout_s: Positive = 60
    """Deadline of one judgement: its waits for the limits and its retries included."""
    retries: Annotated[int, Field(ge=0)] = 4
    """Further tries after 429, 5xx or a broken connection, with jitter; Retry-After is obeyed."""
    requests_per_s: Positive = 10
    """Requests that start in a second, over the whole cluster."""
    concurrency: Count = 16
    """Requests in flight, over the whole cluster."""


class RewardModel(Section):
    """`style: model`: a Bradley-Terry or process reward model, on its own placement."""

    folder: str = ""
    """Local Hugging Face folder, with its own tokenizer."""
    chat_template: str = "auto"
    """'auto' = the folder's own template; or a path of a jinja file."""
    process: bool = False
    """Score the end of each turn (a process reward model); the score is then `aggregate` of those."""
    aggregate: Literal["last", "min", "mean", "none"] = "last"
    """How the scores of the turns become one; none = the score is 0, and only the turns have one (docs/rewards.md)."""
    squash: bool = True
    """Put a head of one logit through a sigmoid, so that scores lie in (0, 1)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and activations."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs."""
    threads: Count = 1
    """CPU threads."""
    max_tokens: Count = 8192
    """Longest input; a longer one loses its first tokens, which is reported as <name>/truncated."""
    micro_batch_tokens: Count = 16384
    """Token budget of one micro-batch, padding included."""
    max_wait_s: NonNegative = 0.02
    """Longest wait of a response for company."""
    timeout_s: Positive = 120
    """Deadline of one score, waiting included."""

    @model_validator(mode="after")
    def _scores_something(self) -> RewardModel:
        if self.aggregate == "none" and not self.process:
            raise ValueError("aggregate=none leaves only the scores of the turns, which process=true gives")
        return self


class Style(Section):
    """One part of `manager: hybrid`: a source of scores, and its weight in the sum."""

    style: Literal["rule", "model", "api", "sandbox"] = "rule"
    """rule and sandbox: a registered scorer (code tasks are run in the sandbox); model; api."""
    weight: float = 1.0
    """Factor of its score in the sum; under adv_estimator=gdpo, of its normalised score."""
    data_sources: tuple[str, ...] = ()
    """Rows that it scores, by data_source (`*` matches anything); none = all."""
    scorer: str = "auto"
    """Of rule and sandbox: registered scorer, 'auto' (by data_source), or 'custom_function'."""
    judge: Judge = Judge()
    reward_model: RewardModel = RewardModel()

    @model_validator(mode="after")
    def _complete(self) -> Style:
        judge = self.judge
        if self.style == "api" and not (judge.url.startswith(("http://", "https://")) and judge.template):
            raise ValueError("style=api needs judge.url (http://…/v1) and judge.template (a jinja file)")
        if self.style == "api" and not judge.lowest < judge.highest:
            raise ValueError("judge.lowest must be below judge.highest")
        if self.style == "model" and not self.reward_model.folder:
            raise ValueError("style=model needs reward_model.folder, a local Hugging Face folder")
        return self


class Reward(Section):
    manager: str = "naive"
    """Registered reward manager: naive, batch, dapo, prime, remote, hybrid, or one of a plugin."""
    styles: dict[str, Style] = {}
    """Parts of `manager: hybrid`, by name; each part's score is reported as part/<name>."""
    scorer: str = "auto"
    """Registered scorer; 'auto' = the one of the row's data_source (MemPO's for rows without one)."""
    multi_objective: Literal["mean", "sum", "all"] = "mean"
    """How several objectives become one score (§2)."""
    custom_function: CustomFunction = CustomFunction()
    overlong: Overlong = Overlong()
    workers: Count = 1
    """RewardManagerWorker actors."""
    isolation: Literal["auto", "process", "thread"] = "auto"
    """Where scorers run: in processes that can be killed, or in threads of the worker. auto = processes for the custom
    function and for scorers registered as needing them, threads for the rest; 'thread' has the custom function in a
    thread too, where an endless loop, os._exit or a segfault takes the worker with it."""
    processes: Count = 2
    """Scorer processes of one worker, where `isolation` or the manager asks for them."""
    memory_gb: Positive = 2
    """Data memory of one scorer process (GB); a scorer that wants more has a MemoryError."""
    batch_size: Count = 64
    """Most responses that `manager: batch` hands to its scorer at once."""
    timeout_s: Positive = 60
    """Deadline of one call of a scorer, from its start."""
    tool_weights: dict[str, float] = {}
    """Weight in the score of what a tool itself says of an episode, by tool; without one it is only reported."""
    sandbox: Sandbox = Sandbox()
    code_tests: Literal["share", "all"] = "share"
    """Score of a program: the share of tests that it passes, or 1 only where it passes all."""
    code_s: Positive = 45
    """Seconds by the clock that all tests of one program may last in all; the rest then counts as failed. Below
    `timeout_s`."""
    max_rescores: Annotated[int, Field(ge=0)] = 1
    """How often a trajectory is scored again that nobody has judged: the scorer was late, or its process broke."""
    max_unscored_share: Share = 0.2
    """Above this share of a step's trajectories without a score, the run ends with the reasons."""
    log_samples: Annotated[int, Field(ge=0)] = 3
    """First trajectories of a run that are printed and logged with their scores by rule."""

    @model_validator(mode="after")
    def _parts(self) -> Reward:
        if (self.manager == "hybrid") != bool(self.styles):
            raise ValueError("reward.styles are the parts of reward.manager=hybrid: give both, or neither")
        if "part" in self.styles:
            raise ValueError("reward.styles: 'part' is what the parts are reported under; name this one otherwise")
        return self

    @property
    def models(self) -> dict[str, RewardModel]:
        """Reward models by the names of their parts; each has an actor of its own."""
        return {name: style.reward_model for name, style in self.styles.items() if style.style == "model"}

    @property
    def has_judges(self) -> bool:
        return any(style.style == "api" for style in self.styles.values())


class MemoryReward(Section):
    name: str = "mempo"
    """Registered memory reward: mempo (P_mem − P_full, §3), or one of a plugin."""
    weight: NonNegative = 1.0
    """λ of §4. 0 turns memory scoring off (plain GRPO)."""
    baseline: Literal["full_history", "previous_memory", "question_only", "none"] = "full_history"
    """What P_mem is compared with (algorithm.md §3)."""
    transform: Literal["probability", "logprob", "sign"] = "probability"
    """What the difference is taken of."""
    dead_band: NonNegative = 0.01
    """`transform: sign` gives 0 inside ± this."""
    gate: Literal["always", "success_only", "format_ok"] = "always"
    """Which trajectories get a memory reward."""
    turns: Literal["all", "exclude_first", "final_only"] = "all"
    """Which turns are scored."""
    scorer: Literal["live", "reference"] = "live"
    """Whose log-probs score: today's policy, or the frozen reference."""
    scorer_engine: Literal["policy", "vllm"] = "policy"
    """Who computes the live policy's: its own ranks, or the rollout engines, by forced decoding (docs/scoring.md)."""
    alias: Literal["first", "max", "mean"] = "first"
    """Which of several gold aliases is probed."""
    objectives: Literal["joined", "per_objective"] = "joined"
    """Several objectives: one probe joined with '; ', or a probe each, differences averaged."""
    pool: Literal["group_turns", "turn_index", "trajectory"] = "group_turns"
    """Over which samples the memory advantage is normalised (§4)."""
    min_std: NonNegative = 1e-4
    """Pools with a smaller standard deviation are flat; use 1e-3 with a bf16 scorer."""
    max_history_tokens: Annotated[int, Field(ge=0)] = 0
    """0 = no limit. Above it the sample is dropped and counted, or the history truncated."""
    long_history: Literal["drop", "truncate"] = "drop"
    """What happens to a history above `max_history_tokens`."""
    streaming: bool = True
    """Score a trajectory when it ends, beside generation."""


class GroupFilter(Section):
    """Groups whose outcome and memory pools are both flat (M14)."""

    mode: Literal["off", "drop", "resample"] = "off"
    """What happens to such a group."""
    max_resamples: Annotated[int, Field(ge=0)] = 2
    """Rounds of new tasks sampled to replace dropped groups."""


class AdaptiveKL(Section):
    """κ ← κ·(1 + clip(KL/target − 1, ±0.2)·n/horizon)."""

    target: Positive = 0.1
    """KL per token that κ is steered to."""
    horizon: Positive = 10_000
    """Trajectories over which κ adapts."""


class Sapo(Section):
    """`policy_loss: sapo`."""

    tau_positive: Positive = 1.0
    """Temperature of the gate where A > 0."""
    tau_negative: Positive = 1.05
    """Temperature where A ≤ 0; higher = such tokens fade sooner."""


class ClipCov(Section):
    """`policy_loss: clip_cov`."""

    share: Share = 2e-4
    """Share of a micro-batch's tokens that gives no gradient (at least one token)."""
    low: float = 1.0
    """Smallest covariance of log π and A of such a token."""
    high: float = 5.0
    """Largest covariance of such a token."""


class Algorithm(Section):
    group_size: Count = 8
    """Siblings per task (G)."""
    adv_estimator: str = "grpo"
    """Registered advantage estimator: grpo, dr_grpo, rloo, opo, gdpo, reinforce++, gae, or one of a plugin."""
    gamma: Share = 1.0
    """Discount from turn to turn (reinforce++, gae)."""
    gae_lambda: Share = 1.0
    """λ of gae; the turn is its time step, and there is no critic."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one."""
    normalize_by_std: bool = True
    """false = Dr. GRPO, together with `aggregation: trajectory_sum_norm`."""
    policy_loss: str = "ppo_clip"
    """Registered policy loss: ppo_clip, gspo, cispo, sapo, gpg, clip_cov, or one of a plugin."""
    sapo: Sapo = Sapo()
    clip_cov: ClipCov = ClipCov()
    combine: Literal["add", "success_only", "positive_only"] = "add"
    """How outcome and memory advantage become one (§4)."""
    rows: Literal["per_turn", "concatenated"] = "per_turn"
    """'concatenated' is the ablation that shows evicted history to the policy."""
    aggregation: Literal["trajectory_mean", "token_mean", "trajectory_sum", "trajectory_sum_norm"] = "trajectory_mean"
    """How token losses become one number (§5)."""
    norm_length: Annotated[int, Field(ge=0)] = 0
    """Divisor of trajectory_sum_norm (required with it)."""
    clip_low: Positive = 0.2
    """Lower clip of the ratio π/π_old: 1 − this."""
    clip_high: Positive = 0.2
    """Upper clip of the ratio: 1 + this."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Bound of the ratio where the advantage is negative."""
    sampler_correction: bool = True
    """Weight exp(log π_old − log π_sampler), capped by `correction_cap`, on the surrogate."""
    correction_cap: Positive = 2.0
    """Largest weight of `sampler_correction`."""
    entropy_bonus: NonNegative = 0.0
    """Coefficient of the entropy, per token."""
    kl_coef: NonNegative = 1e-3
    """β of the loss term; 0 needs no reference model."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of the KL to the reference."""
    kl_in_reward: bool = False
    """Subtract κ·KL from the token rewards in place of a loss term."""
    kl_reward_coef: NonNegative = 1e-3
    """κ; with `adaptive_kl` its start."""
    adaptive_kl: AdaptiveKL | None = None
    """Steer κ; absent = fixed."""
    mini_batches: Count = 1
    """Optimiser steps per batch."""
    epochs: Count = 1
    """Passes over a batch."""
    group_filter: GroupFilter = GroupFilter()


class BatchExecutor(Section):
    micro_batch_tokens: Count = 16384
    """Token budget of one log-prob micro-batch, per rank."""
    max_wait_s: NonNegative = 0.02
    """Longest wait of a request for company."""
    max_queued_tokens: Count = 4_000_000
    """Above it a request is refused (Overloaded)."""
    request_timeout_s: Positive = 600
    """Deadline of a log-prob request."""
    command_timeout_s: Positive = 1800
    """Deadline of a train, export or checkpoint command; a rank that misses it ends the gang."""


class Policy(Section):
    model: str = "builtin:tiny"
    """Local Hugging Face folder, or 'builtin:tiny' (shipped)."""
    ranks: Count = 1
    """FSDP ranks."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters in forward and backward; master weights and reductions are float32."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Autocast of matrix products (CPU speed)."""
    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or cosine to 0 over the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps over which the rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's β1 and β2."""
    eps: Positive = 1e-8
    """AdamW's ε."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: Count = 16384
    """Token budget of one forward and backward per rank; no row may be longer."""
    share_prefixes: bool = True
    """Run once what rows of an update begin with alike (system prompt, question, a turn inside the next prompt): the
    same gradients, 1.3 to 2 times faster at usual lengths (docs/scoring.md)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    cpu_offload: bool = False
    """Optimiser state and reference stay in host memory."""
    threads: Count = 1
    """CPU threads per rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks run."""
    startup_timeout_s: Positive = 300
    """Deadline of the gang's start."""
    max_restarts: Annotated[int, Field(ge=0)] = 2
    """How often a run starts lost ranks again, from its newest checkpoint (run.checkpoint_every), before it ends."""


class WeightSync(Section):
    transport: Literal["auto", "pull", "nccl", "ipc"] = "auto"
    """auto = CUDA IPC when colocated, NCCL for a fixed pool on GPUs, pull elsewhere."""
    timeout_s: Positive = 120
    """Deadline of one sync, proofs included."""
    max_gap: Positive = 1e-3
    """Largest |Δ log-prob| of the proof sequence that counts as verified (float32; use 0.05 with a bf16 engine)."""


class Placement(Section):
    layout: Literal["cpu", "colocated", "disaggregated"] = "cpu"
    """cpu; or GPUs shared by ranks and engines in turn, or apart."""
    num_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of the run in all; 0 = by role."""
    num_cpus: Positive = 1.0
    """Logical CPUs of the run in all, shared out by role as fractions."""
    timeout_s: Positive = 600
    """Longest wait for the cluster to hold the plan."""
    cluster_shape: str = ""
    """File with the largest shape that the cluster can take: its own form, for `ray up`, or a RayCluster
    (docs/architecture.md); '' = what is up, or what the autoscaler is known to add."""
    labels: dict[Literal["policy", "rollout", "retrieval", "agent", "reward"], dict[str, LabelValue]] = {}
    """Ray node labels that a role's nodes must have, e.g. {policy: {ray.io/market-type: on-demand}}."""
    address: str = ""
    """Ray address; '' = the cluster of this job, or a local one."""
    object_store_gb: Positive = 0.5
    """Object store of a local cluster."""


class Eval(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 = only at the end."""
    before_train: bool = True
    """Evaluate before the first step too."""
    tasks: Count = 200
    """Held-out questions: the first ones of the source, always the same; of `mempo-ray eval` too."""
    memory_swap: bool = False
    """Also evaluate with each <mem> replaced by another question's (does the answer depend on memory?)."""
    probe_ratios: bool = False
    """Also report p_mem_ratio and p_full_ratio on held-out oracle trajectories after the cold start."""


class Alarms(Section):
    """Signs of trouble that are said in the run's log (observability/alarms.py)."""

    window: Annotated[int, Field(ge=2)] = 10
    """Steps that a trend is looked for in."""
    min_change: Positive = 0.05
    """Smallest rise of the reward, and fall of EM, that together count as reward hacking."""
    max_kl: Positive = 0.5
    """Largest KL to the reference, per token."""
    flat_share: Share = 0.9
    """Largest share of groups with equal scores."""
    unscored_share: Share = 0.05
    """Largest share of a step's trajectories without a score."""
    length_ratio: Annotated[float, Field(gt=1)] = 2.0
    """Largest factor, up or down, between output tokens now and in the first steps."""


class Config(Section):
    run: Run = Run()
    data: Data = Data()
    cold_start: ColdStart | None = None
    agent: Agent = Agent()
    rollout: Rollout = Rollout()
    retrieval: Retrieval = Retrieval()
    reward: Reward = Reward()
    memory_reward: MemoryReward = MemoryReward()
    algorithm: Algorithm = Algorithm()
    batch_executor: BatchExecutor = BatchExecutor()
    policy: Policy = Policy()
    weight_sync: WeightSync = WeightSync()
    placement: Placement = Placement()
    eval: Eval = Eval()
    alarms: Alarms = Alarms()
    trackers: tuple[str, ...] = ()
    """accelerate trackers by name (tensorboard, wandb, mlflow, …)."""
    plugins: tuple[str, ...] = ()
    """Python modules that register the user's own pieces; imported in the driver, the agent and reward workers and the
    policy's ranks."""

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.top_p != 1 or self.rollout.top_k != 0:
            raise ValueError(
                "rollout.top_p / rollout.top_k: training needs the untruncated distribution; set top_p=1 and top_k=0"
            )
        a = self.algorithm
        if a.kl_in_reward and a.kl_coef > 0:
            raise ValueError("algorithm.kl_in_reward and algorithm.kl_coef > 0 exclude each other; set kl_coef=0")
        if a.adv_estimator == "gdpo" and (a.kl_in_reward or self.reward.tool_weights):
            key = "algorithm.kl_in_reward" if a.kl_in_reward else "reward.tool_weights"
            raise ValueError(f"{key}: adv_estimator=gdpo sees the parts of a reward and nothing else; use another one")
        if a.aggregation == "trajectory_sum_norm" and a.norm_length == 0:
            raise ValueError("algorithm.norm_length: aggregation=trajectory_sum_norm needs a positive norm_length")
        if a.adaptive_kl is not None and not a.kl_in_reward:
            raise ValueError("algorithm.adaptive_kl needs algorithm.kl_in_reward=true")
        r = self.retrieval
        if r.mode == "replay" and not r.record:
            raise ValueError("retrieval.record: mode=replay needs the file of a recorded run (its searches.arrow)")
        if r.mode != "replay" and r.backend == "http" and not r.url.startswith(("http://", "https://")):
            raise ValueError("retrieval.url: backend=http needs an address such as http://host:8000/retrieve")
        if not self.rollout.min_replicas <= self.rollout.replicas <= self.rollout.max_replicas:
            raise ValueError("rollout.replicas must lie between rollout.min_replicas and rollout.max_replicas")
        if not r.bounds[0] <= r.replicas <= r.bounds[1]:
            raise ValueError("retrieval.replicas must lie between retrieval.min_replicas and retrieval.max_replicas")
        if self.memory_reward.scorer_engine == "vllm":
            key = "memory_reward.scorer_engine=vllm"
            if self.memory_reward.scorer == "reference":
                raise ValueError(f"{key}: engines hold the live policy only; set memory_reward.scorer=live")
            if self.run.deterministic:
                raise ValueError(f"{key} gives no bitwise equal log-probs; set run.deterministic=false")
            if self.rollout.temperature != 1:
                raise ValueError(f"{key} needs rollout.temperature=1: scores are taken at temperature 1")
        return self

    @property
    def streams_scoring(self) -> bool:
        """Whether a trajectory is scored beside generation; on shared GPUs the policy has to wait for its turn."""
        policy_waits = self.placement.layout == "colocated" and self.memory_reward.scorer_engine == "policy"
        return self.memory_reward.streaming and not self.run.deterministic and not policy_waits

    @property
    def needs_reference(self) -> bool:
        a = self.algorithm
        return a.kl_coef > 0 or a.kl_in_reward or self.memory_reward.scorer == "reference"
