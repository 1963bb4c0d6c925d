"""What can be wrong with a run, found before anything starts, from cheap to dear.

    names ──▶ token arithmetic of the keys ──▶ files: model, tasks, index, run folder, resume ──▶ tokens of real prompts

Every message names the key or file and the remedy. Nothing here imports torch, ray or transformers, so a mistake costs
seconds; what the cluster lacks is `placement.plan`'s to say, and comes after.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from mempo_ray.actors.retrieval_errors import typed_errors
from mempo_ray.actors.search_record import read_record
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.agent.tools import TOOLS, Services, Toolbox
from mempo_ray.algo.registry import ADV_ESTIMATORS, MEMORY_REWARDS, POLICY_LOSSES
from mempo_ray.config.load import resolved_yaml
from mempo_ray.config.models import check_model_folder, read_model_shape
from mempo_ray.config.schema import WALL_FACTOR, Config
from mempo_ray.contracts import Passage, Task
from mempo_ray.data.oracle import plan_of
from mempo_ray.data.tasks import TaskSource, read_tasks
from mempo_ray.data.world import is_synthetic, same_atlas, source_name
from mempo_ray.errors import ConfigError, DataError, MempoError, ToolFailed
from mempo_ray.observability.mirror import Mirror, find_checkpoint
from mempo_ray.placement.machine import this_machine
from mempo_ray.placement.plan import Plan, few, folder_roles, make_plan
from mempo_ray.placement.shape import ClusterShape, ClusterView, read_cluster_shape
from mempo_ray.rewards.registry import MANAGERS, SCORERS
from mempo_ray.rewards.rows import has_programs, row_check
from mempo_ray.rewards.sandbox import code_service, open_sandbox
from mempo_ray.rewards.styles.api import check_judge
from retrieval_index.corpus import read_corpus
from retrieval_index.encoder import Encoder, make_encoder
from retrieval_index.retriever import check_index

TRACKERS = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet_ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""accelerate's trackers and the package that each needs."""


@dataclass(frozen=True)
class Checked:
    """What a dry run shows: the plan, the whole configuration, and what would stop the run here ('' = nothing)."""

    config: Config
    plan: Plan
    missing: str = ""
    busy: str = ""

    @property
    def exit_code(self) -> int:
        """0: the plan fits, and either the files are here or the plan is for another cluster; else 2."""
        elsewhere = bool(self.config.placement.cluster_shape)
        return 2 if self.plan.shortages or (self.missing and not elsewhere) else 0

    def describe(self) -> str:
        """The configuration, and below it, where a terminal stays, the plan and what stands in its way."""
        parts = ["Configuration:\n", resolved_yaml(self.config), self.plan.table()]
        if self.busy:
            parts.append(f"  busy: {self.busy}")
        if self.missing:
            parts.append(f"\nNot ready on this machine:\n{self.missing}")
        return "\n".join(parts)


def preflight(config: Config, *, dry_run: bool = False, view: ClusterView | None = None) -> Checked:
    """Check all that needs no cluster.

    Args:
        dry_run: what is missing here (files, resources) is kept in the answer in place of being raised, so that a
            run can be planned where its data and model are not.
        view: of the running cluster that a dry run plans for; None: `known_shape`.

    Raises:
        ConfigError, DataError, PlacementError: the first mistake, by key or file, with its remedy.
    """
    import_plugins(config)
    check_names(config)
    check_token_limits(config)
    missing = ""
    try:
        check_files(config)
    except (ConfigError, DataError) as error:
        if not dry_run:
            raise
        missing = str(error)
    shape = view.largest if view else known_shape(config) if dry_run else this_machine()
    plan = make_plan(config, shape, read_model_shape(config.policy.model))
    if not dry_run and not joins_a_cluster(config):
        plan.require()
    try:
        check_local_runs(config, plan)
    except ConfigError as error:
        if not dry_run:
            raise
        missing = "\n".join(filter(None, [missing, str(error)]))
    return Checked(config, plan, missing, "" if view is None else plan.busy(view))


def check_files(config: Config) -> None:
    """Model folder, tasks, index or corpus, run folder, checkpoint; then the tokens of the longest real prompt."""
    model = check_model_folder("policy.model", config.policy.model)
    tokenizer = FileTokenizer.from_folder(model)
    renderer = Renderer.from_folder(model, tokenizer, config.agent)
    train_tasks, held_out = _tasks(config, "train"), _tasks(config, "eval")
    TaskSource(train_tasks).next(config.data.tasks_per_step)  # refuses a step of more tasks than there are
    check_probes(config, held_out)
    check_cold_start(config, train_tasks)
    check_retrieval(config)
    check_run_folder(config)
    check_resume(config, model, train_tasks)
    for which, tasks in (("train", train_tasks), ("eval", held_out)):
        check_vocabulary(config, tokenizer, which, tasks)
    check_prompts(config, renderer, model, [*train_tasks, *held_out])


def known_shape(config: Config) -> ClusterShape:
    """`placement.cluster_shape`, or this machine: what can be known without asking a cluster."""
    shape = config.placement.cluster_shape
    return read_cluster_shape(shape) if shape else this_machine()


def joins_a_cluster(config: Config) -> bool:
    """Whether the run joins a cluster that is up, and does not start one of its own on this machine."""
    return (config.placement.address or os.environ.get("RAY_ADDRESS") or "local") != "local"


def import_plugins(config: Config) -> None:
    """Import the user's modules, so that what they register is known. Raises ConfigError."""
    for name in config.plugins:
        try:
            importlib.import_module(name)
        except MempoError:
            raise
        except Exception as error:
            raise ConfigError(
                f"plugins: {name}: {type(error).__name__}: {error}. It must be importable from here (PYTHONPATH)."
            ) from error


def check_names(config: Config) -> None:
    """Everything that the configuration names, and that the schema does not list, is registered."""
    ADV_ESTIMATORS.check(config.algorithm.adv_estimator)
    POLICY_LOSSES.check(config.algorithm.policy_loss)
    MEMORY_REWARDS.check(config.memory_reward.name)
    MANAGERS.check(config.reward.manager)
    for scorer in (config.reward.scorer, *(style.scorer for style in config.reward.styles.values())):
        if scorer not in ("auto", "custom_function"):
            SCORERS.check(scorer)
    check_tools(config)
    for tracker in config.trackers:
        if tracker not in TRACKERS:
            near = difflib.get_close_matches(tracker, TRACKERS, 1, 0.0)[0]
            raise ConfigError(f"trackers: unknown tracker {tracker!r}; did you mean {near!r}? Known: "
                              f"{', '.join(TRACKERS)}.")  # fmt: skip
        package = TRACKERS[tracker]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trackers: {tracker} needs the package {package}, which is not installed: pip install {package}"
            )
    _check_custom_function(config)
    _check_styles(config)


def check_tools(config: Config) -> None:
    """The tools can be made, by name and by file; a `python` tool has a sandbox. No server is asked."""
    for tool in config.agent.tools:
        TOOLS.check(tool)
    tools = Toolbox(config.agent, Services(_no_search, code_service(config.reward.sandbox)))
    if "python" in tools.names:
        check_sandbox(config)
        timeout_s, wall_s = tools.timeout_s("python"), WALL_FACTOR * config.reward.sandbox.run_s
        if timeout_s <= wall_s:
            raise ConfigError(
                f"agent.limits.search_s: a call of the python tool ends after {timeout_s:g} s, and its program may "
                f"last {wall_s:g} s ({WALL_FACTOR} · reward.sandbox.run_s): one that sleeps would look like a broken "
                "sandbox. Set run_s lower, or search_s (in agent.tools_file: the tool's timeout_s) higher."
            )
    if config.cold_start is not None and config.agent.tool_parser != "tags":
        raise ConfigError(
            f"agent.tool_parser: the cold start teaches calls as tags, not as {config.agent.tool_parser!r}; "
            "set tool_parser=tags, or remove the cold_start section"
        )
    unknown = sorted(config.reward.tool_weights.keys() - set(tools.names))
    if unknown and not tools.has_servers:
        raise ConfigError(f"reward.tool_weights: no tool {unknown[0]!r} in this run; it has {', '.join(tools.names)}")


def check_sandbox(config: Config) -> None:
    """Code can be shut in on this machine; another cluster's machines are asked by the code itself."""
    if not config.placement.address:
        open_sandbox(config.reward.sandbox)


async def _no_search(queries: Sequence[str], top_k: int) -> list[list[Passage]]:
    raise ToolFailed("there is no index in the preflight")


def _check_styles(config: Config) -> None:
    """Files and variables that the parts of a hybrid reward name are here; no judge is asked, no model loaded."""
    for name, style in config.reward.styles.items():
        if style.style == "api":
            check_judge(name, style.judge)
        if style.scorer == "custom_function" and not config.reward.custom_function.path:
            raise ConfigError(f"reward.styles.{name}.scorer: custom_function needs reward.custom_function.path")
    for name, model in config.reward.models.items():
        if not Path(model.folder, "config.json").is_file():
            raise ConfigError(f"reward.styles.{name}.reward_model.folder: {model.folder} has no config.json; name a "
                              "local Hugging Face folder.")  # fmt: skip


def _check_custom_function(config: Config) -> None:
    custom = config.reward.custom_function
    if not custom.path:
        return
    key = "reward.custom_function.path"
    try:
        tree = ast.parse(Path(custom.path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {custom.path} cannot be read ({error}); give a Python file.") from None
    except SyntaxError as error:
        raise ConfigError(f"{key}: {custom.path}, line {error.lineno}: {error.msg}.") from None
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if custom.name not in functions and custom.name not in _assigned_names(tree):
        have = ", ".join(functions)
        raise ConfigError(f"reward.custom_function.name: {custom.path} has no function {custom.name!r}; it has {have}.")


def _assigned_names(tree: ast.Module) -> set[str]:
    """Names that a module's statements bind other than by `def`: assignments and imports."""
    nodes = list(ast.walk(tree))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imports = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return stored | {alias.asname or alias.name for alias in imports}


# -- tokens -------------------------------------------------------------------------------------------------


def context_tokens(config: Config) -> tuple[int, str]:
    """Most tokens that a prompt can hold after its first part, and the sum in words."""
    agent, limits = config.agent, config.agent.limits
    turn, tool = limits.turn_tokens, limits.tool_tokens
    per_turn = f"{turn} (agent.limits.turn_tokens) + {tool} (agent.limits.tool_tokens)"
    if agent.context in ("last_turn", "memory_only"):
        return turn + tool, per_turn
    if agent.context == "k_turns":
        return agent.k_turns * (turn + tool), f"{agent.k_turns} (agent.k_turns) × ({per_turn})"
    shown = (agent.max_turns - 1) * (turn + tool)
    if shown <= limits.episode_tokens:
        return shown, f"{agent.max_turns - 1} (agent.max_turns − 1) × ({per_turn})"
    return limits.episode_tokens, f"{limits.episode_tokens} (agent.limits.episode_tokens)"


def check_token_limits(config: Config, initial_tokens: int = 0) -> None:
    """Prompt + tool + turn fit into the model's length, and every row into the token budgets.

    Args:
        initial_tokens: longest first prompt (system message and question); 0 before the tokenizer is known.

    Raises:
        ConfigError: with the sum spelled out.
    """
    context, words = context_tokens(config)
    limits, longest = config.agent.limits, config.rollout.max_model_len
    need = initial_tokens + context + limits.turn_tokens
    if need > longest:
        question = f"{initial_tokens} (longest system message and question) + " if initial_tokens else ""
        raise ConfigError(
            f"rollout.max_model_len: {longest} is too short for context={config.agent.context}: {question}{words} + "
            f"{limits.turn_tokens} (the turn itself) = {need} tokens. Raise it, or lower the agent's limits."
        )
    episode = min(limits.episode_tokens, config.agent.max_turns * (limits.turn_tokens + limits.tool_tokens))
    row, row_words = longest, f"a row can have {longest} tokens (rollout.max_model_len)"
    if config.algorithm.rows == "concatenated":
        row = initial_tokens + episode
        row_words = f"algorithm.rows=concatenated makes rows of {row} tokens (a whole episode)"
    if config.policy.micro_batch_tokens < row:
        raise ConfigError(
            f"policy.micro_batch_tokens: {config.policy.micro_batch_tokens} is shorter than one row: {row_words}. "
            f"Set it to at least {row}."
        )
    memory = config.memory_reward
    if memory.weight > 0 and memory.baseline == "full_history":
        history = min(initial_tokens + episode, memory.max_history_tokens or initial_tokens + episode)
        if memory.scorer_engine == "vllm":
            if longest <= history:
                raise ConfigError(
                    f"rollout.max_model_len: {longest} holds no full history of {history} tokens and the answer behind "
                    "it, which memory_reward.scorer_engine=vllm asks the engines for. Raise it, or set "
                    "memory_reward.max_history_tokens lower or scorer_engine=policy."
                )
        elif config.batch_executor.micro_batch_tokens < history:
            raise ConfigError(
                f"batch_executor.micro_batch_tokens: {config.batch_executor.micro_batch_tokens} is shorter than one "
                f"full history of {history} tokens. Set it to at least that, or memory_reward.max_history_tokens lower."
            )


def check_prompts(config: Config, renderer: Renderer, model: Path, tasks: Sequence[Task]) -> None:
    """The token arithmetic again with the longest real question, and against the model's own length."""
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    most = settings.get("max_position_embeddings")
    if most and config.rollout.max_model_len > most:
        raise ConfigError(
            f"rollout.max_model_len: {config.rollout.max_model_len} is longer than the {most} positions of "
            f"{config.policy.model}. Set it to at most {most}."
        )
    check_token_limits(config, max(len(renderer.initial_ids(question)) for question in _longest_questions(tasks)))


def check_vocabulary(config: Config, tokenizer: FileTokenizer, which: str, tasks: Sequence[Task]) -> None:
    """The policy can read the questions of `data.<which>`: most of their tokens are not the one for unknown words."""
    ids = [i for question in _longest_questions(tasks) for i in tokenizer.encode(question)]
    num_unknown = 0 if tokenizer.unknown_id is None else ids.count(tokenizer.unknown_id)
    if num_unknown > len(ids) / 2:
        source = source_name(getattr(config.data, which))
        raise ConfigError(
            f"policy.model: {config.policy.model} cannot read data.{which}={source}: in its longest questions "
            f"{num_unknown} of {len(ids)} tokens are words that the model does not know. Set "
            "policy.model to one that has them, e.g. as in configs/smollm2_cpu.yaml (`mempo-ray fetch` gets it)."
        )


def _longest_questions(tasks: Sequence[Task]) -> list[str]:
    """Enough of them to judge by: eight."""
    return sorted((task.question for task in tasks), key=len, reverse=True)[:8]


# -- files --------------------------------------------------------------------------------------------------


def _tasks(config: Config, which: str) -> list[Task]:
    source = getattr(config.data, which)
    try:
        tasks = read_tasks(source, config.data.question_key, config.data.answer_key, row_check(config.reward))
    except DataError as error:
        raise DataError(f"data.{which}: {error}") from None
    if any(has_programs(source, config.reward) for source in {task.data_source for task in tasks}):
        check_sandbox(config)
        reward = config.reward
        if reward.code_s >= reward.timeout_s:
            raise ConfigError(
                f"reward.code_s: all tests of a program may take {reward.code_s:g} s, but the call that runs them ends "
                f"after reward.timeout_s={reward.timeout_s:g} s, without a score. Set code_s lower or timeout_s higher."
            )
    return tasks


def check_probes(config: Config, held_out: Sequence[Task]) -> None:
    """`eval.probe_ratios` measures on oracle trajectories, so some held-out task must hold the hops of one."""
    if config.eval.probe_ratios and not any(map(plan_of, held_out[: config.eval.tasks])):
        raise ConfigError(
            f"eval.probe_ratios: none of the first {config.eval.tasks} tasks of {source_name(config.data.eval)} holds "
            "hops (metadata chain, evidences or decomposition) to measure on. Set eval.probe_ratios=false."
        )


def check_cold_start(config: Config, tasks: Sequence[Task]) -> None:
    """The cold start imitates oracle trajectories, so some task must hold the hops of one; a resumed run has had it."""
    if config.cold_start is not None and not config.run.resume and not any(map(plan_of, tasks)):
        raise ConfigError(
            f"cold_start: no task of {source_name(config.data.train)} holds hops (metadata chain, evidences or "
            "decomposition) to write oracle trajectories from. Set cold_start=null, and start from a policy.model that "
            "knows the format."
        )


def check_retrieval(config: Config) -> None:
    """The index belongs to the encoder, or the corpus can be read and prepared vectors fit it; or a record is there."""
    retrieval = config.retrieval
    if retrieval.mode == "replay":
        read_record(Path(retrieval.record))
        return
    if retrieval.backend == "http":
        return
    with typed_errors():
        if retrieval.index:
            check_index(retrieval.index, encoder=retrieval.encoder)
            return
        encoder = make_encoder(retrieval.encoder)
        if is_synthetic(retrieval.corpus):
            if not (is_synthetic(config.data.train) and is_synthetic(config.data.eval)):
                raise ConfigError(
                    "retrieval.corpus: 'synthetic' holds the facts of synthetic tasks, but data.train / data.eval are "
                    "files; give the passages' file."
                )
            same_atlas(config.data.train, config.data.eval)
            return
        next(read_corpus(retrieval.corpus), None)
        if retrieval.embeddings:
            _check_embeddings(config, encoder)


def _check_embeddings(config: Config, encoder: Encoder) -> None:
    file, corpus = config.retrieval.embeddings, Path(config.retrieval.corpus)
    try:
        shape = np.load(file, mmap_mode="r").shape
    except (OSError, ValueError) as error:
        raise DataError(f"retrieval.embeddings: {file} cannot be read ({error}); give a .npy file.") from None
    if shape[-1] != encoder.dim:
        raise DataError(
            f"retrieval.embeddings: {file} holds vectors of dimension {shape[-1]}, the encoder "
            f"{config.retrieval.encoder!r} makes {encoder.dim}; use the encoder that made them."
        )
    rows = pq.ParquetFile(corpus).metadata.num_rows if corpus.suffix == ".parquet" else _count_lines(corpus)
    if rows is not None and shape[0] != rows:
        raise DataError(f"retrieval.embeddings: {file} has {shape[0]} rows, {corpus} has {rows} passages; "
                        "row i must be the vector of passage i.")  # fmt: skip


def _count_lines(file: Path) -> int | None:
    """Lines that are not blank; None for a compressed file or one with a header, which the build will count."""
    if file.suffix in (".gz", ".tsv"):
        return None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def check_run_folder(config: Config) -> None:
    """A file can be written under `run.dir`, here or at its URI."""
    if (mirror := Mirror.of(config.run.dir)) is not None:
        mirror.check_writable()
        return
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write to {folder} ({error.strerror}); choose a writable folder.") from None


def check_local_runs(config: Config, plan: Plan) -> None:
    """Where `run.dir` is a URI and the plan spans nodes, the local part of the run is not in the /tmp of each.

    Raises:
        ConfigError: it is.
    """
    mirror, roles = Mirror.of(config.run.dir), folder_roles(config)
    actors = ((role.name, i) for role in plan.roles if role.name in roles for i in range(role.count))
    nodes = {node.name for actor in actors if (node := plan.node_of(*actor)) is not None}
    if mirror is not None and not mirror.is_shareable and len(nodes) > 1:
        raise ConfigError(
            f"run.dir: {mirror.uri} gets checkpoints at once and all else as copies, but while the run lasts its nodes "
            f"({few(sorted(nodes))}) share published weights, index and logs in a folder, and {mirror.runs} is each "
            "node's own. Set MEMPO_LOCAL_RUNS to a folder that all nodes mount at the same path (NFS, EFS, FSx, "
            "Filestore), or run on one node."
        )


def check_resume(config: Config, model: Path, tasks: Sequence[Task]) -> None:
    """The checkpoint to continue from is complete, of this model, and its next step is one of this configuration.

    URIs are checked when they are loaded.
    """
    if "://" in config.run.resume or "://" in config.run.dir:
        return
    found = find_checkpoint(config.run, mirror=None)
    if found is None:
        return
    facts = json.loads((Path(found) / "facts.json").read_text(encoding="utf-8"))
    theirs = facts["architecture"]
    ours = json.loads((model / "config.json").read_text(encoding="utf-8"))
    differing = [f"{k} {v}, policy.model has {ours[k]}" for k, v in theirs.items()
                 if v is not None and ours.get(k) is not None and ours[k] != v]  # fmt: skip
    if differing:
        raise ConfigError(f"run.resume: {found} is a checkpoint of another model: {'; '.join(differing)}. "
                          "Set policy.model to that model, or run.resume=''.")  # fmt: skip
    if differing := _resume_differences(config, tasks, facts["extra"]):
        weights = Path(found, "hf")
        anew = f"from its weights with policy.model={weights} and " if weights.is_dir() else "with "
        raise ConfigError(f"run.resume: {found} is of another run: {'; '.join(differing)}. Set that back, or start "
                          f"anew {anew}run.resume=''.")  # fmt: skip


def _resume_differences(config: Config, tasks: Sequence[Task], saved: Mapping) -> list[str]:
    """Keys by which the next step would not be the saved one, with both values. `saved`: what `Session.save` wrote."""
    source, next_ids = saved["source"], list(dict.fromkeys(task_id for task_id, _, _ in saved["next"]))
    compared: list[tuple[str, object, object]] = [
        ("run.seed", source["seed"], config.run.seed),
        ("data.tasks_per_step", len(next_ids), config.data.tasks_per_step),
        ("algorithm.group_size", len(saved["next"]) // len(next_ids), config.algorithm.group_size),
    ]
    if source["num_tasks"] != len(tasks):
        compared.append(
            ("data.train", f"of {source['num_tasks']} tasks", f"{source_name(config.data.train)} of {len(tasks)}")
        )
    else:
        stream = TaskSource(tasks, source["seed"], config.data.shuffle)
        stream.restore(source)
        pairs = zip(next_ids, [task.task_id for task in stream.next(len(next_ids))], strict=True)
        there, here = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        compared.append(("data.train or data.shuffle", f"{there!r} next", f"{here!r} next"))
    return [f"{key} was {there}, is now {here}" for key, there, here in compared if there != here]
