import pytest

from mempo_ray.data.world import (
    BASE_SEEDS,
    FACTS_PER_SUBJECT,
    NAMES,
    AtlasSpec,
    build_atlas,
    parse_source,
    same_atlas,
    synthetic_tasks,
)
from mempo_ray.errors import DataError

ATLAS = build_atlas(AtlasSpec(seed=3))


def test_names_are_spelt_once_so_a_word_means_one_thing():
    assert len(NAMES) == len(set(NAMES))


def test_no_name_of_a_held_out_world_appears_in_a_training_world():
    train, held_out = (
        {name for world in ATLAS.split(split) for name in (*world.people, *world.places)} for split in ("train", "eval")
    )
    assert train
    assert held_out
    assert not train & held_out


def test_train_and_eval_questions_share_neither_text_nor_fact():
    train, held_out = ATLAS.questions("train"), ATLAS.questions("eval")
    assert not {q.text for q in train} & {q.text for q in held_out}
    assert not {f for q in train for f in q.chain} & {f for q in held_out for f in q.chain}


def test_a_key_has_one_value_in_the_whole_atlas_so_one_index_never_contradicts_itself():
    keys = [(fact.relation, fact.subject) for world in ATLAS.worlds for fact in world.facts]
    assert len(keys) == len(set(keys))
    assert all(len(world.about(name)) == FACTS_PER_SUBJECT for world in ATLAS.worlds for name in world.people)


def test_the_same_spec_gives_the_same_questions_and_another_seed_other_ones():
    again, other = (
        synthetic_tasks("synthetic:train?seed=3&tasks=50"),
        synthetic_tasks("synthetic:train?seed=4&tasks=50"),
    )
    assert again == synthetic_tasks("synthetic:train?seed=3&tasks=50")
    assert {t.question for t in again}.isdisjoint(t.question for t in other)


def test_the_first_fact_is_named_by_no_later_query_or_passage_so_only_memory_carries_it():
    for question in ATLAS.questions("train")[:500]:
        first, *later = question.chain
        assert all(first.value not in (f.subject, f.value) for f in later)
        assert question.answer.split()[0] == first.value


def test_a_three_hop_question_needs_the_second_answer_to_ask_the_third():
    question = next(q for q in ATLAS.questions("eval") if q.hops == 3)
    _, bridge, last = question.chain
    assert last.subject == bridge.value
    assert last.subject not in question.text.split()


def test_every_fact_of_a_question_is_a_passage_of_the_corpus():
    corpus = {p.id: p.text for p in ATLAS.passages()}
    for task in synthetic_tasks("synthetic:eval?seed=3&tasks=100"):
        for relation, subject, value, passage_id in task.metadata["chain"]:
            assert corpus[passage_id] == f"{relation} {subject} {value} ."


def test_a_run_cannot_use_a_world_that_the_base_checkpoint_has_seen():
    with pytest.raises(DataError, match="base checkpoint"):
        parse_source(f"synthetic:eval?seed={BASE_SEEDS.start + 7}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("synthetic:dev", "synthetic:train or synthetic:eval"),
        ("synthetic:train?sead=1", "unknown key 'sead'"),
        ("synthetic:train?seed=one", "whole number"),
        ("synthetic:train?held_out=32", "held_out < worlds"),
        ("synthetic:train?hops=4", "hops"),
    ],
)
def test_a_source_that_cannot_be_read_says_what_to_write(source, message):
    with pytest.raises(DataError, match=message):
        parse_source(source)


def test_more_tasks_than_the_worlds_hold_is_an_error_not_an_endless_search():
    with pytest.raises(DataError, match="fewer tasks"):
        synthetic_tasks("synthetic:eval?held_out=1&tasks=100000")


def test_train_and_eval_of_one_run_must_mean_one_atlas():
    assert same_atlas("synthetic:train", "synthetic:eval?tasks=400").spec.seed == 0
    with pytest.raises(DataError, match="different worlds"):
        same_atlas("synthetic:train?seed=1", "synthetic:eval")
