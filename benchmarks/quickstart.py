"""Does the quickstart learn, and what does the memory reward add? Whole runs of the driver, seed by seed.

    python benchmarks/quickstart.py [--seeds 0,1,2] [--json FILE|-] [key=value ...]

Each seed runs twice, with the memory reward and without it (`memory_reward.weight=0`); everything else is
configs/quickstart.yaml. Prints `em_gain_mean` over the seeds with the memory reward, the smallest lower end of their
95 % intervals, the median of their seconds, and every run's summary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run(seed: int, weight: float, overrides: list[str], folder: Path) -> dict:
    """One run of the driver; its summary.json with seed and weight."""
    name = f"seed{seed}-weight{weight:g}"
    command = [sys.executable, "-m", "mempo_ray.driver", f"run.seed={seed}", f"memory_reward.weight={weight}"]
    command += [f"run.dir={folder}", f"run.name={name}", *overrides]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    (summary,) = folder.glob(f"{name}-*/summary.json")
    return {"seed": seed, "weight": weight, **json.loads(summary.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (default: 0,1,2)")
    parser.add_argument("--json", default="-", help="file for the figures, - for standard output")
    parser.add_argument("overrides", nargs="*", help="key=value, as for the driver")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quickstart-"))
    print(f"logs and run folders: {folder}", file=sys.stderr)
    runs = []
    for seed in map(int, arguments.seeds.split(",")):
        for weight in (1.0, 0.0):
            runs.append(run(seed, weight, arguments.overrides, folder))
            done = {key: runs[-1][key] for key in ("seed", "weight", "em_cold_start", "em_final", "seconds")}
            print(json.dumps(done), file=sys.stderr)
    with_memory = [r for r in runs if r["weight"] > 0]
    without = [r for r in runs if r["weight"] == 0]
    figures = {
        "em_gain_mean": statistics.mean(r["em_gain"] for r in with_memory),
        "em_gain_low_min": min(r["em_gain_low"] for r in with_memory),
        "em_gain_mean_without_memory_reward": statistics.mean(r["em_gain"] for r in without),
        "seconds_median": statistics.median(r["seconds"] for r in with_memory),
        "runs": runs,
    }
    text = json.dumps(figures, indent=2)
    print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
