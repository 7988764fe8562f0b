"""Training from the user's side: the trainer, its cached plans, feeds and micro-batches."""
