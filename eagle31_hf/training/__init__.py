"""Training a drafter: the multi-step unroll, its loss and its metrics."""
