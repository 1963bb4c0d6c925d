"""What every `ports.Generate` does: the scripted fake, and an EnginePool over a RolloutActor's plain class."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mempo_ray.actors.agent_loop import EnginePool
from mempo_ray.actors.rollout import RolloutActor
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.models import model_folder
from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import EngineFailed
from mempo_ray.generation.fake_engine import FakeEngine
from mempo_ray.ports import Generate, GenerateRequest
from tests.fakes.generate import ScriptedGenerate
from tests.fakes.handle import FakeHandle, replace_ray

VERSION = 3
WORDS = [7, 8, 9]
REQUEST = GenerateRequest(np.array([4, 5], np.int32), seed=0, max_tokens=8, group="q", deadline_s=5)


async def engine_pool(*, engines: int = 1) -> tuple[EnginePool, list[FakeHandle]]:
    handles = []
    for index in range(engines):
        rollout = Rollout(engine="fake")
        engine = FakeEngine(f"rollout-{index}", lambda request: WORDS, rollout)
        actor = RolloutActor(f"rollout-{index}", "", rollout, WeightSync(), 9, "", engine=engine)
        await actor.start(WeightManifest(VERSION, "", WeightProof((4, 5), (-1.0,))))
        handles.append(FakeHandle(actor))
    pool = EnginePool()
    pool.announce({f"rollout-{index}": handle for index, handle in enumerate(handles)})
    return pool, handles


@pytest.fixture(params=["fake", "real"])
async def generate(request, monkeypatch) -> Generate:
    replace_ray(monkeypatch)
    if request.param == "fake":
        tokenizer = FileTokenizer.from_folder(model_folder("builtin:tiny"))
        return ScriptedGenerate(tokenizer, [WORDS, WORDS], weight_version=VERSION)
    return (await engine_pool())[0]


async def test_a_turn_has_a_log_prob_for_each_id_and_says_whose_weights_sampled_it(generate):
    turn = await generate(REQUEST)
    assert turn.output_ids.tolist() == WORDS
    assert (turn.output_ids.dtype, turn.logprobs.dtype) == (np.int32, np.float32)
    assert len(turn.logprobs) == len(WORDS)
    assert (turn.finish_reason, turn.weight_version) == ("stop", VERSION)


async def test_a_turn_is_cut_at_its_limit_and_says_so(generate):
    turn = await generate(replace(REQUEST, max_tokens=2))
    assert (turn.output_ids.tolist(), turn.finish_reason) == (WORDS[:2], "length")


async def test_the_fake_fails_with_the_error_it_is_told():
    tokenizer = FileTokenizer.from_folder(model_folder("builtin:tiny"))
    with pytest.raises(EngineFailed, match="gone"):
        await ScriptedGenerate(tokenizer, [EngineFailed("gone")])(REQUEST)


async def test_a_turn_of_a_dead_engine_is_asked_again_elsewhere(monkeypatch):
    replace_ray(monkeypatch)
    pool, (first, _) = await engine_pool(engines=2)
    first._death.set()
    assert (await pool(REQUEST)).output_ids.tolist() == WORDS


async def test_without_an_engine_a_turn_fails_at_its_deadline_with_the_last_reason(monkeypatch):
    replace_ray(monkeypatch)
    pool, (only,) = await engine_pool()
    only._death.set()
    with pytest.raises(EngineFailed, match=r"no engine served a turn of 'q' in 0\.05 s"):
        await pool(replace(REQUEST, deadline_s=0.05))
