"""The agent loop worker as a plain class; with engines that die it is in tests/cluster/test_agent_loop.py."""

import pytest

from mempo_ray.actors.agent_loop import AgentLoopWorker
from mempo_ray.config.schema import Agent, Rollout
from tests.fakes.tokenizer import byte_level_folder


def test_the_user_s_modules_are_imported_in_the_worker_s_process(tmp_path):
    folder = str(byte_level_folder(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_plugin"):
        AgentLoopWorker(0, Agent(), Rollout(), folder, plugins=["no_such_plugin"])
