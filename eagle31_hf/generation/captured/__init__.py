"""Captured rounds: a round of drafting and verifying as functions of tensors, which a GPU replays as CUDA graphs."""
