"""The searches of one step of a real run, as a trace for benchmarks/retrieval.py.

    python benchmarks/make_trace.py runs/latest/trajectories/step_0001.parquet benchmarks/grouped_trace.jsonl

One line a search: task, sibling, turn, query, in the order in which the episodes of a step advance side by side: turn
by turn, in a turn sibling by sibling, of a sibling task by task. The log holds no times. The shipped trace is step 1 of

    python -m mempo_ray.driver run.steps=1 run.deterministic=true algorithm.group_size=16 cold_start.tasks=128 \
        cold_start.batch_tokens=2048
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq

COLUMNS = ["task_id", "sibling", "turn", "query"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="a step's file of a run's trajectories folder")
    parser.add_argument("trace", type=Path, help="file to write")
    arguments = parser.parse_args()
    rows = [row for row in pq.read_table(arguments.log, columns=COLUMNS).to_pylist() if row["query"]]
    rows.sort(key=lambda row: (row["turn"], row["sibling"], row["task_id"]))
    arguments.trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    groups, queries = {row["task_id"] for row in rows}, {row["query"] for row in rows}
    print(f"{arguments.trace}: {len(rows)} searches of {len(groups)} tasks, {len(queries)} distinct")


if __name__ == "__main__":
    main()
