"""A model's ends, split over a group by the vocabulary: each rank has the rows of some token ids."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.blocks import Embedding, Head
from kernels.group import Group


class VocabParallelEmbedding:
    """The rows of all token ids at every rank, to the bit: each is added to nothing but zeros."""

    def __init__(self, embedding: Embedding, vocab: range, group: Group) -> None:
        """embedding: of this rank's token ids, `vocab`, counted from 0."""
        self._embedding = embedding
        self._vocab = vocab
        self._group = group

    def __call__(self, token_ids: Tensor) -> Tensor:
        is_own = (token_ids >= self._vocab.start) & (token_ids < self._vocab.stop)
        rows = self._embedding((token_ids - self._vocab.start).where(is_own, 0))
        rows = rows.masked_fill(~is_own.unsqueeze(1), 0)
        self._group.all_reduce(rows)
        return rows


class VocabParallelHead:
    """All logits at rank 0, and none elsewhere: [0, vocab_size]."""

    def __init__(self, head: Head, num_columns: Sequence[int], group: Group) -> None:
        """head: of this rank's token ids;  num_columns: how many of them each rank has, in order."""
        self._head = head
        self._num_columns = num_columns
        self._group = group

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        logits = self._group.gather(self._head(x, residual), self._num_columns)
        return x.new_empty(0, sum(self._num_columns), dtype=torch.float32) if logits is None else logits
