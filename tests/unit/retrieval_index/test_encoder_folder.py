import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_index.encoder import make_encoder
from retrieval_index.encoder_folder import (
    folder_max_length,
    folder_pooling,
    folder_positions,
    folder_prompts,
    refuse_unknown_modules,
)
from retrieval_index.encoder_presets import PRESETS, preset_folder
from retrieval_index.errors import EncoderError


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("key", "pooling"),
    [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(tmp_path: Path, key: str, pooling: str) -> None:
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_other": False, key: True})
    assert folder_pooling(tmp_path) == pooling


def test_a_pooling_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(EncoderError, match="pools by pooling_mode_weightedmean_tokens"):
        folder_pooling(tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    with pytest.raises(EncoderError, match="pools by"):
        folder_pooling(tmp_path)


def test_a_module_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    write(tmp_path, "modules.json", [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds])
    with pytest.raises(EncoderError, match="has the module Dense"):
        refuse_unknown_modules(tmp_path)


def test_prefixes_are_read_from_the_prompts(tmp_path: Path) -> None:
    assert folder_prompts(tmp_path) == {"query": "", "passage": ""}
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "query: ", "document": "passage: "}})
    assert folder_prompts(tmp_path) == {"query": "query: ", "passage": "passage: "}


def test_the_longest_input_is_the_least_of_what_the_files_say(tmp_path: Path) -> None:
    assert folder_max_length(tmp_path, 512) == 512
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 10**30})
    write(tmp_path, "config.json", {"max_position_embeddings": 514})
    assert folder_max_length(tmp_path, 512) == 512
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 128})
    assert folder_max_length(tmp_path, 512) == 128
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 1024})
    assert folder_max_length(tmp_path, 512) == 1024


def test_positions_of_roberta_and_its_kin_begin_after_the_padding(tmp_path: Path) -> None:
    assert folder_positions(tmp_path) is None
    write(tmp_path, "config.json", {"max_position_embeddings": 514, "model_type": "bert"})
    assert folder_positions(tmp_path) == 514
    write(tmp_path, "config.json", {"max_position_embeddings": 514, "model_type": "xlm-roberta", "pad_token_id": 1})
    assert folder_positions(tmp_path) == folder_max_length(tmp_path, 600) == 512


def test_a_preset_is_found_by_name_and_brings_its_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPO_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path, "e5/config.json", {"hidden_size": 8})
    write(tmp_path, "e5/tokenizer.json", {})
    assert preset_folder("e5") == tmp_path / "e5"
    assert make_encoder("e5").settings == {
        "pooling": "mean",
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
        "max_length": 512,
        "normalised": True,
    }
    assert make_encoder("e5", query_prefix="", max_length=64).settings["query_prefix"] == ""
    with pytest.raises(EncoderError, match=r"hf download BAAI/bge-base-en-v1\.5"):
        make_encoder("bge")


def test_every_preset_takes_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPO_MODELS", str(tmp_path))
    for name in PRESETS:
        write(tmp_path, f"{name}/config.json", {"hidden_size": 8})
        write(tmp_path, f"{name}/tokenizer.json", {})
        assert PRESETS[name].settings.items() <= make_encoder(name).settings.items()


# --- a real, tiny model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of random weights over ten words."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "query", ":"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=10, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_pooled_vectors_do_not_see_the_padding(bert: Path, pooling: str) -> None:
    encoder = make_encoder(str(bert), pooling=pooling, num_threads=1)
    texts = ["a", "a b c a b c a b c", "b c"]
    together = encoder.encode_passages(texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_allclose(encoder.encode_passages([text])[0], vector, atol=1e-6)


def test_prefix_length_and_scale_are_applied(bert: Path) -> None:
    plain = make_encoder(str(bert), num_threads=1)
    assert plain.settings["max_length"] == 32
    prefixed = make_encoder(str(bert), query_prefix="query: ", num_threads=1)
    np.testing.assert_array_equal(prefixed.encode_queries(["a"]), plain.encode_queries(["query: a"]))
    np.testing.assert_array_equal(prefixed.encode_passages(["a"]), plain.encode_passages(["a"]))
    short = make_encoder(str(bert), max_length=4, num_threads=1)
    np.testing.assert_allclose(short.encode_queries(["a b c a b"]), short.encode_queries(["a b"]), atol=1e-6)
    raw = make_encoder(str(bert), normalised=False, num_threads=1).encode_queries(["a b"])
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(raw / np.linalg.norm(raw), plain.encode_queries(["a b"]), atol=1e-6)


def test_a_query_of_a_hundred_thousand_characters_is_cut(bert: Path) -> None:
    encoder = make_encoder(str(bert), num_threads=1)
    np.testing.assert_array_equal(encoder.encode_queries(["a b " * 25_000]), encoder.encode_queries(["a b " * 30]))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"device": "gpu"}, "does not load on gpu"),
        ({"dim": 64}, "has no setting dim"),
        ({"pooling": "median"}, "unknown pooling"),
        ({"max_length": 33}, "max_length: .* takes 3 to 32 tokens, not 33"),
        ({"max_length": 0}, "takes 3 to 32 tokens, not 0"),
    ],
)
def test_a_slip_is_one_clear_error(bert: Path, given: dict, problem: str) -> None:
    with pytest.raises(EncoderError, match=problem):
        make_encoder(str(bert), num_threads=1, **given).encode_queries(["a"])
    with pytest.raises(EncoderError, match="hash has no setting pooling"):
        make_encoder("hash", pooling="mean")
