"""Chat frames, tool responses, contexts and rows of the cold start."""

import json

import numpy as np
import pytest

from mempo_ray.agent.prompt import ChatFrame, PastTurn, Renderer, next_prompt
from mempo_ray.agent.protocol import write_turn
from mempo_ray.agent.tokenizer import FileTokenizer
from mempo_ray.config.schema import Agent
from mempo_ray.contracts import Passage
from mempo_ray.errors import ConfigError
from tests.fakes.tokenizer import CHATML, byte_level_folder, metaspace_folder

LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ strftime_now('%d %b %Y') }}\n{{ system }}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PASSAGES = [Passage(f"p{n}", "", f"home Boko Vela . {n}") for n in range(3)]


@pytest.fixture(scope="module", params=[byte_level_folder, metaspace_folder])
def renderer(request, tmp_path_factory):
    folder = request.param(tmp_path_factory.mktemp("model"))
    return Renderer.from_folder(folder, FileTokenizer.from_folder(folder), Agent())


def test_chatml_is_cut_as_the_docstring_shows(tmp_path):
    frame = ChatFrame.from_folder(byte_level_folder(tmp_path))
    assert frame.before_question == "<|im_start|>user\n"
    assert frame.before_output == "<|im_end|>\n<|im_start|>assistant\n"
    assert frame.after_output == "<|im_end|>\n<|im_start|>user\n"
    assert frame.system == ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n")


def test_a_llama3_template_is_cut_with_its_default_system_message():
    frame = ChatFrame.from_template(LLAMA3, {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"})
    assert frame.opening("Q", "").startswith(
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024"
    )
    assert "\nbe brief<|eot_id|>" in frame.opening("Q", "be brief")
    assert frame.after_output == "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"


def test_a_template_without_system_message_is_an_error_only_when_one_is_wanted():
    frame = ChatFrame.from_template(GEMMA, {})
    assert frame.opening("Q", "") == "<start_of_turn>user\nQ<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(ConfigError, match=r"agent\.system_prompt"):
        frame.opening("Q", "be brief")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ raise_exception('no') }}"])
def test_a_template_that_loses_messages_or_fails_names_the_key(template):
    with pytest.raises(ConfigError, match=r"agent\.chat_template"):
        ChatFrame.from_template(template, {})


def test_templates_are_found_in_their_three_places(tmp_path):
    folder = byte_level_folder(tmp_path / "m")
    expected = ChatFrame.from_folder(folder)
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    assert ChatFrame.from_folder(folder, str(own)) == expected
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFrame.from_folder(folder)
    with pytest.raises(ConfigError, match="no such file"):
        ChatFrame.from_folder(folder, str(tmp_path / "absent.jinja"))
    (folder / "chat_template.jinja").write_text(CHATML)
    assert ChatFrame.from_folder(folder) == expected


def test_an_eos_token_that_does_not_end_a_turn_is_refused(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHATML}))
    with pytest.raises(ConfigError, match="eos_token"):
        Renderer.from_folder(folder, FileTokenizer.from_folder(folder), Agent())


def test_the_parts_of_an_episode_concatenate_to_the_rendered_dialogue(tmp_path):
    folder = byte_level_folder(tmp_path)
    tokenizer = FileTokenizer.from_folder(folder)
    renderer = Renderer.from_folder(folder, tokenizer, Agent(system_prompt="S"))
    response = renderer.tool_ids(PASSAGES[:1], 100)
    ids = np.concatenate([renderer.initial_ids("Q"), renderer.output_ids("O"), response.ids])
    assert tokenizer.decode(ids.tolist()) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nO<|im_end|>\n"
        f"<|im_start|>user\n{response.text}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_passages_are_lines_with_their_titles(renderer):
    passages = [Passage("a", "Boko", "home Vela ."), Passage("b", "", "home Kim .")]
    response = renderer.tool_ids(passages, 1000)
    assert response.text == "<tool_response>Boko: home Vela .\nhome Kim .</tool_response>"
    assert response.passage_ids == ("a", "b")


def test_a_long_response_is_cut_at_a_passage_border_and_marked(renderer):
    whole = renderer.tool_ids(PASSAGES, 1000)
    assert whole.passage_ids == ("p0", "p1", "p2")
    cut = renderer.tool_ids(PASSAGES, len(whole.ids) - 1)
    assert cut.passage_ids in {("p0", "p1"), ("p0",), ()}
    assert f"[{len(cut.passage_ids)} of 3 passages shown]" in cut.text
    assert "home Boko Vela . 2" not in cut.text


def test_contexts_are_concatenations_of_stored_ids():
    initial = np.array([1], np.int32)
    history = [PastTurn(*(np.array([10 * n + k], np.int32) for k in range(3))) for n in (1, 2, 3)]

    def prompt(context, k_turns=2):
        return next_prompt(initial, history, context=context, k_turns=k_turns, end_of_turn_id=0).tolist()

    assert prompt("last_turn") == [1, 30, 31]
    assert prompt("full") == [1, 10, 11, 20, 21, 30, 31]
    assert prompt("k_turns") == [1, 20, 21, 30, 31]
    assert prompt("k_turns", 9) == prompt("full")
    assert prompt("memory_only") == [1, 32, 0, 31]
    for context in ("last_turn", "full", "k_turns", "memory_only"):
        assert next_prompt(initial, [], context=context, k_turns=2, end_of_turn_id=0).tolist() == [1]


def test_rows_of_the_cold_start_are_one_per_turn_with_the_rollout_s_prompts(renderer):
    initial = renderer.initial_ids("mentor Boko ?")
    tool = renderer.tool_ids(PASSAGES[:1], 1000).ids
    texts = (write_turn("nothing", "need", search="mentor Boko"), write_turn("Sari", "done", answer="Sari"))
    first, second = renderer.sft_rows(initial, [(texts[0], tool), (texts[1], tool[:0])], Agent())
    assert first.prompt_ids.tolist() == initial.tolist()
    assert second.prompt_ids.tolist() == [*initial.tolist(), *first.output_ids.tolist(), *tool.tolist()]
    assert first.output_ids[-1] == second.output_ids[-1] == renderer.tokenizer.end_of_turn_id
    memory_only = renderer.sft_rows(initial, [(texts[0], tool), (texts[1], tool[:0])], Agent(context="memory_only"))
    assert "need" not in renderer.tokenizer.decode(memory_only[1].prompt_ids.tolist())
