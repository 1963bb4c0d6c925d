"""The encoder in a process of its own, with a CPU on both sides."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from retrieval_index.encoder import HashEncoder
from retrieval_index.encoder_process import EncoderProcess
from retrieval_index.errors import EncoderDown, EncoderError
from retrieval_index.retriever import open_retriever

TEXTS = ["mentor Boko", "", "boss Sari"]


class Dying(HashEncoder):
    """Its process ends at a text that says "die"."""

    def encode_queries(self, texts):
        if "die" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_queries(texts)


@pytest.mark.timeout(120)
def test_vectors_are_those_of_the_encoder_and_a_child_that_dies_fails_one_call():
    here, apart = Dying(64), EncoderProcess(functools.partial(Dying, 64))
    assert (apart.name, apart.dim, apart.fingerprint, apart.settings) == (
        here.name, here.dim, here.fingerprint, here.settings)  # fmt: skip
    np.testing.assert_array_equal(apart.encode_queries(TEXTS), here.encode_queries(TEXTS))
    np.testing.assert_array_equal(apart.encode_passages(TEXTS), here.encode_passages(TEXTS))
    with pytest.raises(EncoderDown, match="its process ended"):
        apart.encode_queries(["die"])
    np.testing.assert_array_equal(apart.encode_queries(TEXTS), here.encode_queries(TEXTS))
    apart.close()


class Hanging(HashEncoder):
    """Its process hangs at a text that says "hang"."""

    def encode_queries(self, texts):
        if "hang" in texts:
            threading.Event().wait()
        return super().encode_queries(texts)


@pytest.mark.timeout(120)
def test_a_child_that_hangs_is_ended_and_started_once_more_and_then_calls_fail_at_once_for_a_while():
    now_s, others = 0.0, set(multiprocessing.active_children())
    apart = EncoderProcess(functools.partial(Hanging, 64), encode_s=1.0, rest_s=60.0, clock=lambda: now_s)
    for _ in range(2):
        with pytest.raises(EncoderDown, match="its process was silent for 1 s"):
            apart.encode_queries(["hang" for _ in range(100_000)])  # more than a pipe holds
        assert set(multiprocessing.active_children()) <= others
    started_s = time.monotonic()
    for _ in range(64):
        with pytest.raises(EncoderDown, match="failed 2 times in a row and is not tried for 60 s"):
            apart.encode_queries(TEXTS)
    assert time.monotonic() - started_s < 1.0, "no child was started"
    now_s = 60.0
    np.testing.assert_array_equal(apart.encode_queries(TEXTS), HashEncoder(64).encode_queries(TEXTS))
    apart.close()


class Broken(HashEncoder):
    """Its model does not load."""

    def encode_queries(self, texts):
        raise EncoderError("the weights are damaged", "encoder")


@pytest.mark.timeout(120)
def test_a_model_that_does_not_load_is_named_and_not_loaded_for_every_call():
    others = set(multiprocessing.active_children())
    apart = EncoderProcess(functools.partial(Broken, 64), clock=lambda: 0.0)
    for _ in range(2):
        with pytest.raises(EncoderError, match="the weights are damaged"):
            apart.encode_queries(TEXTS)
        assert set(multiprocessing.active_children()) <= others
    with pytest.raises(EncoderDown, match="failed 2 times in a row"):
        apart.encode_queries(TEXTS)


@pytest.mark.timeout(120)
def test_for_a_gpu_encoder_and_index_are_apart_and_without_one_both_still_answer(index_folder):
    """A machine without a GPU searches on its CPU, and says so; the hash encoder needs none."""
    apart, together = (open_retriever(index_folder, device=device) for device in ("cuda", "cpu"))
    np.testing.assert_array_equal(apart.find(TEXTS, 2).rows, together.find(TEXTS, 2).rows)
    assert apart.find(TEXTS, 2).encode_s > 0
    assert [child.name for child in multiprocessing.active_children()] == ["encoder"]


@pytest.mark.timeout(60)
def test_a_parent_that_is_killed_leaves_no_child():
    code = """if __name__ == "__main__":
        import functools, os, psutil, signal
        from retrieval_index.encoder import HashEncoder
        from retrieval_index.encoder_process import EncoderProcess
        EncoderProcess(functools.partial(HashEncoder, 64)).encode_queries(["q"])
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert pids, done.stderr
    children = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
