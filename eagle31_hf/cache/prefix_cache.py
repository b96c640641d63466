"""The target's caches of texts that were generated, for texts that begin as they do: what both have in common is not
read again. B is 1."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ..cache_names import CACHE
from . import adopt
from .states import is_recurrent

MOST_TOKENS = 16_384  # 2 GB of keys and values for a model of 8B in 16 bits
# transformers before it reads the cached tokens of a prompt once more where it reads the prompt in pieces
READS_PIECES_AFTER_CACHE = Version(transformers.__version__) >= Version("5.23")


@dataclass
class CachedText:
    """A text and the cache of a call that generates it; `ids`: its tokens, as many of the first ones as are known;
    `num_prompt`: those of the call's prompt; `num_reused`: those of them that the call need not read. The cache is None
    where generate() is to make its own."""

    ids: list[int]
    cache: Cache | None
    num_prompt: int
    num_reused: int = 0

    @property
    def argument(self) -> dict[str, Cache]:
        """The cache as an argument of generate(), none where it makes its own."""
        return {} if self.cache is None else {CACHE: self.cache}


class PrefixCache:
    """Keeps the caches of a target's texts that were generated last: the very last one, and before it those of
    `most_tokens` in all; 0: none. Threads may share it; each has its text to itself while it generates."""

    def __init__(self, target: PreTrainedModel, most_tokens: int = MOST_TOKENS):
        self.target: Any = target
        self.most_tokens = most_tokens
        # such a target keeps by how much the images of its last text have shifted positions: a cached one has others
        self._shifts_positions = any("rope_deltas" in vars(module) for module in target.modules())
        self._texts: list[CachedText] = []  # the one used last at the end
        self._lock = threading.Lock()

    @contextmanager
    def text(self, ids: Tensor, piece: int | None = None, config: Any = None) -> Iterator[CachedText]:
        """A context for a generate() call whose prompt is `ids` (1, L): with what is cached of its beginning, for the
        argument `past_key_values`. In it the caller sets `ids` to the tokens that were generated, the prompt included;
        after an error those of the prompt are known.

        `piece`: the call's `prefill_chunk_size`; `config`: its generation config, by default the target's.
        """
        text = self._taken(ids[0].tolist(), piece, config or self.target.generation_config)
        try:
            yield text
        except torch.OutOfMemoryError:
            with self._lock:
                self._texts.clear()
            raise
        finally:
            self._keep(text)

    def _taken(self, ids: list[int], piece: int | None, config: Any) -> CachedText:
        # whether generate() would make a cache of the kind that is kept here, of one text
        is_one = (config.num_beams or 1) == (config.num_return_sequences or 1) == 1
        is_usual = config.cache_implementation in (None, "dynamic") and config.use_cache is not False
        is_kept = self.most_tokens > 0 and not self._shifts_positions
        if not (is_kept and is_one and is_usual and self.target._supports_default_dynamic_cache()):
            return CachedText(ids, None, len(ids))
        with self._lock:
            counts = [_num_reusable(text, ids) for text in self._texts]
            count = max(counts, default=0)
            is_read_in_pieces = piece is not None and len(ids) - count > piece
            if count and (READS_PIECES_AFTER_CACHE or not is_read_in_pieces):
                text = self._texts.pop(counts.index(count))
                assert text.cache is not None
                if count < len(text.ids):
                    adopt.crop(text.cache, len(text.ids) - count)
                return CachedText(ids, text.cache, len(ids), count)
        cache = DynamicCache(config=self.target.config.get_text_config(decoder=True))
        # States can be cut nowhere, and some of transformers' layers that keep them (Mamba's, Jamba's) begin anew where
        # they read several tokens after a cached text.
        return CachedText(ids, None if is_recurrent(cache) else cache, len(ids))

    def _keep(self, text: CachedText) -> None:
        """Keeps a text whose call is over, as far as its cache holds it."""
        length = None if text.cache is None else adopt.length(text.cache)
        if text.cache is None or not length:
            return
        if length > len(text.ids):
            if not adopt.can_crop(text.cache):
                return
            adopt.crop(text.cache, length - len(text.ids))
        text.ids = text.ids[:length]
        with self._lock:
            while sum(len(other.ids) for other in self._texts) > self.most_tokens:
                del self._texts[0]
            self._texts.append(text)


def _num_reusable(text: CachedText, ids: list[int]) -> int:
    """Returns how many first tokens of a text (L) are those of a cached one; the last is always read. A cache is cut
    for a text that has its prompt in common with it, or half of it: else it is left for others."""
    pairs = zip(text.ids, ids[:-1], strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text.ids), len(ids) - 1))
    if common == len(text.ids):
        return common
    is_akin = common >= min(text.num_prompt - 1, len(text.ids) // 2)
    return common if is_akin and text.cache is not None and adopt.can_crop(text.cache) else 0
