"""The decode step of `one_token`, compiled by torch's Inductor into few kernels without Python between them.

One token of a small model is a hundred small operations, and calling each costs as much as doing it. What is compiled
is the same code, so there is no second arithmetic; results differ in the last digits, as the kernels sum in another
order. Needs a C++ compiler, and some seconds for each of up to three shapes; torch keeps what it made on disk
(`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmtrain.model.cache import KVCache
from llmtrain.model.one_token import OneToken, Place
from llmtrain.model.transformer import Transformer


class CompiledOneToken(OneToken):
    """A step compiled for one cache, when it is made, for every number of rows.

    Args:
        model: As for `OneToken`.
        cache: The cache that it will be called with; nothing may stand in it yet.

    Raises:
        ValueError: There is no C++ compiler, or torch cannot compile here.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        super().__init__(model)
        # Every engine of a process counts as a variant of one function, of which torch allows eight.
        torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
        self._compiled = torch.compile(super()._read, fullgraph=True, options={"cpp_wrapper": True})
        try:
            # One row, few and many are calculated in different ways (`one_token`).
            for rows in sorted({1, min(2, cache.batch_size), cache.batch_size}):
                cache.lengths = [
                    min(1, cache.capacity - 1)
                ] * cache.batch_size  # two keys: a size of 1 stands for 1 only
                self(torch.zeros(rows, dtype=torch.int64), cache, rows)
                cache.lengths = [0] * cache.batch_size
        except torch._inductor.exc.InductorError as error:
            raise ValueError(
                "torch cannot compile the decode step on this machine (it needs a C++ compiler, such as g++): install "
                f"one, or leave compile=true out. It says: {str(error).strip().splitlines()[0]}"
            ) from error

    def _place(self, cache: KVCache, lengths: Sequence[int]) -> Place:
        return self._place_of_each(cache, lengths, len(lengths))

    def _read(self, token_ids: Tensor, place: Place, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        tokens = token_ids.clone()  # the marks below stay on a tensor
        torch._dynamo.mark_dynamic(place.mask, 2)
        if len(tokens) > 1:
            for each in (tokens, *place):
                # "Maybe": where a way of calculating is for one number of rows only, such as 16 of a cache with 16,
                # torch finds that out, and would call it an error.
                torch._dynamo.maybe_mark_dynamic(each, 0)
        return self._compiled(tokens, place, keys, values)
