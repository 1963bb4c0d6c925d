"""Checkpoints: torch DCP for tensors (any number of ranks reads what any other wrote), JSON for facts, marker last.

    <uri>/state/      DCP files: weights, optimiser, reference, random state
    <uri>/hf/         the weights as a Hugging Face folder: what `mempo-ray eval` and `ask` serve
    <uri>/facts.json  architecture, version, schedule step, checksums, the caller's `extra`
    <uri>/COMPLETE    written last: a folder without it is the remains of a crash

A local path is written in a temporary folder beside it and renamed. Any other URI goes through a local staging
folder of each rank and pyarrow's file systems.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.fs as pafs
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from mempo_ray.errors import ConfigError
from mempo_ray.training.sharding import Gang

MARKER = "COMPLETE"
FACTS = "facts.json"
State = Mapping[str, Mapping[str, Tensor]]
"""section → name → tensor; sharded ones as DTensor."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says beside its tensors. `extra` is the caller's own (driver state), JSON only."""

    architecture: Mapping[str, object]  # `model.architecture`
    sections: Sequence[str]
    version: int
    schedule_step: int
    checksums: Mapping[str, str]  # by section, `model.checksum`; of the reference: the hash of π_ref
    num_ranks: int
    extra: Mapping[str, object]


def is_complete(uri: str) -> bool:
    """Does a whole checkpoint stand at this path or URI?"""
    if not _is_remote(uri):
        return (Path(uri) / MARKER).is_file()
    filesystem, path = pafs.FileSystem.from_uri(uri)
    return filesystem.get_file_info(f"{path}/{MARKER}").type == pafs.FileType.File


def save(uri: str, state: State, facts: Facts, gang: Gang, write_more: Callable[[Path], object]) -> None:
    """Write a complete checkpoint, replacing one that stands there. Collective; all ranks must see a local path.

    Args:
        write_more: called on every rank with the checkpoint's folder as it stands before it becomes visible.

    Raises:
        OSError: the folder cannot be written.
    """
    with _staging(uri, gang, fetch=False) as folder:
        _save_tensors(folder, state, gang)
        write_more(folder)
        if gang.rank == 0:
            (folder / FACTS).write_text(json.dumps(asdict(facts), indent=1))
        gang.barrier()
        if _is_remote(uri):
            _upload(folder, uri)
        elif gang.rank == 0:
            shutil.rmtree(uri, ignore_errors=True)
            folder.rename(uri)
        gang.barrier()
    if gang.rank == 0:
        _write_marker(uri)
    gang.barrier()


def _save_tensors(folder: Path, state: State, gang: Gang) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    gang.barrier()
    dcp.save(_flat(state), storage_writer=dcp.FileSystemWriter(folder / "state"))


def load(uri: str, state: State, architecture: Mapping[str, object], gang: Gang) -> Facts:
    """Fill the tensors of `state` in place; returns the facts. Collective.

    Raises:
        ConfigError: no complete checkpoint there, one of another model (both named), or one without a section that
            `state` asks for (a reference, where the saved run had none).
    """
    if not is_complete(uri):
        raise ConfigError(f"run.resume: {uri} holds no complete checkpoint (no file {MARKER}); name another or ''")
    with _staging(uri, gang, fetch=True) as folder:
        facts = Facts(**json.loads((folder / FACTS).read_text()))
        if facts.architecture != dict(architecture):
            raise ConfigError(
                f"run.resume: {uri} is a checkpoint of another model: {_words(facts.architecture)}; "
                f"policy.model has {_words(architecture)}. Set policy.model to that model or run.resume=''"
            )
        missing = set(state) - set(facts.sections)
        if missing:
            raise ConfigError(
                f"run.resume: {uri} holds no {sorted(missing)}; it was saved by a run whose configuration needed none "
                "(algorithm.kl_coef, memory_reward.scorer)"
            )
        dcp.load(_flat(state), storage_reader=dcp.FileSystemReader(folder / "state"))
        gang.barrier()
    return facts


def random_state() -> dict[str, Tensor]:
    """torch's generator. Rank 0's is kept for all: ranks draw nothing (no dropout), and their number may change."""
    return {"torch": torch.get_rng_state()}


def _flat(state: State) -> dict[str, Tensor]:
    return {f"{section}/{name}": tensor for section, tensors in state.items() for name, tensor in tensors.items()}


def _words(architecture: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in architecture.items())


def _is_remote(uri: str) -> bool:
    return "://" in uri


@contextmanager
def _staging(uri: str, gang: Gang, *, fetch: bool) -> Generator[Path]:
    """The local folder to write to or read from."""
    if not _is_remote(uri):
        target = Path(uri)
        if fetch:
            yield target
            return
        partial = target.with_name(target.name + ".partial")
        if gang.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        gang.barrier()
        yield partial
        return
    with tempfile.TemporaryDirectory(prefix="mempo-checkpoint-") as name:
        if fetch:
            filesystem, path = pafs.FileSystem.from_uri(uri)
            pafs.copy_files(path, name, source_filesystem=filesystem, destination_filesystem=pafs.LocalFileSystem())
        yield Path(name)


def _upload(folder: Path, uri: str) -> None:
    """Each rank has its own staging folder, so together they upload each file once."""
    filesystem, path = pafs.FileSystem.from_uri(uri)
    filesystem.create_dir(path, recursive=True)
    pafs.copy_files(str(folder), path, source_filesystem=pafs.LocalFileSystem(), destination_filesystem=filesystem)


def _write_marker(uri: str) -> None:
    if not _is_remote(uri):
        (Path(uri) / MARKER).touch()
        return
    filesystem, path = pafs.FileSystem.from_uri(uri)
    with filesystem.open_output_stream(f"{path}/{MARKER}"):
        pass
