"""Reports about a program: memory, predicted time, advice, coverage, trace."""
