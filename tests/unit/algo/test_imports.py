"""The driver and the preflight use the algorithm on machines without torch."""

import subprocess
import sys


def test_numpy_side_and_registry_import_no_torch():
    code = (
        "import sys, mempo_ray.algo, mempo_ray.algo.advantage, mempo_ray.algo.memory_reward, mempo_ray.algo.kl_reward;"
        "from mempo_ray.algo.registry import POLICY_LOSSES as p; p.check('ppo_clip');"
        "sys.exit(sum(m in sys.modules for m in ('torch', 'ray', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
