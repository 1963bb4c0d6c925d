"""What every Engine promises, held against the scripted one and against real vLLM on a tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from mempo_ray.config.schema import Rollout, WeightSync
from mempo_ray.contracts import WeightManifest, WeightProof
from mempo_ray.errors import ConfigError, DeadlineExceeded, EngineFailed, TrainingError
from mempo_ray.generation.engine import NO_WEIGHTS, Continuation, Engine, build_engine, unproven
from mempo_ray.generation.fake_engine import FakeEngine
from mempo_ray.ports import GenerateRequest, Generation
from tests.fakes.tiny_model import END_OF_TURN_ID, VOCAB_SIZE, logprobs, manifest, save_tiny_model, save_tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLLOUT = Rollout(dtype="float32", max_model_len=512, max_num_seqs=32, kv_cache_gb=0.1, temperature=0.7)


@dataclass
class Case:
    """An engine, two manifests that it can prove, and its models where there are any (as many as manifests)."""

    engine: Engine
    manifests: list[WeightManifest]
    models: list


def fake_script(request: GenerateRequest) -> list[int]:
    seed = [0 if request.greedy else request.seed, *request.prompt_ids.tolist()]
    rng = np.random.default_rng(seed)
    return [*rng.integers(2, VOCAB_SIZE, rng.integers(5, 60)).tolist(), END_OF_TURN_ID]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fake", "vllm"])
async def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in (0, 1)]
    if request.param == "fake":
        proof = WeightProof(ids=(5, 6), logprobs=(-1.0,))
        case = Case(FakeEngine("e", fake_script, ROLLOUT), [WeightManifest(0, str(f), proof) for f in folders], [])
    else:
        models = [save_tiny_model(folder, seed) for seed, folder in enumerate(folders)]
        log_file = tmp_path_factory.mktemp("log") / "e.log"
        engine = build_engine("e", str(folders[0]), ROLLOUT, WeightSync(max_gap=1e-4), END_OF_TURN_ID, log_file)
        case = Case(engine, [manifest(*pair, version=0) for pair in zip(models, folders, strict=True)], models)
    await case.engine.start()
    yield case
    await case.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(case: Case) -> Engine:
    """The engine with the first manifest's weights proven as version 3."""
    if case.engine.weight_version != 3:
        await case.engine.update(replace(case.manifests[0], version=3))
    return case.engine


def turn(seed: int, *, max_tokens: int = 24, prompt_seed: int | None = None, **options) -> GenerateRequest:
    prompt = np.random.default_rng(seed if prompt_seed is None else prompt_seed).integers(2, VOCAB_SIZE, 40)
    return GenerateRequest(prompt.astype(np.int32), seed, max_tokens, group="g", **options)


def same(a: Generation, b: Generation) -> bool:
    return a.output_ids.tolist() == b.output_ids.tolist() and np.allclose(a.logprobs, b.logprobs, atol=1e-5)


async def test_refuses_requests_before_any_weights_are_proven(case: Case):
    assert case.engine.weight_version == NO_WEIGHTS
    with pytest.raises(EngineFailed, match="no proven weights"):
        await case.engine.generate(turn(0))


async def test_an_update_within_the_allowed_gap_sets_the_version_of_every_later_turn(case: Case):
    gap = await case.engine.update(replace(case.manifests[0], version=1))
    assert 0 <= gap < 1e-4
    assert (await case.engine.generate(turn(0))).weight_version == 1


async def test_a_refuted_proof_raises_and_leaves_an_engine_that_refuses(case: Case):
    right = case.manifests[0].proof
    for wrong in (math.nan, *([-0.5] if case.models else [])):
        bad = replace(case.manifests[0], version=2, proof=WeightProof(right.ids, (wrong, *right.logprobs[1:])))
        with pytest.raises(TrainingError, match=r"max_gap"):
            await case.engine.update(bad)
        assert case.engine.weight_version == NO_WEIGHTS
        with pytest.raises(EngineFailed):
            await case.engine.generate(turn(0))
    await case.engine.update(replace(case.manifests[0], version=2))
    assert (await case.engine.generate(turn(0))).weight_version == 2


async def test_a_missing_folder_is_an_engine_failure_and_the_next_update_heals_it(case: Case, tmp_path: Path):
    with pytest.raises(EngineFailed):
        await case.engine.update(replace(case.manifests[0], uri=str(tmp_path / "absent")))
    assert case.engine.weight_version == NO_WEIGHTS
    await case.engine.update(replace(case.manifests[0], version=3))
    assert not case.engine.errored


async def test_ids_and_log_probs_have_one_entry_a_token(engine: Engine):
    answers = await asyncio.gather(*(engine.generate(turn(seed)) for seed in range(8)))
    for answer in answers:
        assert answer.output_ids.dtype == np.int32
        assert answer.logprobs.dtype == np.float32
        assert 0 < len(answer.output_ids) == len(answer.logprobs) <= 24
        assert (answer.logprobs <= 0).all()


async def test_a_turn_ends_with_its_end_token_or_at_its_limit(engine: Engine):
    answers = await asyncio.gather(*(engine.generate(turn(seed, max_tokens=300)) for seed in range(16)))
    assert {"stop"} <= {answer.finish_reason for answer in answers}
    for answer in answers:
        ends = answer.output_ids == END_OF_TURN_ID
        if answer.finish_reason == "stop":
            assert ends[-1]
            assert ends.sum() == 1
        else:
            assert len(answer.output_ids) == 300
            assert not ends.any()


async def test_a_seed_gives_the_same_turn_alone_and_in_company(engine: Engine):
    alone = [await engine.generate(turn(seed)) for seed in range(3)]
    together = await asyncio.gather(*(engine.generate(turn(seed)) for seed in range(24)))
    assert all(same(a, b) for a, b in zip(alone, together, strict=False))


async def test_seeds_tell_siblings_apart_and_greedy_turns_do_not_depend_on_them(engine: Engine):
    a, b = [await engine.generate(turn(seed, prompt_seed=0)) for seed in (1, 2)]
    assert not same(a, b)
    a, b = [await engine.generate(turn(seed, prompt_seed=0, greedy=True)) for seed in (1, 2)]
    assert same(a, b)


async def test_a_prompt_without_room_for_a_token_names_the_key(engine: Engine):
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len=512"):
        await engine.generate(GenerateRequest(np.full(512, 5, np.int32), 0, 8, "g"))


async def test_a_turn_ends_as_length_where_the_model_length_ends(engine: Engine):
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, 508).astype(np.int32)
    answers = [await engine.generate(GenerateRequest(prompt, seed, 64, "g")) for seed in range(3)]
    assert {(len(answer.output_ids), answer.finish_reason) for answer in answers} == {(4, "length")}


async def test_a_pause_freezes_turns_until_resume(engine: Engine):
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(turn(5)))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    await engine.resume()
    assert same(await waiting, await engine.generate(turn(5)))


async def test_an_update_ends_a_pause(case: Case, engine: Engine):
    await engine.pause()
    waiting = asyncio.create_task(engine.generate(turn(5)))
    await engine.update(replace(case.manifests[0], version=3))
    assert (await waiting).weight_version == 3


async def test_a_deadline_ends_a_turn_and_frees_its_place(engine: Engine):
    await engine.pause()
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await engine.generate(turn(5, deadline_s=0.05))
    await engine.resume()
    assert engine.stats()["num_in_flight"] == 0


async def test_a_cancelled_caller_frees_its_place_and_the_rest_are_served(engine: Engine):
    tasks = [asyncio.create_task(engine.generate(turn(seed, max_tokens=200))) for seed in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(isinstance(result, Generation) for result in results[1:])
    assert engine.stats() == {**engine.stats(), "num_in_flight": 0, "in_flight_tokens": 0}


async def test_abort_all_ends_what_is_in_flight_and_nothing_later(case: Case, engine: Engine):
    begun = [asyncio.create_task(engine.generate(turn(seed, max_tokens=400))) for seed in range(3)]
    await asyncio.sleep(0.02 if case.models else 0)  # on their way; vLLM needs seconds for so many tokens
    await engine.abort_all()
    results = await asyncio.gather(*begun, return_exceptions=True)
    assert any(isinstance(result, EngineFailed) for result in results)
    assert (await engine.generate(turn(9))).finish_reason in ("stop", "length")


async def test_an_update_keeps_turns_in_flight_under_the_version_that_began_them(case: Case, engine: Engine):
    begun = [asyncio.create_task(engine.generate(turn(seed, max_tokens=200))) for seed in range(4)]
    await asyncio.sleep(0)
    await engine.update(replace(case.manifests[1], version=4))
    assert {answer.weight_version for answer in await asyncio.gather(*begun)} == {3}
    assert (await engine.generate(turn(0))).weight_version == 4


async def test_turns_in_flight_do_not_survive_a_refuted_update(case: Case, engine: Engine):
    begun = [asyncio.create_task(engine.generate(turn(seed, max_tokens=400))) for seed in range(4)]
    await asyncio.sleep(0)
    refuted = WeightProof(case.manifests[0].proof.ids, (math.nan, *case.manifests[0].proof.logprobs[1:]))
    with pytest.raises(TrainingError):
        await engine.update(replace(case.manifests[0], proof=refuted))
    results = await asyncio.gather(*begun, return_exceptions=True)
    assert all(isinstance(result, EngineFailed) for result in results)


async def test_log_probs_are_those_of_transformers_over_temperature_and_of_the_newest_weights(case: Case):
    if not case.models:
        pytest.skip("the fake has no model")
    for version, which in enumerate((1, 0), start=10):
        await case.engine.update(replace(case.manifests[which], version=version))
        for greedy, temperature in ((False, 0.7), (True, 1.0)):
            request = turn(3, greedy=greedy)
            answer = await case.engine.generate(request)
            ids = [*request.prompt_ids.tolist(), *answer.output_ids.tolist()]
            expected = logprobs(case.models[which], ids, temperature)[-len(answer.output_ids) :]
            np.testing.assert_allclose(answer.logprobs, expected, atol=2e-5)


async def test_an_engine_that_was_not_built_to_score_says_so(engine: Engine):
    with pytest.raises(ConfigError, match=r"memory_reward\.scorer_engine=vllm"):
        await engine.score([Continuation(np.arange(2, 9), np.arange(3))], "g", 5)


async def test_a_cached_prefix_gives_the_log_probs_of_a_fresh_one(case: Case, engine: Engine):
    if not case.models:
        pytest.skip("the fake has no cache")
    before = engine.stats()
    first, second = [await engine.generate(turn(21, prompt_seed=4)) for _ in range(2)]
    assert same(first, second)
    now = engine.stats()
    asked, found = (now[name] - before[name] for name in ("prompt_tokens", "prefix_hit_tokens"))
    assert 0 < found < asked


async def test_an_engine_tells_its_load_while_turns_run_and_afterwards(engine: Engine):
    begun = [asyncio.create_task(engine.generate(turn(seed, max_tokens=200))) for seed in range(4)]
    await asyncio.sleep(0)
    busy = engine.stats()
    await asyncio.gather(*begun)
    idle = engine.stats()
    assert (busy["num_in_flight"], idle["num_in_flight"]) == (4, 0)
    assert 0 <= busy["kv_use"] <= 1
    assert (idle["kv_use"], idle["num_queued"]) == (0, 0)
    assert idle["output_tokens"] > busy["output_tokens"]


async def test_closing_twice_is_harmless_and_nothing_runs_afterwards(case: Case):
    """Last in the file: it ends the module's engine."""
    await case.engine.close()
    await case.engine.close()
    with pytest.raises(EngineFailed):
        await case.engine.generate(turn(0))


async def test_options_that_the_model_cannot_take_are_the_users_error(tmp_path: Path):
    save_tiny_model(tmp_path, seed=0)
    rollout = ROLLOUT.model_copy(update={"max_model_len": 5000})
    engine = build_engine("e", str(tmp_path), rollout, WeightSync(), END_OF_TURN_ID, tmp_path / "e.log")
    with pytest.raises(ConfigError, match=r"(?s)rollout: vLLM refuses.*5000"):
        await engine.start()


@pytest.mark.slow
async def test_stop_at_tags_ends_a_turn_after_the_tag_and_leaves_the_end_token_to_the_system(tmp_path: Path):
    """vLLM alone: it needs the folder's tokenizer, an engine of its own."""
    save_tiny_model(tmp_path, seed=0)
    search, answer = save_tiny_tokenizer(tmp_path)
    rollout = ROLLOUT.model_copy(update={"stop_at_tags": True, "temperature": 1.5})
    engine = build_engine("tags", str(tmp_path), rollout, WeightSync(), END_OF_TURN_ID, tmp_path / "tags.log")
    await engine.start()
    try:
        await engine.update(unproven(str(tmp_path)))
        answers = await asyncio.gather(*(engine.generate(turn(seed, max_tokens=400)) for seed in range(32)))
    finally:
        await engine.close()
    by_tag = 0
    for answer_ids in (each.output_ids for each in answers if each.finish_reason == "stop"):
        ends = np.isin(answer_ids, (search, answer, END_OF_TURN_ID))
        assert ends[-1]
        assert ends.sum() == 1
        by_tag += answer_ids[-1] != END_OF_TURN_ID
    assert by_tag > 0


async def test_an_engine_that_samples_at_another_temperature_than_1_cannot_be_built_to_score(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"rollout\.temperature=0\.7"):
        build_engine("e", "", ROLLOUT, WeightSync(), END_OF_TURN_ID, tmp_path / "e.log", scores=True)
