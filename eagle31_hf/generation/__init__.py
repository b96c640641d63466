"""Lossless speculative decoding: a drafter proposes, the user's own model verifies."""
