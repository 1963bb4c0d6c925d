"""On a worker of `ray up`: when the cloud announces that it takes a spot machine back, have Ray drain the node.

    python spot_notice.py aws|gcp     waits for the notice, calls `ray drain-node`, ends

It is started beside Ray (`worker_start_ray_commands`), and asks the machine's own metadata service every 2 seconds. A
machine that is not spot gets no notice. On Kubernetes a pod's SIGTERM does this, see docs/cluster.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from urllib.request import Request, urlopen

METADATA = os.environ.get("MEMPO_METADATA", "http://169.254.169.254")  # the address is the same on both
NOTICE_S = {"aws": 120, "gcp": 30}
EVERY_S = 2.0


def is_going(cloud: str) -> bool:
    """Whether the notice is there. AWS answers 404 until then, Google FALSE."""
    try:
        if cloud == "gcp":
            return _ask("computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"
        token = _ask("latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        return bool(_ask("latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))
    except OSError:
        return False


def _ask(path: str, headers: dict[str, str], method: str = "GET") -> str:
    with urlopen(Request(f"{METADATA}/{path}", headers=headers, method=method), timeout=EVERY_S) as reply:
        return reply.read().decode().strip()


if __name__ == "__main__":
    _, cloud = sys.argv
    while not is_going(cloud):
        time.sleep(EVERY_S)
    words = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot notice"]
    subprocess.run(["ray", "drain-node", *words, "--deadline-remaining-seconds", str(NOTICE_S[cloud])], check=True)
