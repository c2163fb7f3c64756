"""DeepSpeed on one and two CPU processes against plain PyTorch, on a PATH without compiler or ninja.

Two launches of `_worker.py` train all the cases; the tests look at what came back. The reference is a plain
loop over the same global batches in this process.
"""

import importlib.util
import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.bench.ranks import NO_COMPILER, Ranks

pytestmark = [pytest.mark.medium, pytest.mark.distributed]

REPOSITORY = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("_worker.py")
WARNING = "shared-memory op could not be compiled"


def case(strategy: str, optimizer: str = "adamw", precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    values = {"strategy": strategy, "optimizer": optimizer, "precision": precision, "accumulation": 1, "clip": None}
    values |= changes
    values["name"] = "-".join(str(value) for value in values.values()).replace(" ", "")
    return values


CLIP = 0.3  # the gradient's norm is about 1, so this one bites at every step
EQUAL = [
    case(f"deepspeed_{stage}", optimizer, accumulation=accumulation, clip=clip)
    for optimizer in ("adamw", "muon")
    for stage in (1, 2, 3)
    for accumulation, clip in ((2, None), (1, CLIP))
    if (stage, optimizer) != (3, "muon")
]
RESUMED = [
    case(f"deepspeed_{stage}", optimizer, precision, resume=3, clip=CLIP)
    for stage, optimizer, precision in (
        (1, "muon", "fp32"),
        (1, "muon", "bf16"),
        (2, "adamw", "bf16"),
        (3, "adamw", "fp32"),
    )
]
HALF = [
    case(f"deepspeed_{stage}", optimizer, "bf16", clip=CLIP)
    for stage in (1, 2, 3)
    for optimizer in ("adamw", "muon")
    if (stage, optimizer) != (3, "muon")
]
FROZEN = [case(f"deepspeed_{stage}", precision="bf16", frozen=True, resume=2) for stage in (1, 3)]
OFFLOAD = [
    case("deepspeed_3", options={"offload_optimizer": True, "offload_parameters": True}, clip=CLIP),
]
BF16_SUMS = [case("deepspeed_2", precision="bf16", options={"grad_accum_dtype": "bf16"})]
CLIPPED = [case(name, "sgd", clip=0.01) for name in ("single", "deepspeed_1", "deepspeed_2", "deepspeed_3")]
ACCUMULATED = [case(f"deepspeed_{stage}", "sgd", accumulation=4) for stage in (1, 2, 3)]
SINGLE = [
    case("single", optimizer, precision, clip=CLIP) for optimizer in ("adamw", "muon") for precision in ("fp32", "bf16")
]
SHARDED = [*EQUAL, *RESUMED, *HALF, *FROZEN, *OFFLOAD, *BF16_SUMS]
ON_TWO = [*SHARDED, *CLIPPED[2:3]]
ON_ONE = [*SHARDED, *CLIPPED, *ACCUMULATED, *SINGLE]


def load_worker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(folder: Path, cases: list[dict[str, Any]], processes: int, *, accelerator: str = "cpu", **more: str) -> Ranks:
    """Starts the worker's processes, by default on a PATH without a compiler or ninja."""
    (folder / "cases.json").write_text(json.dumps(cases))
    arguments = [folder / "cases.json", folder / "results.pt", processes, accelerator]
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return Ranks(command, processes, folder, variables=NO_COMPILER | {"OMP_NUM_THREADS": "1"} | more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results by number of processes: by case, and what the processes printed."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    with start(one, ON_ONE, 1) as alone, start(two, ON_TWO, 2) as pair:
        return {1: collect(one, alone), 2: collect(two, pair)}


def collect(folder: Path, ranks: Ranks) -> dict[str, Any]:
    ranks.wait(280)
    results = torch.load(folder / "results.pt", weights_only=True)
    return results | {"stdout": ranks.written("out"), "stderr": ranks.written("err"), "folder": folder}


@cache
def reference(optimizer_name: str, clip: float | None, frozen: bool = False) -> dict[str, Any]:
    """Five steps of plain PyTorch in fp32 on the same global batches."""
    worker = load_worker()
    model = worker.tiny(frozen)
    optimizer = worker.make_optimizer(model, optimizer_name)
    losses, norms, first = [], [], None
    for step in range(worker.STEPS):
        loss = worker.mean_loss(model, worker.global_batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
        first = first or {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {
        "first": first,
        "losses": losses,
        "norms": norms,
        "state": {k: v.detach() for k, v in model.state_dict().items()},
    }


def first_weights() -> dict[str, torch.Tensor]:
    return load_worker().tiny().state_dict()


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest ‖Δ‖/‖w‖ over all tensors."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-3)) for name in b)


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(each, id=each["name"]) for each in cases]


BOTH = pytest.mark.parametrize("processes", [1, 2])


@BOTH
@pytest.mark.parametrize("each", named(EQUAL))
def test_five_steps_equal_plain_pytorch(runs: dict, processes: int, each: dict[str, Any]) -> None:
    got, expected = runs[processes][each["name"]], reference(each["optimizer"], each["clip"])
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert distance(got["state"], expected["state"]) < 1e-5


@BOTH
@pytest.mark.parametrize("each", named(HALF))
def test_bf16_follows_fp32(runs: dict, processes: int, each: dict[str, Any]) -> None:
    """bf16 keeps 8 bits: activations differ by about 0.4 %, so losses agree to 1e-3 and norms to 2 %."""
    got, expected = runs[processes][each["name"]], reference(each["optimizer"], each["clip"])
    assert got["dtypes"] == ["torch.bfloat16"]
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert got["norms"] == pytest.approx(expected["norms"], rel=2e-2)


@BOTH
@pytest.mark.parametrize("each", named(BF16_SUMS))
def test_gradients_may_be_summed_in_bf16(runs: dict, processes: int, each: dict[str, Any]) -> None:
    got, expected = runs[processes][each["name"]], reference(each["optimizer"], None)
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-3)


@BOTH
@pytest.mark.parametrize("each", named(HALF))
def test_the_state_dict_is_the_fp32_master(runs: dict, processes: int, each: dict[str, Any]) -> None:
    """Weights of size 0.02 rounded to bf16 would show no bits below the 8th."""
    for name, value in runs[processes][each["name"]]["state"].items():
        assert value.dtype == torch.float32
        if not name.endswith("norm.weight"):
            assert not torch.equal(value, value.bfloat16().float()), name


@BOTH
@pytest.mark.parametrize("each", named(EQUAL[:1] + HALF))
def test_tied_weights_come_out_tied(runs: dict, processes: int, each: dict[str, Any]) -> None:
    state = runs[processes][each["name"]]["state"]
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    load_worker().tiny().load_state_dict(state)


@BOTH
@pytest.mark.parametrize("each", named(RESUMED))
def test_a_resumed_run_is_the_straight_run(runs: dict, processes: int, each: dict[str, Any]) -> None:
    straight = case(each["strategy"], each["optimizer"], each["precision"], clip=CLIP)["name"]
    got, expected = runs[processes][each["name"]], runs[processes][straight]
    assert got["losses"] == expected["losses"]
    for name, value in expected["state"].items():
        assert torch.equal(got["state"][name], value), name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a training state."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@BOTH
@pytest.mark.parametrize("each", named([*RESUMED, *FROZEN]))
def test_a_training_state_is_whole_and_survives_loading(runs: dict, processes: int, each: dict[str, Any]) -> None:
    """Full shapes in files that each process wrote a part of; loaded and saved again, every bit is there."""
    folder = runs[processes]["folder"] / each["name"]
    assert len(list(folder.glob("*.safetensors"))) == processes
    saved, again = stored(folder), stored(folder.with_name(f"{folder.name}-again"))
    assert saved.keys() == again.keys()
    for name, value in saved.items():
        assert torch.equal(value.view(torch.int32), again[name].view(torch.int32)), name
    parameters = dict(load_worker().tiny(each.get("frozen", False)).named_parameters())
    masters = {name.removesuffix("/master"): value for name, value in saved.items() if name.endswith("/master")}
    trained = {name: tuple(p.shape) for name, p in parameters.items() if p.requires_grad}
    assert {name: tuple(value.shape) for name, value in masters.items()} == trained
    assert {json.dumps(each["scalars"]) for each in index(folder).values()} <= {
        json.dumps({"step": float(each["resume"])}),
        "{}",
    }


def index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())["parameters"]


@BOTH
@pytest.mark.parametrize("each", named(FROZEN))
def test_frozen_parameters_stay_and_come_out(runs: dict, processes: int, each: dict[str, Any]) -> None:
    got, start = runs[processes][each["name"]]["state"], first_weights()
    saved = stored(runs[processes]["folder"] / each["name"])
    assert not any("layers.0." in name for name in saved)
    for name, value in start.items():
        if "layers.0." in name:
            torch.testing.assert_close(got[name], value, rtol=1e-2, atol=0)  # kept in bf16
        else:
            assert not torch.equal(got[name], value), name


@BOTH
@pytest.mark.parametrize("each", named(OFFLOAD))
def test_offloading_changes_nothing(runs: dict, processes: int, each: dict[str, Any]) -> None:
    got, expected = runs[processes][each["name"]], reference(each["optimizer"], each["clip"])
    assert distance(got["state"], expected["state"]) < 1e-5


@pytest.mark.parametrize("each", named(ACCUMULATED))
def test_the_gradient_is_scaled_once(runs: dict, each: dict[str, Any]) -> None:
    """Lightning's own strategy gives 0.250 here."""
    ratios = [a / b for a, b in zip(runs[1][each["name"]]["norms"], reference("sgd", None)["norms"], strict=True)]
    assert ratios == pytest.approx([1.0] * 5, abs=1e-5)


@pytest.mark.parametrize(
    ("processes", "each"), [*((1, each) for each in CLIPPED), (2, CLIPPED[2])], ids=lambda value: str(value)[:40]
)
def test_clipping_moves_the_parameters_by_the_clip(runs: dict, processes: int, each: dict[str, Any]) -> None:
    """SGD with lr 1 and clip 0.01 moves all parameters together by 0.01."""
    got = runs[processes][each["name"]]
    assert min(got["norms"]) > 0.3  # the norm that is reported is the one before clipping
    assert distance(got["state"], reference("sgd", 0.01)["state"]) < 1e-6
    step, start = reference("sgd", 0.01)["first"], first_weights()
    moved = torch.cat([(step[name] - start[name]).flatten() for name in start if name != "lm_head.weight"]).norm()
    assert float(moved) == pytest.approx(0.01, abs=1e-6)


@pytest.mark.parametrize("each", named(SINGLE))
def test_single_trains_in_both_precisions(runs: dict, each: dict[str, Any]) -> None:
    got, expected = runs[1][each["name"]], reference(each["optimizer"], each["clip"])
    loss, norm, weights = (1e-6, 1e-5, 1e-5) if each["precision"] == "fp32" else (1e-3, 2e-2, 0.5)
    assert got["dtypes"] == ["torch.float32"]
    assert got["losses"] == pytest.approx(expected["losses"], rel=loss)
    assert got["norms"] == pytest.approx(expected["norms"], rel=norm)
    assert distance(got["state"], expected["state"]) < weights


def test_without_compiler_two_processes_say_so_once(runs: dict) -> None:
    assert runs[2]["stderr"].count(WARNING) == 1


def test_one_process_never_wants_the_compiler(runs: dict) -> None:
    assert WARNING not in runs[1]["stderr"]


@BOTH
def test_nothing_is_printed_to_stdout(runs: dict, processes: int) -> None:
    assert runs[processes]["stdout"] == ""


@BOTH
def test_processes_end_cleanly(runs: dict, processes: int) -> None:
    assert "terminate called" not in runs[processes]["stderr"]


@BOTH
def test_nothing_is_pickled(runs: dict, processes: int) -> None:
    """A pickle can run any code when it is opened."""
    folders = [runs[processes]["folder"] / each["name"] for each in RESUMED]
    assert {path.suffix for folder in folders for path in folder.iterdir()} == {".json", ".safetensors"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_with_a_compiler_the_shared_memory_op_is_built(tmp_path: Path) -> None:
    with start(tmp_path, EQUAL[:1], 2, PATH=os.environ["PATH"], CXX="c++") as ranks:
        got = collect(tmp_path, ranks)
    assert WARNING not in got["stderr"]
    assert got["stdout"] == ""
    assert distance(got[EQUAL[0]["name"]]["state"], reference("adamw", None)["state"]) < 1e-5


@pytest.mark.gpu
def test_on_a_gpu_every_stage_follows_the_cpu(tmp_path: Path) -> None:
    """Sums are taken in another order there, and Newton–Schulz enlarges the difference: 1e-3 of the weights."""
    cases = [*EQUAL, *RESUMED, *HALF, *OFFLOAD, *SINGLE]
    with start(tmp_path, cases, 1, accelerator="cuda", PATH=os.environ["PATH"]) as ranks:
        got = collect(tmp_path, ranks)
    for each in cases:
        expected = reference(each["optimizer"], each["clip"])
        loss, weights = (1e-5, 1e-3) if each["precision"] == "fp32" else (2e-3, 0.5)
        assert got[each["name"]]["losses"] == pytest.approx(expected["losses"], rel=loss), each["name"]
        assert distance(got[each["name"]]["state"], expected["state"]) < weights, each["name"]
