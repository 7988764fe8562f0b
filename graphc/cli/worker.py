"""What every worker process of ``graphc train -n N`` runs: ``python -m graphc.cli.worker JOB.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from graphc.cli.job import Job, execute, prepare, without_tracebacks


def main(path: str) -> None:
    """Run the job stored at ``path`` as the rank the environment says."""
    job = Job(**json.loads(Path(path).read_text()))
    with without_tracebacks():
        execute(job, prepare(job, quiet=True))


if __name__ == "__main__":
    main(sys.argv[1])
