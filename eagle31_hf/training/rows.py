"""Which rows are supervised. B texts, T tokens; slot t at depth k embeds x[t+1+k] and predicts x[t+2+k]."""

from torch import Tensor

CONVENTIONS = {  # answer mask (B, T) -> (B, T - 2 - k): is slot t supervised at depth k
    # Chains that serving begins and the target goes on with: the answer holds all from the first token embedded, which the target itself
    # has chosen, to the one predicted. A chain that began in the prompt is never drafted, nor one that goes on past the end of a turn.
    "serving": lambda mask, depth: mask.unfold(1, depth + 2, 1)[:, 1:].all(-1),
    "embedded": lambda mask, depth: mask[:, 1 + depth : -1],  # the token embedded at this depth: speculators, ModelOpt, Automodel
    "unshifted": lambda mask, depth: mask[:, depth:-2],  # the token before it: SpecForge, TorchSpec
}


def supervised(mask: Tensor, depth: int, convention: str = "serving", documents: Tensor | None = None) -> Tensor:
    """Answer mask (B, T) and `documents` (B, T), numbering packed texts, -> (B, T - 2 - depth): whether a slot's row counts at this depth.

    No row predicts a token past the end of the text, or of its document.
    """
    if mask.shape[1] < depth + 2:
        return mask[:, :0].bool()
    kept = CONVENTIONS[convention](mask.bool(), depth)
    if documents is not None:
        kept = kept & (documents[:, : kept.shape[1]] == documents[:, 2 + depth :])
    return kept
