"""The machine that this process runs on, as a cluster of one node: for plans made without Ray."""

from __future__ import annotations

import os
import shutil
import subprocess

import psutil

from mempo_ray.placement.shape import ClusterShape, Node


def this_machine() -> ClusterShape:
    """CPUs, GPUs (by nvidia-smi, if there is one) and memory, with no CUDA context made."""
    gpus = _gpu_memory_gb()
    node = Node(
        cpus=max(2, os.cpu_count() or 2),  # as many as a local cluster is started with,
        gpus=len(gpus),
        memory_gb=psutil.virtual_memory().total / 1e9,
        gpu_memory_gb=min(gpus, default=0.0),
        name="localhost",
    )
    return ClusterShape((node,), "this machine")


def _gpu_memory_gb() -> list[float]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (subprocess.SubprocessError, OSError):  # a driver that does not answer: no GPU to plan with
        return []
    return [float(line) * 2**20 / 1e9 for line in lines if line.strip()]
