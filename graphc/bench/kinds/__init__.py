"""Ten kinds of models that nobody tuned for, beside PyTorch on one thread: ``python -m graphc.bench.kinds``."""
