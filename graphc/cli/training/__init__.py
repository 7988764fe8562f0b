"""One training run of the command line, and the question whether a model would train."""
