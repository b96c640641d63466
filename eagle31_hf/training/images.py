"""Chats with images, as the target's own processor renders them, with the pixels that the target reads. T tokens.

The processor puts as many tokens in the place of an image as the target reads of it; they mean nothing without the
pixels.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..chat_template import in_form_of_parts
from ..images import bytes_of
from .kinds import ONLY_TEXT, Chat, parse_record
from .records import Records
from .skipped import Skipped, refused_by

Pixels = Mapping[str, Tensor]  # what a target reads besides token ids, as its processor gives it
NO_PIXELS = "tokens of images without their pixels"
IMAGE_IDS = ("image_token_id", "image_token_index")  # fields of configs


def image_ids(config: Any) -> Tensor:
    """Returns the token ids that stand for images, by a target's config: (N,) int64, none for one that reads text."""
    found = {getattr(config, name, None) for name in IMAGE_IDS} - {None}
    return torch.tensor(sorted(found), dtype=torch.long)


def refuse_images(input_ids: Tensor, ids: Tensor) -> None:
    """Raises ValueError for rows (B, T) with tokens that stand for images, by their `ids` (N,)."""
    if len(ids) and torch.isin(input_ids, ids.to(input_ids.device)).any():  # to ask a GPU is to wait for it
        raise ValueError(
            f"rows hold {NO_PIXELS}, which mean nothing to the target; expected text, or a store with the target's"
            " states, and no target beside it: prepare-data --states reads the pixels."
        )


def on_target(
    pixels: Pixels, device: torch.device, dtype: torch.dtype, num_tokens: int | None = None
) -> dict[str, Tensor]:
    """Returns pixels on a target's device and in its dtype; what they have for each token ends after so many."""
    found = dict[str, Tensor]()
    for name, values in pixels.items():
        values = values[:, :num_tokens] if name.endswith("token_type_ids") else values
        found[name] = values.to(device, dtype if values.is_floating_point() else values.dtype)
    return found


@dataclass(frozen=True)
class ImageRenderer:
    """Renders chats with images by a processor. `template`: arguments of its chat template; `ids`: as `image_ids` gives
    them; `why_not`: why such chats cannot be read, None where they can."""

    processor: Any = None
    template: Mapping[str, Any] = field(default_factory=dict)
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    why_not: str | None = ONLY_TEXT

    def opened(self, chat: Chat) -> Chat:
        """Returns a chat with its images opened and all words in parts, as they are served: templates of processors may
        read nothing else. Raises Skipped for an image that cannot be read."""
        messages = list[dict[str, Any]]()
        for message in map(in_form_of_parts, chat.messages):
            content = message.get("content")
            messages.append(message | {"content": [_opened(part) for part in content]} if content else message)
        return Chat(messages, chat.tools)

    def inputs(self, chat: Chat, num_messages: int | None = None, **options: Any) -> tuple[Tensor, Pixels | None]:
        """Returns the ids (T,) of the first messages of an opened chat, by default of all, and their pixels, None where
        there is no image among them."""
        begun = Chat([{**message} for message in chat.messages[:num_messages]])  # the processor changes them
        options = {"return_dict": True, "return_tensors": "pt"} | dict(self.template) | options
        with refused_by("processor"):
            found = dict(self.processor.apply_chat_template(begun.messages, tools=chat.tools, tokenize=True, **options))
            ids = found.pop("input_ids")[0]
        found.pop("attention_mask", None)  # it hides nothing
        return ids, found if begun.images else None


def images_of(target: Any, processor: Any, template: Mapping[str, Any], why_not: str | None = None) -> ImageRenderer:
    """Returns what renders chats with images for a target, as it is loaded. `why_not`: why the caller reads none."""
    if "image" not in getattr(target, "input_modalities", ()):
        why_not = f"expected text, which is all that {type(target).__name__} reads."
    elif why_not is None and not hasattr(processor, "image_processor"):
        why_not = f"expected text: there is no processor beside {type(target).__name__} that reads images."
    return ImageRenderer(processor, template, image_ids(target.config), why_not)


def _opened(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return part
    try:
        return part | {"image": part["image"].open()}
    except (OSError, ValueError) as error:
        raise Skipped("an image that cannot be read", f"an image {error}") from None


def files_digest(records: Records, tell: Callable[[str], None]) -> str | None:
    """Returns a digest of the files that chats name as their images, None where they name none: the data itself has no
    more than their names. `tell` is told that all records are looked through."""
    tell(f"looking through {len(records):,} records for images")
    sha, found = hashlib.sha256(), False
    for number in range(len(records)):
        parsed: Any = None
        with suppress(Skipped):
            parsed = parse_record(records[number], no_images=None)
        for part in parsed.images if isinstance(parsed, Chat) else []:
            path = part["image"].path
            if path is not None:
                found = True
                sha.update(b"/")
                with suppress(OSError, ValueError):  # its chat is skipped later
                    sha.update(hashlib.sha256(bytes_of(path)).digest())
    return sha.hexdigest() if found else None
