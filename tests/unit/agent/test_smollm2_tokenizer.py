"""Spans, memories and prompts with SmolLM2's own tokenizer, whose tokens straddle tag borders."""

import numpy as np
import pytest

from mempo_ray.agent.memory import encode_probe
from mempo_ray.agent.prompt import Renderer
from mempo_ray.agent.protocol import parse_turn, write_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.models import models_dir
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Passage

FOLDER = models_dir() / "smollm2"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no model at {FOLDER}: mempo-ray fetch smollm2")

TURN = write_turn("Jaws director: Bob (born 1923).", "I know enough to answer.", answer="Bob")


@pytest.fixture(scope="module")
def renderer():
    return Renderer.from_folder(FOLDER, FileTokenizer.from_folder(FOLDER), Agent(system_prompt="be brief"))


def test_a_straddling_token_belongs_to_the_block_that_holds_its_first_byte(renderer):
    pieces = [renderer.tokenizer.token_bytes(i) for i in renderer.output_ids(TURN)]
    turn = parse_turn(pieces)
    held = {name: b"".join(pieces[start:stop]).decode() for name, (start, stop) in turn.spans.items() if stop > start}
    assert held == {
        "mem": "<mem>Jaws director: Bob (born 1923).</mem><",
        "think": "think>I know enough to answer.</think><",
        "answer": "answer>Bob</answer>",
    }


def test_the_memory_is_cut_at_its_tag_and_nothing_else_is_encoded_again(renderer):
    ids = renderer.output_ids(TURN)
    memory = renderer.memory_ids(ids)
    assert renderer.tokenizer.decode(memory.tolist()) == "<mem>Jaws director: Bob (born 1923).</mem>"
    assert memory[:-1].tolist() == ids[: len(memory) - 1].tolist()


def test_digits_are_single_tokens(renderer):
    ids = renderer.tokenizer.encode("born 1923")
    assert [renderer.tokenizer.token_bytes(i) for i in ids[-4:]] == [b"1", b"9", b"2", b"3"]


def test_probe_targets_are_the_gold_tokens_alone(renderer):
    probe = encode_probe("<answer>", "January 13, 1950", "</answer>", renderer.tokenizer)
    pieces = [renderer.tokenizer.token_bytes(i) for i in probe.ids[probe.start : probe.stop]]
    assert b"".join(pieces) == b"January 13, 1950"


def test_parts_of_an_episode_join_into_the_ids_of_the_whole_text(renderer):
    """Each part is encoded alone, so no token may reach over a part's border: special tokens stand there."""
    tool = renderer.tool_ids([Passage("p0", "Jaws", "A film by Bob.")], 256)
    search = renderer.output_ids(write_turn("Nothing is known yet.", "Who directed Jaws?", search="Jaws director"))
    joined = np.concatenate([renderer.initial_ids("Who directed Jaws?"), search, tool.ids])
    assert joined.tolist() == renderer.tokenizer.encode(renderer.tokenizer.decode(joined.tolist()))
