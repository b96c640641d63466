"""The context of a target: how many tokens it reads, and text that is too long for it."""

from transformers import PreTrainedModel

# No text that a target can read whole has more characters for each token, and some tokens more. A longer one is refused
# before it is made into tokens, which takes seconds and gigabytes.
CHARACTERS_A_TOKEN = 16
MORE_TOKENS = 4096


def context_of(target: PreTrainedModel) -> int | None:
    """Returns how many tokens a target reads, its answer included; None where its config sets no end."""
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return context if isinstance(context, int) else None


def room_for(answer: int, prompt: int, context: int | None) -> int:
    """Returns how many tokens of an `answer` a context has room for after a `prompt` of so many. Raises ValueError for
    a prompt without tokens, and for one that fills the context."""
    if not prompt:
        raise ValueError("the prompt makes no tokens; expected text.")
    room = answer if context is None else min(answer, context - prompt)
    if room <= 0:
        raise ValueError(
            f"the prompt has {prompt} tokens; expected fewer than {context}, which is all that the target reads, its"
            " answer included."
        )
    return room


def why_too_long(characters: int, context: int | None) -> str | None:
    """Returns why a text of so many characters cannot fit into a context, None where it may."""
    most = None if context is None else CHARACTERS_A_TOKEN * (context + MORE_TOKENS)
    if most is None or characters <= most:
        return None
    return f"has {characters} characters; expected at most {most}: the target's context is {context} tokens."
