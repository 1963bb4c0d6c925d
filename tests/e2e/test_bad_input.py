"""Bad input ends with one clear message, exit code 2, within seconds, and with no process left behind.

Each case is a real `python -m mempo_ray.driver` with the quickstart and one thing wrong.
"""

import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mempo_ray.config.models import model_folder
from retrieval_index.build import build_index
from retrieval_index.corpus import Document
from retrieval_index.encoder import make_encoder
from tests.fakes.driver_run import DriverRun

Case = tuple[list[str], list[str]]
"""Words of the command line, and what the message must name."""

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="module", autouse=True)
def _orphans_come_to_us():
    """A process whose parent has ended becomes ours, so that it can be found by parent pid."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _index(folder: Path, dim: int = 512) -> Path:
    build_index([Document("p1", "Boko", "mentor Boko Sari .")], make_encoder("hash", dim=dim), "flat", folder)
    return folder


def _foreign_encoder(folder: Path) -> Path:
    """A sentence-encoder folder as wide as the hash encoder; never loaded."""
    folder.mkdir()
    _write(folder / "config.json", '{"hidden_size": 512}')
    _write(folder / "tokenizer.json", "{}")
    _write(folder / "model.safetensors", "")
    return folder


def _copied_model(folder: Path, without: str) -> Path:
    return Path(shutil.copytree(model_folder("builtin:tiny"), folder, ignore=shutil.ignore_patterns(without)))


def unknown_key(tmp: Path) -> Case:
    return ["rollout.temprature=0.7"], ["rollout.temprature", "rollout.temperature"]


def unknown_key_in_a_file(tmp: Path) -> Case:
    file = _write(tmp / "run.yaml", "algorithm: {groupsize: 4}\n")
    return ["--config", str(file)], ["algorithm.groupsize", "algorithm.group_size"]


def wrong_type(tmp: Path) -> Case:
    return ["rollout.replicas=two"], ["rollout.replicas", "'two'", "a whole number ≥ 1"]


def missing_config_file(tmp: Path) -> Case:
    return ["--config", str(tmp / "none.yaml")], ["none.yaml", "no such file"]


def unset_environment_variable(tmp: Path) -> Case:
    return ["data.train=${oc.env:MEMPO_NOT_SET}/train.jsonl"], ["data.train", "MEMPO_NOT_SET"]


def unknown_estimator(tmp: Path) -> Case:
    return ["algorithm.adv_estimator=grop"], ["algorithm.adv_estimator", "'grop'", "'grpo'"]


def unknown_policy_loss(tmp: Path) -> Case:
    return ["algorithm.policy_loss=ppo"], ["algorithm.policy_loss", "ppo_clip"]


def unknown_scorer(tmp: Path) -> Case:
    return ["reward.scorer=mempoo"], ["reward.scorer", "'mempo'"]


def plugin_that_does_not_import(tmp: Path) -> Case:
    return ["plugins=[no_such_module]"], ["plugins", "no_such_module"]


def custom_function_missing(tmp: Path) -> Case:
    file = _write(tmp / "reward.py", "def other(): ...\n")
    return [f"reward.custom_function.path={file}"], ["reward.custom_function.name", "compute_score", "other"]


def group_of_zero(tmp: Path) -> Case:
    return ["algorithm.group_size=0"], ["algorithm.group_size", "got 0", "≥ 1"]


def missing_data_file(tmp: Path) -> Case:
    return [f"data.train={tmp}/none.jsonl"], ["data.train", "none.jsonl", "no such file"]


def row_without_answer(tmp: Path) -> Case:
    rows = [{"question": "a?", "golden_answers": ["x"]}, {"question": "b?"}]
    file = _write(tmp / "own.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.eval={file}"], ["data.eval", "own.jsonl, row 2", "golden_answers"]


def parquet_that_cannot_be_read(tmp: Path) -> Case:
    return [f"data.train={_write(tmp / 'own.parquet', 'no parquet')}"], ["data.train", "own.parquet", "Parquet"]


def a_step_of_more_tasks_than_there_are(tmp: Path) -> Case:
    return ["data.train=synthetic:train?tasks=9"], ["data.tasks_per_step=16", "the 9 tasks", "lower it"]


def cold_start_without_hops(tmp: Path) -> Case:
    row = json.dumps({"question": "a?", "golden_answers": ["x"]}) + "\n"
    return [f"data.train={_write(tmp / 'own.jsonl', 16 * row)}"], ["cold_start", "own.jsonl", "hops", "cold_start=null"]


def probes_without_hops(tmp: Path) -> Case:
    file = _write(tmp / "own.jsonl", json.dumps({"question": "a?", "golden_answers": ["x"]}) + "\n")
    return [f"data.eval={file}"], ["eval.probe_ratios", "own.jsonl", "hops", "eval.probe_ratios=false"]


def missing_corpus(tmp: Path) -> Case:
    return [f"retrieval.corpus={tmp}/none.jsonl"], ["retrieval.corpus", "none.jsonl"]


def index_that_is_not_there(tmp: Path) -> Case:
    return [f"retrieval.index={tmp}/none"], ["retrieval.index", "none", "build"]


def index_of_another_encoder(tmp: Path) -> Case:
    index, encoder = _index(tmp / "index"), _foreign_encoder(tmp / "encoder")
    return [f"retrieval.index={index}", f"retrieval.encoder={encoder}"], ["retrieval.encoder", "another encoder"]


def index_of_another_dimension(tmp: Path) -> Case:
    index, encoder = _index(tmp / "index", dim=256), _foreign_encoder(tmp / "encoder")
    return [f"retrieval.index={index}", f"retrieval.encoder={encoder}"], ["retrieval.encoder", "256", "512"]


def no_model_folder(tmp: Path) -> Case:
    return [f"policy.model={tmp}/none"], ["policy.model", "no model folder", "hf download NAME --local-dir"]


def model_not_fetched(tmp: Path) -> Case:
    return ["policy.model=fetched:nothing"], ["policy.model", "mempo-ray fetch nothing"]


def model_without_tokenizer(tmp: Path) -> Case:
    folder = _copied_model(tmp / "model", without="tokenizer.json")
    return [f"policy.model={folder}"], ["policy.model", "has no tokenizer"]


def tokenizer_that_was_cut(tmp: Path) -> Case:
    folder = _copied_model(tmp / "model", without="tokenizer.json")
    _write(folder / "tokenizer.json", '{"version": "1.0", "trunc')
    return [f"policy.model={folder}"], ["policy.model", "tokenizer.json", "copy the model folder again"]


def token_budget_shorter_than_a_row(tmp: Path) -> Case:
    return ["policy.micro_batch_tokens=100"], ["policy.micro_batch_tokens", "shorter than one row"]


def limits_longer_than_the_model_length(tmp: Path) -> Case:
    words = ["agent.limits.turn_tokens=300", "agent.limits.tool_tokens=300", "rollout.max_model_len=512"]
    return words, ["rollout.max_model_len", "300 (agent.limits.turn_tokens) + 300 (agent.limits.tool_tokens)"]


def run_folder_that_cannot_be_written(tmp: Path) -> Case:
    return [f"run.dir={_write(tmp / 'file', '')}/runs"], ["run.dir", "writable"]


def checkpoint_of_another_model(tmp: Path) -> Case:
    folder = tmp / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    _write(folder / "facts.json", json.dumps({"architecture": {"model_type": "qwen2", "hidden_size": 3584}}))
    _write(folder / "COMPLETE", "")
    return [f"run.resume={folder}"], ["run.resume", "another model", "hidden_size 3584"]


def checkpoint_that_is_not_complete(tmp: Path) -> Case:
    return [f"run.resume={tmp}"], ["run.resume", "COMPLETE"]


def more_cpus_than_the_machine_has(tmp: Path) -> Case:
    return ["placement.num_cpus=4096"], ["policy needs", "rollout needs", "CPUs", "placement.num_cpus"]


def more_gpus_than_the_machine_has(tmp: Path) -> Case:
    words = ["placement.layout=disaggregated", "policy.device=cuda", "policy.ranks=64"]
    return words, ["policy needs 64 GPUs", "rollout needs 1 GPU", "placement.layout=cpu"]


CASES = [
    unknown_key,
    unknown_key_in_a_file,
    wrong_type,
    missing_config_file,
    unset_environment_variable,
    unknown_estimator,
    unknown_policy_loss,
    unknown_scorer,
    plugin_that_does_not_import,
    custom_function_missing,
    group_of_zero,
    missing_data_file,
    row_without_answer,
    parquet_that_cannot_be_read,
    a_step_of_more_tasks_than_there_are,
    cold_start_without_hops,
    probes_without_hops,
    missing_corpus,
    index_that_is_not_there,
    index_of_another_encoder,
    index_of_another_dimension,
    no_model_folder,
    model_not_fetched,
    model_without_tokenizer,
    tokenizer_that_was_cut,
    token_budget_shorter_than_a_row,
    limits_longer_than_the_model_length,
    run_folder_that_cannot_be_written,
    checkpoint_of_another_model,
    checkpoint_that_is_not_complete,
    more_cpus_than_the_machine_has,
    more_gpus_than_the_machine_has,
]


def _drive(words: list[str], tmp_path: Path, **environment: str) -> tuple[subprocess.CompletedProcess, float]:
    """Run the driver; its answer and the seconds of processor time that it and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "mempo_ray.driver", f"run.dir={tmp_path}/runs", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | environment,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_input_is_one_clear_message(case: Callable[[Path], Case], tmp_path: Path):
    words, named = case(tmp_path)
    children = {p.pid for p in psutil.Process().children(recursive=True)}

    done, seconds = _drive(words, tmp_path)

    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    for text in named:
        assert text in done.stderr
    assert seconds < 5
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= children
    assert not list(tmp_path.glob("runs/*")), "a run folder was made for a run that never began"


def test_rows_that_nobody_can_score_are_listed_a_line_each(tmp_path: Path):
    rows = [
        {"question": "a?", "golden_answers": ["x"], "data_source": "hotpot_qa"},
        {"question": "b?", "golden_answers": ["x"], "data_source": "hotpotqa"},
        {"question": "c?", "golden_answers": ["many"], "data_source": "openai/gsm8k"},
    ]
    file = _write(tmp_path / "own.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    done, _ = _drive([f"data.train={file}"], tmp_path)
    assert done.returncode == 2
    head, first, second = done.stderr.strip().splitlines()
    assert head.endswith("own.jsonl, 2 rows cannot be used:")
    assert first.strip().startswith("row 1: data_source 'hotpot_qa' has no scorer (did you mean 'hotpotqa'?)")
    assert second.strip().startswith("row 3: the answer 'many' is not a number")


def test_several_wrong_keys_are_reported_at_once(tmp_path):
    done, _ = _drive(["rollout.replicas=two", "algorithm.group_size=0"], tmp_path)
    assert "rollout.replicas" in done.stderr
    assert "algorithm.group_size" in done.stderr


# -- on a running cluster: nothing is known before Ray is asked -----------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a head of two CPUs, which another group holds, and a node of one CPU; two logical GPUs on each."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group

    node = {"include_dashboard": False, "object_store_memory": 80_000_000}
    small = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, **node})
    small.add_node(num_cpus=1, num_gpus=2, labels={"ray.io/market-type": "on-demand"}, **node)
    ray.init(address=small.address, namespace="somebody", log_to_driver=False)
    group = placement_group([{"CPU": 2}], name="nightly")
    assert group.wait(30)
    yield small.address
    ray.shutdown()
    small.shutdown()


GPUS = ["placement.layout=disaggregated", "policy.device=cuda"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["placement.num_cpus=4"], ["policy needs", "the cluster has 3 CPUs"]),
        ([*GPUS, "policy.ranks=4"], ["policy needs 4 GPUs (4 × 1), rollout needs 1 GPU", "the cluster has 4 GPUs"]),
        ([*GPUS, "rollout.tensor_parallel=3"],
         ["rollout[0] needs 3 GPUs on one node (rollout.tensor_parallel=3); the largest node has 2 GPUs"]),
        (["placement.labels.policy={ray.io/market-type: spot}"],
         ["policy[0] needs a node labelled ray.io/market-type=spot (placement.labels.policy), which no node has",
          "labels that nodes have: ray.io/market-type=on-demand"]),
        (["rollout.kv_cache_gb=4000"], ["rollout[0] holds about 4296", "GB in memory; the largest node has",
                                        "Lower rollout.kv_cache_gb"]),
        (["placement.num_cpus=1.5", "placement.timeout_s=4"],
         ["waiting for the cluster", "placement.timeout_s: after 4 s", "no place; asked for 1 × (0.4615 CPU)",
          "held by placement group nightly (2 CPU)"]),
    ],
    ids=["cpus", "gpus", "tensor_parallel", "label", "memory", "busy"],
)  # fmt: skip
def test_what_a_cluster_lacks_is_named_within_seconds_of_the_connection(cluster, tmp_path, words, named):
    with DriverRun(tmp_path / "runs", *words, f"placement.address={cluster}") as run:
        run.wait_for("starting Ray and the actors")  # all that comes after: connect, ask for the shape, plan
        began = time.monotonic()
        run.wait_for(named[-1])
        seconds = time.monotonic() - began
        code = run.finish()
    assert code == 2, run.output
    for text in named:
        assert text in run.output
    assert "Traceback" not in run.output
    assert [process for process in run.left_behind if "ray::IDLE" not in process] == []  # a spare of the cluster's own
    assert seconds < 10


@pytest.mark.slow
def test_a_plan_for_a_running_cluster_shows_its_nodes_and_who_is_in_the_way(cluster, tmp_path):
    done, _ = _drive(["--dry-run", "placement.num_cpus=1.5", f"placement.address={cluster}"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Plan: layout cpu on the Ray cluster: 2 nodes up" in done.stdout
    assert "busy: " in done.stdout
    assert "held by placement group nightly (2 CPU)" in done.stdout
