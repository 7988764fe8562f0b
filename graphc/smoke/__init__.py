"""``graphc doctor --smoke``: whether a machine's GPUs are fit for training, stage by stage."""
