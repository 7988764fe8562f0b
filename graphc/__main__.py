"""``python -m graphc``: the command line."""

import sys

from graphc.cli import main

sys.exit(main())
