"""The training state of a run as files: fp32 weights and optimiser tensors by parameter, however they were sharded.

    resume/state.json                       which parameter lies in which file, with its shape and its step count
    resume/state-00001-of-00002.safetensors <parameter>/master, <parameter>/exp_avg, … whole, in fp32

Nothing in the files depends on the strategy, the number of processes, the accumulation or the precision that wrote
them, so any run may read what any other wrote. A strategy says where on its ranks the pieces of each parameter lie
(`Shard`), and how the weights that are computed with follow from the fp32 ones; this module does the rest. It knows
neither Lightning nor DeepSpeed, nor which checkpoint folder it is in.

Frozen parameters are no part of a training state.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from llmtrain.training.tensorfile import TensorReader, TensorWriter

log = logging.getLogger(__name__)

INDEX = "state.json"
MASTER = "master"
VERSION = 1


@dataclass(frozen=True)
class Fragment:
    """A stretch of one parameter on this rank.

    Attributes:
        name: of the parameter in the plain model.
        holder: the fp32 tensor that the optimiser updates: a flat partition of many, or the parameter itself.
        offset: of the stretch in the holder laid out flat, in elements.
        start: of the stretch in the parameter laid out flat.
        count: elements.
    """

    name: str
    holder: Tensor
    offset: int
    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch in a tensor that is laid out as the holder, as a flat view."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.count)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a training state.

    Attributes:
        shapes: shape of every trained parameter by name, the same on every rank.
        fragments: what of them lies here, at most one stretch of each.
        optimizer_state: the optimiser's state by holder, as `torch.optim.Optimizer.state`.
        device: where collectives take their tensors.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fragments: Sequence[Fragment]
    optimizer_state: MutableMapping[Any, Any]
    device: torch.device


@dataclass(frozen=True)
class _Entry:
    """How one parameter is stored, agreed between the ranks."""

    shape: tuple[int, ...]
    owner: int  # the rank that writes it
    whole: bool  # whether the owner has all of it
    tensors: tuple[str, ...]
    scalars: Mapping[str, float]


Plan = Mapping[str, _Entry]


def plan(shard: Shard) -> Plan:
    """Deals the parameters over the ranks: to whom most of it lies with already, else to who has least. A collective.

    Under ZeRO 1 and 2 nearly every parameter lies on one rank, so hardly anything is sent; under ZeRO 3 each rank has
    an equal share of each, and they are dealt by size.
    """
    mine = {fragment.name: (fragment.count, *_optimizer_entries(shard, fragment)) for fragment in shard.fragments}
    tables = _from_all_ranks(mine)
    loads = [0] * len(tables)
    entries: dict[str, _Entry] = {}
    for name in sorted(shard.shapes, key=lambda name: -math.prod(shard.shapes[name])):
        shape = tuple(shard.shapes[name])
        held = [table[name][0] if name in table else 0 for table in tables]
        assert sum(held) == math.prod(shape), f"the ranks hold {held} of the {math.prod(shape)} elements of {name}"
        owner = max(range(len(tables)), key=lambda rank: (held[rank], -loads[rank]))
        _, tensors, scalars = tables[owner][name]
        loads[owner] += sum(held) * len(tensors)
        entries[name] = _Entry(shape, owner, held[owner] == sum(held), tensors, scalars)
    return {name: entries[name] for name in shard.shapes}


def stored_bytes(plan: Plan) -> int:
    """Size of the files of a plan, but for headers and the index."""
    return sum(4 * math.prod(entry.shape) * len(entry.tensors) for entry in plan.values())


def weight_bytes(plan: Plan) -> int:
    """Size of the trained parameters alone, in fp32."""
    return sum(4 * math.prod(entry.shape) for entry in plan.values())


def save(shard: Shard, plan: Plan, folder: Path) -> None:
    """Writes the training state, each rank its own file, a tensor at a time. A collective.

    Raises:
        OSError: on this rank; all collectives have taken place by then.
    """
    rank, ranks = _place()
    fragments = {fragment.name: fragment for fragment in shard.fragments}
    own = {f"{name}/{key}": entry.shape for name, entry in plan.items() if entry.owner == rank for key in entry.tensors}
    writing = _Writing(folder / _file(rank, ranks), own)
    for name, entry in plan.items():
        for key in entry.tensors:
            values = _gather(shard, fragments.get(name), entry, key, rank)
            if values is not None:
                writing.add(f"{name}/{key}", values)
    writing.finish()
    if rank == 0:
        _write_index(folder, plan, ranks)


def load(shard: Shard, folder: Path) -> None:
    """Reads this rank's stretches into the fp32 weights, and makes the optimiser's state of a fresh run.

    Raises:
        ValueError: the files are damaged, or of another model.
    """
    saved = _read_index(folder, shard.shapes)
    reader = TensorReader(folder)
    scalars: dict[Tensor, dict[str, set[float]]] = {}
    for fragment in shard.fragments:
        name, holder, parameter = fragment.name, fragment.holder, saved[fragment.name]
        for key in parameter["tensors"]:
            values = reader.read(parameter["file"], f"{name}/{key}", start=fragment.start, count=fragment.count)
            fragment.of(holder if key == MASTER else _state_tensor(shard, holder, key)).copy_(values)
        for key, value in parameter["scalars"].items():
            scalars.setdefault(holder, {}).setdefault(key, set()).add(value)
    for holder, found in scalars.items():
        for key, numbers in found.items():
            if len(numbers) > 1:  # without sharding a parameter that met no gradient is updated less often
                sentence = "The optimiser's %s differs between parameters that now share it: %s."
                log.warning(sentence, key, numbers, extra={"of_this_rank": True})
            shard.optimizer_state.setdefault(holder, {})[key] = torch.tensor(max(numbers), device=holder.device)


def _state_tensor(shard: Shard, holder: Tensor, key: str) -> Tensor:
    """A tensor of the optimiser's state, which is made before the first step: noughts where nothing is read."""
    state = shard.optimizer_state.setdefault(holder, {})
    if key not in state:
        state[key] = torch.zeros_like(holder.detach())
    return state[key]


class _Writing:
    """This rank's file. A failure is kept until `finish`: the other ranks wait in collectives that must be joined."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._error: OSError | None = None
        self._writer: TensorWriter | None = None
        with self._kept():
            path.parent.mkdir(parents=True, exist_ok=True)
            if shapes:
                self._writer = TensorWriter(path, shapes)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = error

    def add(self, name: str, values: Tensor) -> None:
        if self._error is None and self._writer is not None:
            with self._kept():
                self._writer.write(name, values)

    def finish(self) -> None:
        if self._writer is not None:
            with self._kept():
                self._writer.close(whole=self._error is None)
        if self._error is not None:
            raise self._error


def _gather(shard: Shard, fragment: Fragment | None, entry: _Entry, key: str, rank: int) -> Tensor | None:
    """One whole tensor on its owner; `None` on the other ranks. A collective unless the owner has all of it."""
    part = None
    if fragment is not None:
        source = fragment.holder if key == MASTER else shard.optimizer_state[fragment.holder][key]
        part = fragment.of(source)
    if entry.whole:
        return part if rank == entry.owner else None
    # Summed as whole numbers, where all but one rank have nought: every bit survives, that of -0.0 too.
    whole = torch.zeros(math.prod(entry.shape), dtype=torch.int32, device=shard.device)
    if fragment is not None and part is not None:
        whole.narrow(0, fragment.start, fragment.count).copy_(part.view(torch.int32))
    dist.reduce(whole, dst=entry.owner)
    return whole.view(torch.float32) if rank == entry.owner else None


def _optimizer_entries(shard: Shard, fragment: Fragment) -> tuple[tuple[str, ...], dict[str, float]]:
    """What the optimiser keeps for a parameter: names of tensors of its size, the weights first, and single numbers."""
    tensors, scalars = [MASTER], {}
    for key, value in shard.optimizer_state.get(fragment.holder, {}).items():
        if isinstance(value, Tensor) and value.shape == fragment.holder.shape:
            tensors.append(key)
        elif value is not None:
            scalars[key] = float(value)
    return tuple(tensors), scalars


def _write_index(folder: Path, plan: Plan, ranks: int) -> None:
    parameters = {
        name: {
            "shape": list(entry.shape),
            "file": _file(entry.owner, ranks),
            "tensors": list(entry.tensors),
            "scalars": dict(entry.scalars),
        }
        for name, entry in plan.items()
    }
    text = json.dumps({"version": VERSION, "parameters": parameters}, indent=1)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _read_index(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The parameters by name.

    Raises:
        ValueError: there is no index, or it lists other parameters than the run trains.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version, parameters = index["version"], index["parameters"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read ({error}); resume from another checkpoint.") from error
    if version != VERSION:
        raise ValueError(f"{path} is of version {version} of the training state and this program reads {VERSION}.")
    for name in sorted({*shapes, *parameters}):
        there = tuple(parameters[name]["shape"]) if name in parameters else None
        wanted = tuple(shapes[name]) if name in shapes else None
        if there != wanted:
            raise ValueError(
                f"{folder} belongs to another model: {name} is {_described(there)} there and {_described(wanted)} here."
            )
    return parameters


def _described(shape: tuple[int, ...] | None) -> str:
    return "not trained" if shape is None else f"of shape {list(shape)}"


def _file(rank: int, ranks: int) -> str:
    return f"state-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _from_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, by rank. A collective."""
    ranks = _place()[1]
    if ranks == 1:
        return [value]
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values


@contextmanager
def failing_together() -> Iterator[None]:
    """Every rank leaves the block with an error if one of them does, where the others would wait for it for ever.

    A collective; whatever fails must fail after the last collective inside.

    Raises:
        OSError, ValueError: this rank's; on rank 0 otherwise the first of another's.
        SystemExit: with code 2 on the other ranks, as rank 0 says what is wrong, once.
    """
    mine: Exception | None = None
    leaving: SystemExit | None = None
    try:
        yield
    except (OSError, ValueError) as error:
        mine = error
    except SystemExit as asked:  # by such a block inside this one
        leaving = asked
    errors = [error for error in _from_all_ranks(mine) if error is not None]
    if mine is not None or leaving is not None:
        raise mine or leaving  # type: ignore[misc]
    if errors:
        raise errors[0] if _place()[0] == 0 else SystemExit(2)
