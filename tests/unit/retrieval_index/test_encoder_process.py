"""The encoder in a process of its own, with a CPU on both sides."""

import functools
import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from retrieval_index.encoder import HashEncoder
from retrieval_index.encoder_process import EncoderProcess
from retrieval_index.errors import EncoderError
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
    with pytest.raises(EncoderError, match="the encoder's process ended"):
        apart.encode_queries(["die"])
    np.testing.assert_array_equal(apart.encode_queries(TEXTS), here.encode_queries(TEXTS))
    apart.close()


@pytest.mark.timeout(120)
def test_for_a_gpu_encoder_and_index_are_apart_and_without_one_both_still_answer(index_folder):
    """A machine without a GPU searches on its CPU, and says so; the hash encoder needs none."""
    apart, together = (open_retriever(index_folder, device=device) for device in ("cuda", "cpu"))
    np.testing.assert_array_equal(apart.find(TEXTS, 2).rows, together.find(TEXTS, 2).rows)
    assert apart.find(TEXTS, 2).encode_s > 0
    assert [child.name() for child in psutil.Process().children()], "the encoder is a child"


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
