"""Tiny targets that read images, with processors of their own, and chats about images. Tokens are letters, see
`training.letters`; an image takes four or six of `<image>`."""

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaProcessor,
    PaddleOCRVLConfig,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

END, IMAGE = 10, 11
VOCAB, WIDTH = 12, 24
# i and j begin what the user and the assistant say, k ends it; the processor's template reads no words but in parts
TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'h', 'user': 'i', 'assistant': 'j'}[m.role] }}CONTENT"
    "{{ 'k' if m.role == 'assistant' }}{% endfor %}{{ 'j' if add_generation_prompt }}"
)
OF_TEXT = TEMPLATE.replace("CONTENT", "{{ m.content }}")
OF_PARTS = TEMPLATE.replace(
    "CONTENT", "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
)
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
KINDS = ("LLaVA", "PaddleOCR-VL")  # the second with positions on three axes


def build_tokenizer() -> PreTrainedTokenizerFast:
    letters = {chr(ord("a") + i): i for i in range(END + 1)}
    backend = Tokenizer(models.WordLevel(letters | {"<image>": IMAGE}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="k", extra_special_tokens={"image_token": "<image>"}
    )
    tokenizer.chat_template = OF_TEXT
    return tokenizer


def build_processor(kind: str) -> ProcessorMixin:
    tokenizer = build_tokenizer()
    if kind == "LLaVA":
        side = {"height": 28, "width": 28}
        return LlavaProcessor(
            CLIPImageProcessor(size=side, crop_size=side),
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=OF_PARTS,
        )
    size = {"shortest_edge": 28 * 28, "longest_edge": 6 * 28 * 28}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessor(size=size), tokenizer, chat_template=OF_PARTS)


def build_target(kind: str) -> PreTrainedModel:
    common = {"tie_word_embeddings": False, "image_token_id": IMAGE}
    if kind == "LLaVA":
        vision = VISION | {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
        config = LlavaConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=vision, **common)
    else:
        config = PaddleOCRVLConfig(text_config=TEXT | {"rope_parameters": SECTIONS}, vision_config=VISION, **common)
    torch.manual_seed(5)
    target = AutoModelForImageTextToText.from_config(config).eval()
    target.generation_config.eos_token_id = END
    return target


def write_image(path, seed: int = 0) -> str:
    """Writes a picture of 84 x 56 pixels, another one for each seed."""
    pixels = torch.randint(256, (56, 84, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return str(path)


def asked(words: str, **image) -> dict:
    """A message of the user: an image, with what says which, and words."""
    return {"role": "user", "content": [{"type": "image", **image}, {"type": "text", "text": words}]}


def said(words: str) -> dict:
    return {"role": "assistant", "content": words}
