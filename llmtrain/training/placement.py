"""Where this process stands among the processes of its run, as the variables of its launcher say.

The one place that asks: whoever wants to know whether this is rank 0 asks `here()`. Knows the variables of torchrun and
Slurm, and those that are set by hand; nothing of torch, Lightning or folders.

| Launcher | Sign | It starts |
|---|---|---|
| torchrun | `TORCHELASTIC_RUN_ID` | every process |
| Slurm (`srun`) | `SLURM_STEP_ID` | every process |
| by hand | `RANK` or `LOCAL_RANK` | every process |
| by hand | `NODE_RANK` alone | one process on each machine, which starts the others there |
| none | | one process, which starts the others |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

TORCHRUN, SLURM, BY_HAND, NONE = "torchrun", "Slurm", "the environment", "nobody"

RUN_DIR_VARIABLE = "LLMTRAIN_RUN_DIR"
"""Set by the first process of a machine to the run folder; the processes that it starts there inherit it."""

VARIABLES = (
    RUN_DIR_VARIABLE,
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_NODELIST"),
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME"),
)
"""All that says where a process stands; see `unplaced`."""

_LAST_STEP = 0xFFFFFFF0  # of Slurm's that srun starts; what is above stands for batch scripts, shells of salloc, …


@dataclass(frozen=True)
class Placement:
    """One process among those of its run; what its launcher does not say is None.

    Attributes:
        launcher: `TORCHRUN`, `SLURM`, `BY_HAND` or `NONE`, as a message names it.
        starts_all: Whether the launcher started every process; else this one starts the others of its machine.
        rank: This process's number among all.
        local_rank: Its number on its machine.
        node_rank: Its machine's number.
        world_size: Processes in all.
        local_size: Processes on each machine.
        num_nodes: Machines.
        main_address: Address of the machine with rank 0.
        main_port: A port there at which the processes meet.
        started_by_first: Whether the first process of this machine, one of ours, started this one.
    """

    launcher: str = NONE
    starts_all: bool = False
    rank: int | None = None
    local_rank: int | None = None
    node_rank: int | None = None
    world_size: int | None = None
    local_size: int | None = None
    num_nodes: int | None = None
    main_address: str | None = None
    main_port: int | None = None
    started_by_first: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reports and writes."""
        return not (self.rank or self.local_rank or self.node_rank)

    def agree(self, devices: int, num_nodes: int | str) -> tuple[int, int]:
        """How many processes on each machine, and machines, there are: by the launcher and the settings together.

        Args:
            devices: `trainer.devices`; 0 for `auto`, which takes what the launcher says.
            num_nodes: `trainer.num_nodes`, a number or `auto`.

        Raises:
            ValueError: The launcher started something else than the settings ask for, or says too little.
        """
        if num_nodes != "auto" and int(num_nodes) < 1:
            raise ValueError(f"trainer.num_nodes={num_nodes} must be at least 1, or auto.")
        asked_nodes = 0 if num_nodes == "auto" else int(num_nodes)
        here = self._complete(devices, asked_nodes)
        self._check("trainer.devices", devices, here.local_size, "processes on each machine")
        self._check("trainer.num_nodes", asked_nodes, here.num_nodes, "machines")
        size, nodes = here.local_size or devices or 1, here.num_nodes or asked_nodes or 1
        if self.world_size is not None and size * nodes != self.world_size:
            raise ValueError(
                f"trainer.devices={size} × trainer.num_nodes={nodes} are {size * nodes} processes, and {self.launcher} "
                f"says {self.world_size} in all; make them agree."
            )
        self._check_meeting(size, nodes)
        return size, nodes

    def ranks(self, local_size: int) -> tuple[int, int, int]:
        """(rank, local rank, machine), once it is known how many processes each machine has.

        Ranks count machine by machine, as Lightning has it; Slurm may have dealt its own numbers another way.
        """
        node, local = divmod(self.rank or 0, local_size)
        node = node if self.node_rank is None else self.node_rank
        local = local if self.local_rank is None else self.local_rank
        return node * local_size + local, local, node

    def _complete(self, devices: int, num_nodes: int) -> Placement:
        """Processes in all, processes on each machine, machines: two give the third; 0 is unknown."""
        world = self.world_size
        if world is None:
            return self
        size, nodes = self.local_size or devices, self.num_nodes or num_nodes
        if size and not nodes:
            nodes = max(1, world // size)
        elif not size:
            nodes = nodes or 1
            size = max(1, world // nodes)
            if size * nodes != world:
                raise ValueError(
                    f"{self.launcher} says {world} processes in all, which do not spread evenly over {nodes} machines; "
                    "start as many on each."
                )
        return replace(self, local_size=self.local_size or size, num_nodes=self.num_nodes or nodes)

    def _check(self, name: str, asked: int, said: int | None, unit: str) -> None:
        if asked and said is not None and asked != said:
            raise ValueError(
                f"{name}={asked} does not fit what {self.launcher} says: {said} {unit}; give {name}={said} or auto, or "
                "start as many as the settings ask for."
            )

    def _check_meeting(self, size: int, nodes: int) -> None:
        """The processes of several machines, or started one by one, cannot guess where to meet."""
        if nodes > 1 and self.launcher == NONE:
            raise ValueError(
                f"trainer.num_nodes={nodes}: nobody says which of them this machine is; use torchrun or srun, or set "
                "MASTER_ADDR, MASTER_PORT and NODE_RANK (docs/distributed.md)."
            )
        rank, _, node = self.ranks(size)
        if node >= nodes or rank >= size * nodes:
            raise ValueError(
                f"{self.launcher} says that this is rank {rank} on machine {node}, counted from 0, and there are "
                f"{size * nodes} processes on {nodes} machines; set trainer.num_nodes and trainer.devices."
            )
        if self.launcher == BY_HAND and self.rank not in (None, rank):
            raise ValueError(
                f"RANK={self.rank} does not fit the other variables, by which this is rank {rank}: machine {node} × "
                f"{size} processes on each + process {rank - node * size} there; number the ranks machine by machine."
            )
        if size * nodes > 1 and (self.starts_all or nodes > 1):
            missing = [] if self.main_address or nodes == 1 else ["MASTER_ADDR"]
            missing += [] if self.main_port else ["MASTER_PORT"]
            if missing:
                raise ValueError(
                    f"{size * nodes} processes need to know where to meet: set {' and '.join(missing)} to the same "
                    "value for all (the address of rank 0's machine and a free port there)."
                )


@cache
def here() -> Placement:
    """This process's placement, read once: setting up a run changes the variables."""
    return read_placement(os.environ)


def unplaced(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that is no part of this one's run, whoever started this one."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}


def read_placement(environment: Mapping[str, str]) -> Placement:
    """Reads the variables of whoever started this process; torchrun comes first, as it may run inside a Slurm job.

    Raises:
        ValueError: A variable that should be a number is none.
    """
    numbers = _Numbers(environment)
    place = Placement(
        main_address=environment.get("MASTER_ADDR") or None,
        main_port=numbers("MASTER_PORT"),
        world_size=numbers("WORLD_SIZE"),
        rank=numbers("RANK"),
        local_rank=numbers("LOCAL_RANK"),
        local_size=numbers("LOCAL_WORLD_SIZE"),
        node_rank=numbers("NODE_RANK", "GROUP_RANK"),
        num_nodes=numbers("GROUP_WORLD_SIZE"),
    )
    if "TORCHELASTIC_RUN_ID" in environment and place.rank is not None:
        return replace(place, launcher=TORCHRUN, starts_all=True, node_rank=numbers("GROUP_RANK"))
    if started_by_srun(environment):
        return Placement(
            SLURM,
            True,
            rank=numbers("SLURM_PROCID"),
            local_rank=numbers("SLURM_LOCALID"),
            node_rank=numbers("SLURM_NODEID"),
            world_size=numbers("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            num_nodes=numbers("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
            main_address=place.main_address or _first_host(environment),
            main_port=place.main_port or _slurm_port(numbers),
        )
    if place.rank is not None or place.local_rank is not None:
        ours = bool(place.local_rank) and RUN_DIR_VARIABLE in environment
        return replace(place, launcher=BY_HAND, starts_all=True, started_by_first=ours)
    if place.node_rank is not None:
        return replace(place, launcher=BY_HAND)
    return Placement()


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, as against a shell or a batch script inside a job.

    Both have a `SLURM_PROCID` and the job's `SLURM_NTASKS`, and no step of their own, or one with a number that no
    `srun` gets. A shell that `srun --pty` opened has a step, of one task; what it starts may start others.
    """
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) > _LAST_STEP:
        return False
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    return tasks != "1" or environment.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def _first_host(environment: Mapping[str, str]) -> str | None:
    """The first machine of a Slurm list such as `gpu[01-04,07],big1`."""
    names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    match = re.match(r"([^,\[\s]+)(?:\[([^\],-]+)[^\]]*\])?", names)
    return match[1] + (match[2] or "") if match else None


def _slurm_port(numbers: _Numbers) -> int:
    """A port that every process of a job step knows, below those that systems give away themselves."""
    return 15000 + ((numbers("SLURM_JOB_ID") or 0) * 8 + (numbers("SLURM_STEP_ID") or 0)) % 15000


class _Numbers:
    """Reads whole numbers from variables."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __call__(self, *names: str) -> int | None:
        """The number in the first of these variables that is set."""
        for name in names:
            text = self._environment.get(name, "")
            if text and not text.isdigit():
                raise ValueError(f"the environment variable {name}={text} must be a number; set it right or unset it.")
            if text:
                return int(text)
        return None


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What tells a process that it is one of `size` on this machine, which meet at a port."""
    placed = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in placed.items()} | {"MASTER_ADDR": "127.0.0.1"}
