"""Who started this process, which rank it is, and how the launcher and the settings agree."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmtrain
from llmtrain.training.placement import BY_HAND, NONE, SLURM, TORCHRUN, VARIABLES, Placement, read_placement, unplaced

TORCHRUN_2X2 = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
SLURM_2X2 = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_NODELIST": "gpu[03-04,07],big1",
}  # fmt: skip
# Without srun: the job's number of tasks, of which nobody has started any.
BATCH_SCRIPT = {"SLURM_JOB_ID": "123", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train.sh"}
MEETING = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "launcher", "starts_all", "first"),
    [
        ({}, NONE, False, True),
        (TORCHRUN_2X2, TORCHRUN, True, False),
        (SLURM_2X2, SLURM, True, False),
        (SLURM_2X2 | TORCHRUN_2X2, TORCHRUN, True, False),
        (BATCH_SCRIPT | {"SLURM_NTASKS": "1"}, NONE, False, True),
        (BATCH_SCRIPT, NONE, False, True),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "batch"}, NONE, False, True),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291"}, NONE, False, True),  # the number that stands for the script
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, NONE, False, True),  # and for the shell of salloc
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "3"}, SLURM, True, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}, SLURM, True, True),
        (SLURM_2X2 | {"SLURM_JOB_NAME": "interactive"}, SLURM, True, False),  # srun in a shell of salloc
        (SLURM_2X2 | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NAME": "bash"}, NONE, False, True),  # srun --pty bash
        ({"RANK": "0", "WORLD_SIZE": "2"}, BY_HAND, True, True),
        ({"LOCAL_RANK": "1"}, BY_HAND, True, False),
        ({"NODE_RANK": "0"}, BY_HAND, False, True),
        ({"NODE_RANK": "1"}, BY_HAND, False, False),
    ],
)
def test_the_launcher_is_known_by_its_variables(environment, launcher, starts_all, first):
    place = read_placement(environment)
    assert (place.launcher, place.starts_all, place.is_first) == (launcher, starts_all, first)


def test_a_slurm_job_says_where_its_processes_meet():
    place = read_placement(SLURM_2X2)
    assert place.main_address == "gpu03"
    assert place.main_port == read_placement(SLURM_2X2 | {"SLURM_PROCID": "0"}).main_port
    assert place.main_port != read_placement(SLURM_2X2 | {"SLURM_STEP_ID": "1"}).main_port
    assert 15000 <= place.main_port < 30000
    assert read_placement(SLURM_2X2 | MEETING).main_address == "a"
    assert read_placement(SLURM_2X2 | {"SLURM_NODELIST": "one"}).main_address == "one"


@pytest.mark.parametrize(
    ("environment", "devices", "num_nodes", "agreed"),
    [
        ({}, 3, "auto", (3, 1)),
        (TORCHRUN_2X2, 0, "auto", (2, 2)),
        (TORCHRUN_2X2, 2, 2, (2, 2)),
        (SLURM_2X2, 0, "auto", (2, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", **MEETING}, 0, "auto", (4, 1)),
        ({"RANK": "1", "WORLD_SIZE": "4", **MEETING}, 0, 2, (2, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", **MEETING}, 1, "auto", (1, 4)),
        ({"RANK": "1", **MEETING}, 2, "auto", (2, 1)),
        ({"NODE_RANK": "1", "WORLD_SIZE": "4", **MEETING}, 2, "auto", (2, 2)),
        ({"NODE_RANK": "1", **MEETING}, 2, 2, (2, 2)),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **MEETING}, 2, "auto", (2, 1)),  # of our own
    ],
)
def test_devices_and_machines_follow_from_launcher_and_settings(environment, devices, num_nodes, agreed):
    assert read_placement(environment).agree(devices, num_nodes) == agreed


@pytest.mark.parametrize(
    ("environment", "devices", "num_nodes", "sentence"),
    [
        (TORCHRUN_2X2, 4, "auto", "trainer.devices=4 does not fit what torchrun says: 2 processes on each machine"),
        (
            TORCHRUN_2X2,
            0,
            3,
            "trainer.num_nodes=3 does not fit what torchrun says: 2 machines; give trainer.num_nodes=2",
        ),
        (SLURM_2X2, 4, "auto", "trainer.devices=4 × trainer.num_nodes=2 are 8 processes, and Slurm says 4 in all"),
        (
            SLURM_2X2 | {"SLURM_NTASKS": "3"},
            0,
            "auto",
            "Slurm says 3 processes in all, which do not spread evenly over 2",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 0, "auto", "need to know where to meet: set MASTER_PORT"),
        ({"NODE_RANK": "1"}, 1, 2, "need to know where to meet: set MASTER_ADDR and MASTER_PORT"),
        (
            {"NODE_RANK": "1", **MEETING},
            1,
            "auto",
            "rank 1 on machine 1, counted from 0, and there are 1 processes on 1",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEETING}, 0, "auto", "that this is rank 2"),
        (
            {"RANK": "1", "LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "4", **MEETING},
            2,
            2,
            "RANK=1 does not fit the other variables, by which this is rank 2: machine 1 × 2 processes on each + proc",
        ),
        ({}, 1, 2, "trainer.num_nodes=2: nobody says which of them this machine is"),
        ({}, 1, 0, "trainer.num_nodes=0 must be at least 1, or auto"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(environment, devices, num_nodes, sentence):
    with pytest.raises(ValueError, match=r".+") as error:
        read_placement(environment).agree(devices, num_nodes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_variable_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="the environment variable RANK=one must be a number"):
        read_placement({"RANK": "one"})


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        (Placement(), (0, 0, 0)),
        (read_placement(TORCHRUN_2X2), (3, 1, 1)),
        (Placement(rank=3), (3, 1, 1)),
        (Placement(node_rank=1), (2, 0, 1)),
        (Placement(node_rank=1, local_rank=1), (3, 1, 1)),
        (Placement(SLURM, rank=1, node_rank=1, local_rank=0), (2, 0, 1)),  # dealt in turns over the machines
    ],
)
def test_rank_local_rank_and_machine_with_two_processes_on_each(place, ranks):
    assert place.ranks(2) == ranks


class Asked(dict):
    """An environment that knows what it was asked for."""

    def __init__(self, variables):
        super().__init__(variables)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)


@pytest.mark.parametrize("variables", [{}, TORCHRUN_2X2, SLURM_2X2, {"LOCAL_RANK": "1", "LLMTRAIN_RUN_DIR": "/x"}])
def test_a_process_of_another_run_gets_none_of_the_variables_that_are_read(variables):
    environment = Asked(variables | {"PATH": "/bin", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    read_placement(environment)
    assert environment.names <= set(VARIABLES)
    assert unplaced(environment) == {"PATH": "/bin"}
    assert read_placement(unplaced(environment)) == Placement()


def test_only_a_process_of_ours_is_started_by_the_first_one():
    ours = {"LOCAL_RANK": "1", "NODE_RANK": "0", "LLMTRAIN_RUN_DIR": "/x"}
    assert read_placement(ours).started_by_first
    assert not read_placement(ours | {"LOCAL_RANK": "0"}).started_by_first
    assert not read_placement(TORCHRUN_2X2 | {"LLMTRAIN_RUN_DIR": "/x"}).started_by_first
    assert not read_placement({"LOCAL_RANK": "1"}).started_by_first


def test_nobody_else_asks_who_this_is():
    """A second source knows something else sooner or later: Lightning's `rank_zero_only` knows no NODE_RANK."""
    other = ("rank_zero_only", "LOCAL_RANK", "SLURM_PROCID", "GROUP_RANK", '"RANK"', '"NODE_RANK"')
    # `Ranks` sets what its processes read, and `meeting` names a variable of Slurm's for the folder.
    for path in Path(llmtrain.__file__).parent.rglob("*.py"):
        if path.name not in ("placement.py", "ranks.py"):
            found = [name for name in other if name in path.read_text(encoding="utf-8")]
            assert not found, f"{path}: {found}"
