"""Three forms of a file say what a cluster can grow to."""

import pytest

from mempo_ray.errors import ConfigError
from mempo_ray.placement.shape import quantity, read_cluster_shape

LAUNCHER = """
cluster_name: mempo
max_workers: 6
provider: {type: aws, region: us-west-2}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 0}, node_config: {}}
  gpu:
    min_workers: 0
    max_workers: 3
    resources: {CPU: 48, GPU: 4, memory: 180000000000, "accelerator_type:A10G": 1}
    labels: {ray.io/market-type: spot}
    node_config: {}
  cpu: {resources: {CPU: 16}, node_config: {}}
"""

KUBERAY = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: runs}
---
apiVersion: ray.io/v1
kind: RayJob
spec:
  rayClusterSpec:
    headGroupSpec:
      rayStartParams: {num-cpus: "0"}
      template: {spec: {containers: [{resources: {limits: {cpu: "4", memory: 16Gi}}}]}}
    workerGroupSpecs:
      - groupName: gpu
        replicas: 0
        maxReplicas: 2
        rayStartParams: {labels: "ray.io/market-type=spot, tier=a"}
        template: {spec: {containers: [{resources: {limits: {cpu: 7500m, memory: 64G, nvidia.com/gpu: 1}}}]}}
"""


def write(tmp_path, text):
    file = tmp_path / "shape.yaml"
    file.write_text(text)
    return file


def test_a_cluster_that_is_not_up_is_planned_from_a_file(tmp_path):
    nodes = "nodes: [{count: 2, cpus: 96, gpus: 8, memory_gb: 1000, gpu_memory_gb: 80, labels: {zone: a}}, {cpus: 4}]"
    shape = read_cluster_shape(write(tmp_path, nodes))
    assert (shape.cpus, shape.gpus, shape.gpu_sizes_gb({"zone": "a"}), shape.gpu_sizes_gb({"zone": "b"})) == (
        196, 16, [80, 80], [])  # fmt: skip
    assert [node.name for node in shape.nodes] == ["type 0 0", "type 0 1", "type 1"]
    assert shape.nodes[0].has({"zone": "a"})


def test_the_launchers_file_counts_every_node_type_at_its_maximum(tmp_path):
    shape = read_cluster_shape(write(tmp_path, LAUNCHER))
    assert [node.name for node in shape.nodes] == ["head", "gpu 0", "gpu 1", "gpu 2", *(f"cpu {i}" for i in range(6))]
    assert (shape.cpus, shape.gpus, shape.max_nodes) == (3 * 48 + 6 * 16, 12, 7)
    gpu = shape.nodes[1]
    assert (gpu.memory_gb, gpu.gpu_memory_gb) == (180, 24)
    assert gpu.has({"ray.io/market-type": "spot", "ray.io/accelerator-type": "A10G"})


def test_a_rayjob_counts_its_worker_groups_at_their_maximum_as_ray_reads_their_limits(tmp_path):
    shape = read_cluster_shape(write(tmp_path, KUBERAY))
    head, *gpus = shape.nodes
    assert (head.cpus, head.memory_gb) == (0, pytest.approx(17.18, abs=0.01))
    assert [(node.cpus, node.gpus, node.memory_gb) for node in gpus] == [(7.5, 1, 64)] * 2
    assert gpus[0].has({"ray.io/market-type": "spot", "tier": "a"})


@pytest.mark.parametrize(("text", "number"), [("500m", 0.5), ("16Gi", 16 * 2**30), ("8", 8), (3, 3), ("1.5k", 1500)])
def test_quantities_are_read_as_kubernetes_means_them(text, number):
    assert quantity(text) == number


@pytest.mark.parametrize(
    "text",
    ["nodes: 3", "{}", "nodes: [{cpu: 1}]", "a: [", "- 1", "",
     "{head_node_type: h, available_node_types: {h: {resources: {}}}}", "kind: RayCluster"],
)  # fmt: skip
def test_a_file_that_is_no_shape_is_named(tmp_path, text):
    with pytest.raises(ConfigError, match=r"(?s)placement\.cluster_shape: .*shape\.yaml: .*it takes `nodes: "):
        read_cluster_shape(write(tmp_path, text))
