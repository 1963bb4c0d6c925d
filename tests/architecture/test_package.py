"""The wheel is a whole program: it holds what a run without arguments needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_quickstart_and_its_policy(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assets = {f"mempo_ray/assets/{name}" for name in ("quickstart.yaml", "tiny_policy/model.safetensors",
              "tiny_policy/tokenizer.json", "tiny_policy/config.json")}  # fmt: skip
    assert assets <= names
    assert {"mempo_ray/driver.py", "retrieval_index/build.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "configs", "docs"))]
