"""Worker process of ``graphc train -n N``: ``python -m graphc.cli.training.worker JOB.json``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from graphc.cli.terminal import output, streams
from graphc.cli.training.job import execute, from_json, prepare, without_tracebacks
from graphc.registry import PluginWarning


def main(path: str) -> None:
    """Run the job stored at ``path`` as the rank given by the environment."""
    streams.open_standard_streams()
    warnings.showwarning = output.warning
    warnings.simplefilter("ignore", PluginWarning)  # the command that started the workers has printed it
    job = from_json(Path(path).read_text())
    with without_tracebacks():
        execute(prepare(job, quiet=True))


if __name__ == "__main__":
    main(sys.argv[1])
