"""What runs inside vLLM's engine-core process: weights in place, and a life no longer than its actor's."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that spawned it ends.

    The parent may be gone already when the signal is armed; then nobody would send it, so look.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)


class OneProcessExecutor(UniProcExecutor):
    """Scheduler and model in one process: half a GB and one process less than vLLM's default on CPU."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class TensorParallelExecutor(MultiprocExecutor):
    """One worker process a GPU. The workers watch the engine core themselves."""

    def _init_executor(self) -> None:
        die_with_parent()
        super()._init_executor()


class WeightLoader:
    """Extends vLLM's worker (`worker_extension_cls`); its methods are reached by `collective_rpc`."""

    def load_folder(self, folder: str) -> None:
        """Replace all weights by the safetensors shards of a folder, in Hugging Face names.

        vLLM on CPU repacks linear weights and frees the originals, so plain `load_weights` would meet wrong shapes;
        the layer-wise reload restores, loads and repacks layer by layer.
        """
        model = self.model_runner.model  # type: ignore[attr-defined]
        shards = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(f"{folder} holds no *.safetensors")
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            initialize_layerwise_reload(model)
            model.load_weights(safetensors_weights_iterator(shards, use_tqdm_on_load=False))
            finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
            if model.config.tie_word_embeddings:
                # The reload leaves lm_head's repacked copy of the old embedding: log-probs off by 0.85, silently.
                model.lm_head.weight = model.model.embed_tokens.weight
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
