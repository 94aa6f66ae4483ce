"""What transformers generates greedily, without its generating it: the comparison costs one pass, not one a token."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def chosen_greedily(model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The model's first choice after the prompt, after the prompt and one of the tokens, and so on, past end tokens.

    It is equal to token_ids if and only if these are what the model generates: as far as they are right, every choice
    was made after the model's own ones, and where they part, so do the lists.
    """
    with torch.inference_mode():
        output = model(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False, logits_to_keep=len(token_ids))
    return output.logits[0].argmax(dim=-1).tolist()
