"""How the commands speak with a terminal, a pipe or a file: options, output, tables."""
