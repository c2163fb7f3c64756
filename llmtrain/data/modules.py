"""Batches for Lightning: the pretraining and the fine-tuning data module.

To Lightning a run is one epoch: the train loader is `total_steps` · `accumulation` micro-batches long, and
epochs over the data are arithmetic of the sampler. A resumed run sets `start_step`, and the loader then
yields what is left. Which samples a step has depends on the step and the global batch alone, not on how that
batch is split over micro-batches and ranks.

A training batch is {"input_ids": (B, T), "labels": (B, T) with −100 where nothing is trained, "step_tokens":
(), the trained tokens of the whole optimiser step over all micro-batches and ranks, "sample_ids": (samples,)}, all
int64. A validation batch has the first two. Where rows hold several examples each, there is "document_ids": (B, T).
Reading is cheap enough to need no worker processes. Deliberately unknown here: models, losses, optimisers, settings
files.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import lightning
import numpy as np
import torch

from llmtrain.data.batches import Batch, pack, pack_examples, pad_examples
from llmtrain.data.examples import Example
from llmtrain.data.sampler import EpochOrder, MixtureSampler, global_indices
from llmtrain.data.windows import Int64Array, TokenStream, ValidationWindows, read_windows

_DRAWN_AT_ONCE = 1024  # samples; the order is computed for whole arrays, so many cost little more than one


class TrainLoader:
    """The micro-batches of one rank, from `start_step` to the end of the run.

    `len()` is the length of the whole run and does not shrink when a run is resumed: Lightning compares it
    with counters that go on from where the former run stopped. Iterating yields (total_steps − start_step) ·
    accumulation micro-batches.

    Args:
        batches: The micro-batches of a run of consecutive steps, numbered from 0.
        start_step: The first step to yield.
        total_steps: Steps of the whole run.
        accumulation: Micro-batches per step.
        steps_at_once: How many steps to ask for at a time.
    """

    def __init__(
        self,
        batches: Callable[[range], Iterator[Batch]],
        *,
        start_step: int,
        total_steps: int,
        accumulation: int,
        steps_at_once: int,
    ) -> None:
        if not 0 <= start_step <= total_steps:
            raise ValueError(f"start_step must be between 0 and the run's {total_steps} steps, got {start_step}")
        self._batches, self._steps_at_once = batches, steps_at_once
        self._steps = range(start_step, total_steps)
        self._length = total_steps * accumulation

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._steps), self._steps_at_once):
            yield from self._batches(self._steps[first : first + self._steps_at_once])

    def state_dict(self) -> dict[str, int]:
        """Nothing, for the position follows from the step. Lightning asks before it takes a loader for resumable."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing, see `state_dict`."""


class ValidationLoader:
    """Batches made on demand, by number.

    Args:
        length: How many; the same on every rank.
        batch: Makes the batch of a number.
    """

    def __init__(self, length: int, batch: Callable[[int], Batch]) -> None:
        self._length, self._batch = length, batch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return map(self._batch, range(self._length))


class _DataModule(lightning.LightningDataModule):
    """What both modules share: the shape of a step, the place among the ranks, the two loaders.

    Attributes:
        start_step: Steps that are already done; set it before training to resume.
    """

    def __init__(self, *, micro_batch_size: int, accumulation: int, total_steps: int) -> None:
        super().__init__()
        for name, value in (
            ("micro_batch_size", micro_batch_size),
            ("accumulation", accumulation),
            ("total_steps", total_steps),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.micro_batch_size, self.accumulation, self.total_steps = micro_batch_size, accumulation, total_steps
        self.start_step = 0

    @property
    def world_size(self) -> int:
        """Ranks that share a step; 1 without a trainer."""
        return self.trainer.world_size if self.trainer else 1

    @property
    def rank(self) -> int:
        """This process among them; 0 without a trainer."""
        return self.trainer.global_rank if self.trainer else 0

    @property
    def rows_per_step(self) -> int:
        """Samples of one optimiser step over all micro-batches and ranks."""
        return self.micro_batch_size * self.accumulation * self.world_size

    def train_dataloader(self) -> TrainLoader:
        """This rank's micro-batches, see `TrainLoader`."""
        return TrainLoader(
            self._batches,
            start_step=self.start_step,
            total_steps=self.total_steps,
            accumulation=self.accumulation,
            steps_at_once=max(1, _DRAWN_AT_ONCE // self.rows_per_step),
        )

    @abstractmethod
    def step_sample_ids(self, step: int) -> Int64Array:
        """The samples of an optimiser step (counted from 0), of all micro-batches and ranks: (rows_per_step,) int64."""

    def largest_batch(self) -> Batch | None:
        """The micro-batch that needs the most memory, without `step_tokens`; `None` if they are all alike."""
        return None

    def _step_indices(self, step: int) -> Int64Array:
        return np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step, dtype=np.int64)

    @abstractmethod
    def _batches(self, steps: range) -> Iterator[Batch]:
        """This rank's `accumulation` micro-batches of each of these steps."""


class PretrainDataModule(_DataModule):
    """Windows of token streams, mixed by weight; validation scores every token of a stream once.

    The sample id of a window is the position of its first token in all train streams laid end to end.

    Args:
        train: Streams of tokens, such as `ShardSet`, and their weights.
        val: The validation stream; without one there is no validation.
        eos_id: The end-of-text token.
        sequence_length: T.
        micro_batch_size: B, rows per micro-batch on each rank; the rows of a validation batch too.
        accumulation: Micro-batches per optimiser step.
        total_steps: Optimiser steps of the whole run.
        seed: Decides the order.

    Raises:
        ValueError: A stream is not longer than T, a weight is not usable, a size is below 1.
    """

    def __init__(
        self,
        train: Sequence[tuple[TokenStream, float]],
        val: TokenStream | None,
        *,
        eos_id: int,
        sequence_length: int,
        micro_batch_size: int,
        accumulation: int,
        total_steps: int,
        seed: int,
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, accumulation=accumulation, total_steps=total_steps)
        self._streams = [stream for stream, _ in train]
        self._val, self._eos_id, self._sequence_length = val, eos_id, sequence_length
        lengths = [stream.num_tokens for stream in self._streams]
        self._sampler = MixtureSampler(lengths, [weight for _, weight in train], sequence_length, seed=seed)
        self._first_ids = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    def step_sample_ids(self, step: int) -> Int64Array:
        """Where the windows of an optimiser step begin, in all train streams laid end to end."""
        sources, starts = self._sampler.draw(self._step_indices(step))
        return self._first_ids[sources] + starts

    def places(self, sample_ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """Which stream each of these windows is in, and where in it it begins: two (n,) int64.

        Raises:
            ValueError: An id is beyond the streams.
        """
        ids = np.asarray(sample_ids, dtype=np.int64)
        for sample_id in ids[(ids < 0) | (ids >= self._first_ids[-1])]:
            raise ValueError(f"there is no sample {sample_id}: the run has the ids 0 … {self._first_ids[-1] - 1}.")
        sources = np.searchsorted(self._first_ids, ids, side="right") - 1
        return sources, ids - self._first_ids[sources]

    def _batches(self, steps: range) -> Iterator[Batch]:
        indices = global_indices(
            steps,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            world_size=self.world_size,
            rank=self.rank,
        )
        drawn = self._sampler.draw(indices.ravel())
        micro_batches = (array.reshape(-1, self.micro_batch_size) for array in drawn)
        step_tokens = torch.tensor(self.rows_per_step * self._sequence_length)
        for sources, starts in zip(*micro_batches, strict=True):
            windows = torch.from_numpy(read_windows(self._streams, sources, starts, self._sequence_length))
            yield {
                "input_ids": windows[:, :-1].contiguous(),
                "labels": windows[:, 1:].contiguous(),
                "step_tokens": step_tokens,
                "sample_ids": torch.from_numpy(self._first_ids[sources] + starts),
            }

    def val_dataloader(self) -> ValidationLoader | list[ValidationLoader]:
        """This rank's validation batches, see `ValidationWindows`."""
        if self._val is None:
            return []
        windows = ValidationWindows(
            self._val,
            eos_id=self._eos_id,
            sequence_length=self._sequence_length,
            batch_size=self.micro_batch_size,
            world_size=self.world_size,
            rank=self.rank,
        )

        def batch(number: int) -> Batch:
            inputs, labels = windows.batch(number)
            return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}

        return ValidationLoader(len(windows), batch)


class FinetuneDataModule(_DataModule):
    """Task examples, each once per epoch, padded to the longest of their micro-batch, or packed.

    The sample id of an example is its number in `train`. Validation goes through the examples by length,
    longest first, so that little is padded; its batches without an example are one row of one ignored
    position per row.

    Args:
        train: Examples to train on.
        val: Examples to validate on; may be empty.
        pad_id: Fills the inputs of shorter examples; their labels are −100 there.
        micro_batch_size: Examples per micro-batch on each rank, and of a validation batch too.
        accumulation: Micro-batches per optimiser step.
        total_steps: Optimiser steps of the whole run.
        seed: Decides the order.
        packing_length: Lays the examples of a micro-batch end to end in rows of so many positions at most, see
            `pack_examples`; `None` gives each a row. The examples of a micro-batch are the same either way.

    Raises:
        ValueError: There is nothing to train on, or a size is below 1.
    """

    def __init__(
        self,
        train: Sequence[Example],
        val: Sequence[Example],
        *,
        pad_id: int,
        micro_batch_size: int,
        accumulation: int,
        total_steps: int,
        seed: int,
        packing_length: int | None = None,
    ) -> None:
        super().__init__(micro_batch_size=micro_batch_size, accumulation=accumulation, total_steps=total_steps)
        if not train:
            raise ValueError("there is no example to train on: data gives an empty training part")
        self._train, self._pad_id, self._packing_length = train, pad_id, packing_length
        if packing_length is not None:
            pack(
                [max(len(example.input_ids) for example in [*train, *val])], packing_length
            )  # refuses what is too long
        self._val = sorted(val, key=lambda example: len(example.input_ids), reverse=True)
        self._trained = np.array([example.trained_tokens for example in train], dtype=np.int64)
        self._order = EpochOrder(len(train), seed=seed)

    def step_sample_ids(self, step: int) -> Int64Array:
        """The numbers in `train` of the examples of an optimiser step."""
        return self._order.draw(self._step_indices(step))[1]

    def largest_batch(self) -> Batch | None:
        """The longest examples as one micro-batch: none is longer or has more rows."""
        longest = sorted(self._train, key=lambda example: len(example.input_ids), reverse=True)[: self.micro_batch_size]
        if len(longest[0].input_ids) == min(len(example.input_ids) for example in self._train):
            return None
        return self._batch(longest)

    def positions(self, steps: int) -> tuple[int, int]:
        """What this rank computes in the first steps: positions of examples, and all positions, padding among them."""
        batches = list(self._batches(range(min(steps, self.total_steps))))
        examples = [self._train[number] for batch in batches for number in batch["sample_ids"].tolist()]
        return sum(len(example.input_ids) for example in examples), sum(batch["input_ids"].numel() for batch in batches)

    def _batches(self, steps: range) -> Iterator[Batch]:
        rows = self.rows_per_step
        _, drawn = self._order.draw(np.arange(steps.start * rows, steps.stop * rows, dtype=np.int64))
        for items in drawn.reshape(len(steps), self.accumulation, self.world_size, self.micro_batch_size):
            # Not below 1: it is a divisor, and a step without any trained token has the loss 0.
            step_tokens = torch.tensor(max(1, int(self._trained[items].sum())))
            for mine in items[:, self.rank]:
                batch = self._batch([self._train[item] for item in mine])
                yield {**batch, "step_tokens": step_tokens, "sample_ids": torch.from_numpy(mine.copy())}

    def val_dataloader(self) -> ValidationLoader | list[ValidationLoader]:
        """This rank's validation batches."""
        if not self._val:
            return []
        size, world_size, rank = self.micro_batch_size, self.world_size, self.rank

        def batch(number: int) -> Batch:
            first = (number * world_size + rank) * size
            return self._batch(self._val[first : first + size])

        return ValidationLoader(-(-len(self._val) // (size * world_size)), batch)

    def _batch(self, examples: Sequence[Example]) -> Batch:
        if self._packing_length is not None:
            return pack_examples(examples, pad_id=self._pad_id, length=self._packing_length)
        return pad_examples(examples, pad_id=self._pad_id, rows=self.micro_batch_size)
