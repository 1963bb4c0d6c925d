"""A sync counts only when the log-probs of its fixed sequence agree."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from mempo_ray.contracts import WeightProof
from mempo_ray.errors import TrainingError
from mempo_ray.generation.engine import output_to, unproven, verified_gap

PROOF = WeightProof(ids=(4, 5, 6), logprobs=(-1.0, -2.0))


def test_the_gap_is_the_largest_difference_of_a_log_prob():
    assert verified_gap(PROOF, [-1.0, -2.0005], 1e-3, version=1) == pytest.approx(5e-4)


@pytest.mark.parametrize("claimed", [[-1.0, -2.1], [-1.0, math.nan], [-1.0, -math.inf], [-1.0], []])
def test_too_large_no_number_or_another_length_refutes(claimed: list[float]):
    with pytest.raises(TrainingError, match="weights 7"):
        verified_gap(PROOF, claimed, 1e-3, version=7)


def test_a_folder_served_as_it_lies_there_proves_nothing_and_says_so():
    manifest = unproven("models/m", version=2)
    assert (manifest.uri, manifest.version, manifest.proof.ids) == ("models/m", 2, ())
    assert verified_gap(manifest.proof, [], 1e-3, version=2) == 0.0


def test_output_goes_to_the_file_for_as_long_as_the_block(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    log_file = tmp_path / "logs" / "engine.log"
    with output_to(log_file):
        os.write(1, b"out\n")
        os.write(2, b"err\n")
    os.write(1, b"after\n")
    assert log_file.read_text() == "out\nerr\n"
    assert capfd.readouterr().out == "after\n"
