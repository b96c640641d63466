"""What a round leaves in a cache, for tests that have no round."""

import torch
from transformers import Cache

from eagle31_hf.cache.adopt import keep_paths
from eagle31_hf.cache.transfer import Commit, Mirrored


def commit_of(paths: list[list[int]]) -> Commit:
    """A commit of as many tokens as each path has nodes; sequences with an empty path have ended."""
    return Commit(torch.device("cpu"), paths, paths, [not path for path in paths])


def keep(cache: Cache, starts: list[int], paths: list[list[int]]) -> None:
    """Of the nodes written from slot `starts[b]` on keeps `paths[b]`."""
    keep_paths(cache, Mirrored(starts), commit_of(paths))
