"""What every worker process of ``graphc train -n N`` runs: ``python -m graphc.cli.worker JOB.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from graphc.cli import DEBUG
from graphc.cli.job import Job, execute, prepare
from graphc.errors import GraphcError


def main(path: str) -> None:
    """Run the job stored at ``path`` as the rank the environment says."""
    job = Job(**json.loads(Path(path).read_text()))
    try:
        execute(job, prepare(job, quiet=True))
    except GraphcError:
        raise
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        text = " ".join(str(error).split()) or "no message"
        raise GraphcError(f"unexpected {type(error).__name__}: {text} (run with {DEBUG}=1 for the traceback)") from None


if __name__ == "__main__":
    main(sys.argv[1])
