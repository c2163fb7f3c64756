"""Several processes that measure one model: who takes which items, and how all come to hear every result.

Items are dealt out in turn; each process has the whole model. Knows ranks and torch's process group, which whoever made
the team has set up; not who started the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Each = TypeVar("Each")


@dataclass(frozen=True)
class Team:
    """This process among those that measure together.

    Attributes:
        rank: Which one it is.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    def deal(self, items: Sequence[Each]) -> Sequence[Each]:
        """This process's items: every `size`-th one."""
        return items[self.rank :: self.size]

    def merge(self, results: Sequence[Each]) -> list[Each]:
        """The results of all, in the order of the items that were dealt out; on every process."""
        if self.size == 1:
            return list(results)
        import torch.distributed as dist

        parts: list[Sequence[Each]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts, list(results))
        total = sum(map(len, parts))
        merged = [parts[number % self.size][number // self.size] for number in range(total)]
        return merged


ALONE = Team()
