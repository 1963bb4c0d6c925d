"""The cluster files fit Ray's schema and KubeRay's objects, agree with themselves, and hold the run that they are for.

No cluster is started. The launcher's files go through the checks of `ray up`; the KubeRay files are held against
`RAY_JOB`, `RAY_CLUSTER` and `POD`, which state the fields that these files use as the CRD (ray.io/v1) has them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from mempo_ray.config.load import load_config
from mempo_ray.config.schema import Config
from mempo_ray.placement.plan import Plan, make_plan
from mempo_ray.placement.shape import quantity, read_cluster_shape

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "cluster"
LAUNCHER = ["aws", "gcp"]
KUBERAY = ["kuberay-cluster", "kuberay-job"]
POOLS = {"head", "policy", "rollout", "cpu"}
TOKEN = "/home/ray/.ray/auth_token"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


# -- the run that the files are for -------------------------------------------------------------------------


def job_words() -> list[str]:
    """The arguments of the driver in kuberay-job.yaml; the launcher's clusters run the same (docs/cluster.md)."""
    python, module, driver, *words = shlex.split(read("kuberay-job")["spec"]["entrypoint"])
    assert (python, module, driver) == ("python", "-m", "mempo_ray.driver")
    return words


def job_config(monkeypatch: pytest.MonkeyPatch, *more: str) -> Config:
    monkeypatch.chdir(ROOT)  # the job's working directory
    return load_config([*job_words(), *more])


def pool_of(plan: Plan, role: str) -> set[str]:
    return {
        node.labels["mempo/pool"] if (node := plan.node_of(role, i)) else "nowhere"
        for i in range(plan.role(role).count)
    }


@pytest.mark.parametrize("name", [*LAUNCHER, *KUBERAY])
@pytest.mark.parametrize("engines", ["fewest", "most"])
def test_the_job_fits_the_cluster_at_its_largest(name: str, engines: str, monkeypatch):
    config = job_config(monkeypatch)
    if engines == "most":
        config = job_config(monkeypatch, f"rollout.replicas={config.rollout.max_replicas}")
    shape = read_cluster_shape(FOLDER / f"{name}.yaml")
    plan = make_plan(config, shape).require()
    assert pool_of(plan, "policy") == {"policy"}
    assert pool_of(plan, "rollout") == {"rollout"}
    assert pool_of(plan, "retrieval") | pool_of(plan, "reward") | pool_of(plan, "agent_loop") == {"cpu"}


@pytest.mark.parametrize("name", [*LAUNCHER, *KUBERAY])
def test_every_label_that_the_job_asks_for_is_one_that_nodes_have(name: str, monkeypatch):
    asked = {tuple(labels.items()) for labels in job_config(monkeypatch).placement.labels.values()}
    nodes = read_cluster_shape(FOLDER / f"{name}.yaml").nodes
    assert {node.labels["mempo/pool"] for node in nodes} == POOLS
    assert asked <= {(("mempo/pool", pool),) for pool in POOLS - {"head"}}
    assert {node.labels["ray.io/market-type"] for node in nodes if node.labels["mempo/pool"] == "rollout"} == {"spot"}
    assert {node.labels["ray.io/market-type"] for node in nodes if node.labels["mempo/pool"] != "rollout"} == {
        "on-demand"
    }
    assert sum(node.cpus for node in nodes if node.labels["mempo/pool"] == "head") == 0, "actors on the head"


def test_a_label_that_no_node_has_is_found_by_this_plan(monkeypatch):
    config = job_config(monkeypatch, "placement.labels.policy.mempo/pool=elsewhere")
    assert make_plan(config, read_cluster_shape(FOLDER / "aws.yaml")).shortages


def test_a_failed_job_goes_on_where_it_was(monkeypatch):
    job, config = read("kuberay-job")["spec"], job_config(monkeypatch)
    assert job["backoffLimit"] > 0
    assert config.run.resume == "auto"
    mounts = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert config.run.dir in {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}


# -- ray up -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_launcher_s_file_passes_the_checks_of_ray_up(name: str):
    config = prepare_config(read(name))
    validate_config(config)
    types = config["available_node_types"]
    assert set(types) == POOLS
    assert config["max_workers"] == sum(types[pool]["max_workers"] for pool in POOLS - {"head"})
    assert all(types[pool]["min_workers"] == 0 for pool in POOLS - {"head"}), "an idle cluster costs a head"


def test_engines_are_on_spot_and_ranks_are_not():
    aws, gcp = (read(name)["available_node_types"] for name in LAUNCHER)
    spot = {pool for pool in POOLS if "InstanceMarketOptions" in aws[pool]["node_config"]}
    assert spot == {"rollout"} == {pool for pool in POOLS if is_spot(gcp[pool]["node_config"])}


def is_spot(node_config: Mapping[str, Any]) -> bool:
    return node_config["scheduling"].get("provisioningModel") == "SPOT"


@pytest.mark.parametrize("name", LAUNCHER)
def test_every_node_has_the_lock_the_token_and_the_shared_folder(name: str):
    config = read(name)
    mounts = config["file_mounts"]
    assert mounts[TOKEN] == "~/.ray/auth_token"
    (installed,) = [command for command in config["setup_commands"] if "-r " in command]
    lock_file = mounts[installed.split("-r ")[1]]
    assert (ROOT / lock_file).is_file()
    assert "--no-deps" in installed, "the lock is complete, and leaves things out on purpose"
    starts = [config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1]]
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
        assert set(re.findall(r"MEMPO_\w+=(/mnt/mempo)/", command)) == {"/mnt/mempo"}
    assert "--dashboard-host=127.0.0.1" in starts[0], "the dashboard is reached through ssh only"
    assert "-v /mnt/mempo:/mnt/mempo" in config["docker"]["run_options"]
    assert any("mount" in command and "/mnt/mempo" in command for command in config["initialization_commands"])


def test_every_file_names_the_ray_and_the_python_of_the_lock():
    ray_version = lock()["ray"]
    image = f"rayproject/ray:{ray_version}-py311-gpu"
    assert [read(name)["docker"]["image"] for name in LAUNCHER] == [image, image]
    assert "Python 3.11" in (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    steps = [line.split(maxsplit=1) for line in (FOLDER / "Dockerfile").read_text(encoding="utf-8").splitlines()]
    assert ["FROM", image] in steps
    copied = [words[1].split()[:-1] for words in steps if words and words[0] == "COPY"]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    assert [spec["rayVersion"] for spec in ray_clusters()] == [ray_version, ray_version]


# -- KubeRay ------------------------------------------------------------------------------------------------

QUANTITY, INT32 = "a quantity", "an int32 ≥ 0"
RESOURCES = {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}}
CONTAINER = {
    "name!": str,
    "image": str,
    "env": [{"name!": str, "value": str}],
    "ports": [{"name": str, "containerPort!": INT32}],
    "resources": RESOURCES,
    "volumeMounts": [{"name!": str, "mountPath!": str, "readOnly": bool}],
}
POD = {
    "spec!": {
        "containers!": [CONTAINER],
        "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str, "readOnly": bool}}],
        "nodeSelector": {"*": str},
        "tolerations": [{"key": str, "operator": {"Exists", "Equal"}, "effect": {"NoSchedule", "NoExecute"}}],
        "terminationGracePeriodSeconds": INT32,
        "restartPolicy": {"Always", "OnFailure", "Never"},
    }
}
GROUP = {"labels": {"*": str}, "rayStartParams": {"*": str}, "template!": POD}
RAY_CLUSTER = {
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": {
        "version": {"v1", "v2"},
        "idleTimeoutSeconds": INT32,
        "upscalingMode": {"Default", "Aggressive", "Conservative"},
        "resources": RESOURCES,
    },
    "authOptions": {"mode": {"disabled", "token"}, "secretName": str},
    "headGroupSpec!": GROUP,
    "workerGroupSpecs": [
        {**GROUP, "groupName!": str, "minReplicas!": INT32, "maxReplicas!": INT32, "idleTimeoutSeconds": INT32}
    ],
}
RAY_JOB = {
    "entrypoint": str,
    "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
    "backoffLimit": INT32,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": INT32,
    "activeDeadlineSeconds": INT32,
    "preRunningDeadlineSeconds": INT32,
    "metadata": {"*": str},
    "runtimeEnvYAML": str,
    "submitterConfig": {"backoffLimit": INT32},
    "submitterPodTemplate": POD,
    "rayClusterSpec": RAY_CLUSTER,
}
CLAIM = {
    "accessModes!": [{"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"}],
    "storageClassName": str,
    "resources!": {"requests": {"*": QUANTITY}},
}
KINDS = {
    "RayCluster": ("ray.io/v1", RAY_CLUSTER),
    "RayJob": ("ray.io/v1", RAY_JOB),
    "PersistentVolumeClaim": ("v1", CLAIM),
}
"""`!` = required, `*` = any key, [x] = a list of x, {…} of texts = one of these."""


def mistakes(found: Any, form: Any, path: str) -> Iterator[str]:
    """Where a value has not the form, in words."""
    if isinstance(form, dict):
        if not isinstance(found, dict):
            yield f"{path}: not a mapping"
            return
        known = {key.rstrip("!"): inner for key, inner in form.items()}
        yield from (f"{path}.{key[:-1]}: missing" for key in form if key.endswith("!") and key[:-1] not in found)
        for key, value in found.items():
            if key in known or "*" in known:
                yield from mistakes(value, known.get(key, known.get("*")), f"{path}.{key}")
            else:
                yield f"{path}.{key}: no such field"
    elif isinstance(form, list):
        if not isinstance(found, list):
            yield f"{path}: not a list"
            return
        for number, value in enumerate(found):
            yield from mistakes(value, form[0], f"{path}[{number}]")
    elif not holds(found, form):
        yield f"{path}: {found!r} is not {form}"


def holds(found: Any, form: Any) -> bool:
    if isinstance(form, set):
        return found in form
    if form == QUANTITY:
        return re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", str(found)) is not None and quantity(found) > 0
    if form == INT32:
        return type(found) is int and 0 <= found < 2**31
    return type(found) is form


def ray_clusters() -> list[dict[str, Any]]:
    return [read("kuberay-cluster")["spec"], read("kuberay-job")["spec"]["rayClusterSpec"]]


def groups(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@pytest.mark.parametrize("name", [*KUBERAY, "kuberay-storage"])
def test_kuberay_s_objects_have_only_fields_that_exist_and_all_that_must(name: str):
    for found in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")):
        version, form = KINDS[found["kind"]]
        assert found["apiVersion"] == version
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", found["metadata"]["name"])
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
        assert list(mistakes(found["spec"], form, found["kind"])) == []


def test_a_mistake_in_such_an_object_is_named():
    job = read("kuberay-job")["spec"]
    job["backOffLimit"] = job.pop("backoffLimit")
    group = job["rayClusterSpec"]["workerGroupSpecs"][0]
    group["maxReplicas"] = "1"
    del group["groupName"]
    group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = "64 GB"
    assert {mistake.split(":")[0] for mistake in mistakes(job, RAY_JOB, "RayJob")} == {
        "RayJob.backOffLimit",
        "RayJob.rayClusterSpec.workerGroupSpecs[0].groupName",
        "RayJob.rayClusterSpec.workerGroupSpecs[0].maxReplicas",
        "RayJob.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].resources.limits.memory",
    }


def test_the_autoscaler_is_the_second_and_a_token_is_asked_for():
    for spec in ray_clusters():
        assert spec["enableInTreeAutoscaling"]
        assert spec["autoscalerOptions"]["version"] == "v2"
        assert spec["authOptions"]["mode"] == "token"


def test_every_mount_has_its_volume_and_every_claim_its_object():
    claims = {
        claim["metadata"]["name"]
        for claim in yaml.safe_load_all((FOLDER / "kuberay-storage.yaml").read_text(encoding="utf-8"))
    }
    for group in (group for spec in ray_clusters() for group in groups(spec)):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume["persistentVolumeClaim"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert {volume["claimName"] for volume in volumes.values()} <= claims
        paths = {mount["mountPath"]: mount for mount in mounts.values()}
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert paths[env["MEMPO_DATA"]]["readOnly"]
        assert "readOnly" not in paths[env["MEMPO_RUN_DIR"]]


def test_a_pod_is_asked_for_what_it_may_use():
    """What Ray counts are the limits; a node that gives less would be over-subscribed."""
    for group in (group for spec in ray_clusters() for group in groups(spec)):
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]


def test_groups_have_the_names_of_their_pools_and_gpus_where_they_belong():
    for spec in ray_clusters():
        assert spec["headGroupSpec"]["labels"]["mempo/pool"] == "head"
        for group in spec["workerGroupSpecs"]:
            pod = group["template"]["spec"]
            assert group["labels"]["mempo/pool"] == group["groupName"]
            assert group["minReplicas"] <= group["maxReplicas"]
            has_gpus = "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
            assert has_gpus == (group["groupName"] != "cpu")
            assert has_gpus == any(entry["key"] == "nvidia.com/gpu" for entry in pod.get("tolerations", []))


def test_the_job_s_cluster_is_the_standing_one():
    standing, made_for_the_job = ray_clusters()
    assert standing == made_for_the_job


def test_the_job_submits_itself_with_the_cluster_s_image_and_takes_the_cluster_away():
    job = read("kuberay-job")["spec"]
    (submitter,) = job["submitterPodTemplate"]["spec"]["containers"]
    head = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert job["submissionMode"] == "K8sJobMode"
    assert submitter["image"] == head["containers"][0]["image"]
    assert job["shutdownAfterJobFinishes"]
    working_dir = yaml.safe_load(job["runtimeEnvYAML"])["working_dir"]
    assert f"WORKDIR {working_dir}\n" in (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    stop_wait = {entry["name"]: entry["value"] for entry in head["containers"][0]["env"]}["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(stop_wait) <= head["terminationGracePeriodSeconds"]


def test_an_engine_s_pod_drains_for_nearly_all_of_its_grace():
    for spec in ray_clusters():
        (pod,) = (group["template"]["spec"] for group in spec["workerGroupSpecs"] if group["groupName"] == "rollout")
        env = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        grace_s, drain_s = pod["terminationGracePeriodSeconds"], env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert grace_s * 0.9 <= int(drain_s) < grace_s
