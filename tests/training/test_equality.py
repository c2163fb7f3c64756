"""Every strategy against plain PyTorch on the same global batches: losses, gradients, final weights, skipped steps.

One launch for each number of processes trains many cases (`_equality_worker.py`, through `fit`); the tests look at what
came back. The default run has a part of the matrix, `make test-slow` all of it. What two ranks can disagree about is
here, too: steps that are not finite, validation with fewer windows than ranks, samples that only rank 0 writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.bench import equality
from llmtrain.bench.equality import CLIP, Case, Trained
from llmtrain.bench.ranks import launch
from llmtrain.data.batches import pad_examples
from llmtrain.model import loss_sum

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("_equality_worker.py")
OFFLOAD = {"offload_optimizer": True}
OFFLOAD_BOTH = {"offload_optimizer": True, "offload_parameters": True}
STRATEGIES: list[tuple[str, dict[str, bool]]] = [
    ("single", {}),
    ("deepspeed_1", {}),
    ("deepspeed_2", {}),
    ("deepspeed_3", {}),
    ("deepspeed_2", OFFLOAD),
    ("deepspeed_3", OFFLOAD_BOTH),
]
MATRIX = [
    Case(strategy, processes, accumulation, clip, optimizer, options=options)
    for processes in (1, 2)
    for accumulation in (1, 4)
    for clip in (None, CLIP)
    for strategy, options in STRATEGIES
    for optimizer in ("adamw", "muon")
    if not (strategy == "single" and processes > 1)
    and not (optimizer == "muon" and (strategy == "deepspeed_3" or options))
]
LORA = [Case("single", lora=True)] + [
    Case(f"deepspeed_{stage}", 2, 4, CLIP, lora=True) for stage in (1, 2, 3)
]  # fmt: skip
RECOMPUTED = [Case(name, processes, 4, CLIP, gradient_checkpointing=True) for name, processes in (
    ("single", 1), ("deepspeed_1", 2), ("deepspeed_2", 1), ("deepspeed_3", 2)
)]  # fmt: skip
HALF = [
    Case(strategy, processes, 4, CLIP, precision="bf16")
    for processes in (1, 2)
    for strategy in ("single", "deepspeed_1", "deepspeed_2", "deepspeed_3")
    if not (strategy == "single" and processes > 1)
]
MICRO_BATCHES = 64
SUMS = [
    Case(
        f"deepspeed_{stage}",
        processes,
        MICRO_BATCHES // processes,
        precision="bf16",
        steps=1,
        rows=MICRO_BATCHES,
        options=options,
    )
    for processes in (1, 2)
    for stage, options in ((1, {}), (2, {}), (3, {}), (2, {"grad_accum_dtype": "bf16"}))
]
REHEARSED = [
    Case(f"deepspeed_{stage}", processes, 2, CLIP, precision=precision, steps=3)
    for processes in (1, 2)
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16")
]
BAD_STEPS = (1, 2)
BAD = [
    (Case(strategy, processes, 2, CLIP, precision=precision, steps=4, options=options), kind)
    for processes in (1, 2)
    for strategy, options in STRATEGIES
    for precision in ("fp32", "bf16")
    for kind in ("loss", "gradient")
    if not (strategy == "single" and processes > 1)
]
VALIDATED = [
    {"strategy": strategy, "accumulation": 2, "steps": 3, "validation": validation, "examples": examples}
    for strategy in ("deepspeed_1", "deepspeed_2", "deepspeed_3")
    for validation, examples in (
        (40, False),
        (11, False),
        (3, True),
        (1, True),
    )  # 11 tokens are one window for two ranks
]
# The part of the default run: of every kind a little, each stage, each precision, on one process and on two.
EQUAL_PART = [
    Case("single", 1, 4, None),
    Case("deepspeed_1", 1, 4, CLIP),
    Case("deepspeed_2", 2, 4, CLIP, "muon"),
    Case("deepspeed_3", 2, 4, CLIP),
    Case("deepspeed_2", 2, 1, None, options=OFFLOAD),
    Case("deepspeed_3", 1, 1, None, options=OFFLOAD_BOTH),
]
LORA_PART, RECOMPUTED_PART, HALF_PART = LORA[2:3], RECOMPUTED[:1], [HALF[0], HALF[5]]
SUMS_PART, REHEARSED_PART = [SUMS[1], SUMS[3]], [REHEARSED[0], REHEARSED[10]]
BAD_PART = [
    (case, kind)
    for case, kind in BAD
    if (case.strategy, case.processes, case.precision, kind)
    in {
        ("single", 1, "bf16", "loss"),
        ("deepspeed_1", 1, "fp32", "gradient"),
        ("deepspeed_1", 2, "bf16", "loss"),
        ("deepspeed_2", 2, "bf16", "gradient"),
        ("deepspeed_3", 2, "fp32", "loss"),
    }
    and not case.options
]
VALIDATED_PART = [VALIDATED[4 + 3], VALIDATED[8 + 1]]


def spec_of(case: Case, **more: Any) -> dict[str, Any]:
    extra = "-".join(f"{key}={value}" for key, value in more.items())
    spec = {"name": "-".join(filter(None, [case.name, extra])), "case": asdict(case), "processes": case.processes}
    if kind := more.pop("kind", None):
        spec["bad"] = {"kind": kind, "steps": BAD_STEPS, "rank": case.processes - 1, "micro_batch": 1}
    return spec | more


def validated_spec(options: dict[str, Any], processes: int) -> dict[str, Any]:
    name = f"validated-{options['strategy']}-{options['validation']}-{options['examples']}"
    return {"name": name, "processes": processes, "windows": options}


def specs(
    *,
    equal: list[Case],
    lora: list[Case],
    recomputed: list[Case],
    half: list[Case],
    sums: list[Case],
    rehearsed: list[Case],
    bad: list[tuple[Case, str]],
    validated: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One launch's worth of runs."""
    return [
        *(spec_of(case, gradients=case.optimizer == "adamw") for case in equal),
        *map(spec_of, [*lora, *recomputed, *half]),
        *(spec_of(case, gradients=True) for case in sums),
        *(spec_of(case, rehearsed=choice) for case in rehearsed for choice in (True, False)),
        *(spec_of(case, kind=kind) for case, kind in bad),
        *(validated_spec(options, processes) for options in validated for processes in (1, 2)),
    ]


DEFAULT_SPECS = specs(
    equal=EQUAL_PART, lora=LORA_PART, recomputed=RECOMPUTED_PART, half=HALF_PART, sums=SUMS_PART,
    rehearsed=REHEARSED_PART, bad=BAD_PART, validated=VALIDATED_PART,
)  # fmt: skip
SLOW_SPECS = specs(
    equal=MATRIX, lora=LORA, recomputed=RECOMPUTED, half=HALF, sums=SUMS,
    rehearsed=REHEARSED, bad=BAD, validated=VALIDATED,
)  # fmt: skip


class Runs:
    """What came of a launch of one process and one of two, at the same time."""

    def __init__(self, specs: list[dict[str, Any]], folder: Path) -> None:
        def launched(processes: int) -> dict[tuple[str, int], Any]:
            place = folder / str(processes)
            place.mkdir()
            mine = [spec for spec in specs if spec["processes"] == processes]
            (place / "specs.json").write_text(json.dumps(mine))
            launch([sys.executable, str(WORKER), "specs.json", "results.pt"], processes, place, 1200)
            found = torch.load(place / "results.pt", weights_only=True)
            return {(name, processes): result for name, result in found.items()}

        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(launched, (1, 2))
        self._done = one | two

    def of(self, case: Case, **more: Any) -> dict[str, Any]:
        return self._done[spec_of(case, **more)["name"], case.processes]

    def validated(self, options: dict[str, Any], processes: int) -> list[dict[str, str]]:
        return self._done[validated_spec(options, processes)["name"], processes]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Runs]:
    """`runs(whole)`: the launches of the default part or of the whole matrix, each made once."""

    @cache
    def launched(whole: bool) -> Runs:
        return Runs(SLOW_SPECS if whole else DEFAULT_SPECS, tmp_path_factory.mktemp("all" if whole else "part"))

    return launched


def part_and_rest(part: list[Any], everything: list[Any]) -> pytest.MarkDecorator:
    """Each of the part in the default run, everything in the slow one."""
    slow = [pytest.mark.slow, pytest.mark.timeout(1500)]
    return pytest.mark.parametrize(
        ("each", "whole"),
        [pytest.param(each, False, id=identity(each), marks=pytest.mark.medium) for each in part]
        + [pytest.param(each, True, id=f"{identity(each)}-whole", marks=slow) for each in everything],
    )


def identity(each: Any) -> str:
    if isinstance(each, dict):
        return validated_spec(each, 1)["name"]
    return each.name if isinstance(each, Case) else f"{each[0].name}-{each[1]}"


def trained(result: dict[str, Any]) -> Trained:
    return Trained(result["losses"], result["norms"], result["weights"])


def assert_equal_to_plain(result: dict[str, Any], case: Case) -> None:
    got, expected = trained(result), equality.plain(case.optimizer, case.clip, lora=case.lora)
    assert equality.loss_distance(got, expected) <= 1e-6
    assert equality.weight_distance(got, expected) <= 1e-5
    assert got.norms == pytest.approx(expected.norms, rel=1e-5)


def test_the_part_of_the_default_run_has_something_of_everything() -> None:
    assert set(map(str, EQUAL_PART)) <= set(map(str, MATRIX))
    for attribute in ("strategy", "processes", "accumulation", "clip", "optimizer", "options"):
        values = [{str(getattr(case, attribute)) for case in cases} for cases in (EQUAL_PART, MATRIX)]
        assert values[0] == values[1], attribute


@part_and_rest(EQUAL_PART, MATRIX)
def test_twenty_steps_equal_plain_pytorch(runs: Callable[[bool], Runs], each: Case, whole: bool) -> None:
    """And the gradient is that of the global batch, however it is split."""
    result = runs(whole).of(each, gradients=each.optimizer == "adamw")
    assert_equal_to_plain(result, each)
    assert (result["gradients"].keys() == plain_gradients(each.clip).keys()) == (each.optimizer == "adamw")
    for name, gradient in result["gradients"].items():
        expected = plain_gradients(each.clip)[name]
        assert float((gradient.view(expected.shape) - expected).norm() / expected.norm()) <= 1e-6, name


@cache
def plain_gradients(clip: float | None) -> dict[str, torch.Tensor]:
    """Of the first global batch in one piece, clipped."""
    model = equality.tiny_model().train()
    data = equality.data_of(Case("single"))
    rows = [equality.examples()[number] for number in data.step_sample_ids(0)]
    batch = pad_examples(rows, pad_id=0, rows=len(rows))
    total, count = loss_sum(model, batch["input_ids"], batch["labels"])
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_some_micro_batches_of_the_cases_have_no_trained_token() -> None:
    """The cases would prove less without them."""
    data = equality.data_of(Case("deepspeed_1", 2, 4))
    data.trainer = SimpleNamespace(world_size=2, global_rank=1)
    counts = [int((batch["labels"] != -100).sum()) for batch in data.train_dataloader()]
    assert 0 in counts
    assert max(counts) > 10


@part_and_rest(LORA_PART, LORA)
def test_an_adapter_trains_as_in_plain_pytorch(runs: Callable[[bool], Runs], each: Case, whole: bool) -> None:
    result = runs(whole).of(each)
    assert_equal_to_plain(result, each)
    start = equality.tiny_model(lora=True).state_dict()
    moved = {name for name, value in result["weights"].items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name}
    assert result["states"] <= 2.2 * sum(start[name].numel() for name in moved)  # two moments, and ZeRO's padding


@part_and_rest(RECOMPUTED_PART, RECOMPUTED)
def test_recomputed_activations_give_the_same_weights(runs: Callable[[bool], Runs], each: Case, whole: bool) -> None:
    assert_equal_to_plain(runs(whole).of(each), each)


def test_recomputed_activations_give_the_same_gradients_bit_for_bit() -> None:
    gradients = []
    for recomputed in (False, True):
        model = equality.tiny_model().train()
        model.gradient_checkpointing = recomputed
        ids = torch.tensor([example.input_ids[:2] for example in equality.examples()])
        loss_sum(model, ids, ids)[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@part_and_rest(HALF_PART, HALF)
def test_bf16_follows_fp32(runs: Callable[[bool], Runs], each: Case, whole: bool) -> None:
    """bf16 keeps 8 bits, so a product is wrong by up to 2⁻⁹ = 0.2 %; over two layers losses stay within 1 %, norms
    within 5 %, and after 20 steps of Adam, each of which moves a weight by about the learning rate, weights within 5 %.
    """
    got, expected = trained(runs(whole).of(each)), equality.plain(each.optimizer, each.clip)
    assert equality.loss_distance(got, expected) <= 1e-2
    assert got.norms == pytest.approx(expected.norms, rel=5e-2)
    assert equality.weight_distance(got, expected) <= 5e-2


@cache
def true_sum() -> dict[str, torch.Tensor]:
    """The gradients of 64 micro-batches of the bf16 model, summed in fp64."""
    model = equality.tiny_model().train().bfloat16()
    sums = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in model.named_parameters()}
    for batch in equality.data_of(SUMS[0]).train_dataloader():
        model.zero_grad()
        (loss_sum(model, batch["input_ids"], batch["labels"])[0] * (1 / int(batch["step_tokens"]))).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.double()
    return sums


@part_and_rest(SUMS_PART, SUMS)
def test_sixty_four_micro_batches_are_summed_in_fp32(runs: Callable[[bool], Runs], each: Case, whole: bool) -> None:
    """Each micro-batch's gradient is rounded to bf16 once, by backward. Summing 64 of them in fp32 adds nothing to
    that; in bf16 it adds 0.1 % or more, as small terms fall off the end of a large sum."""
    gradients = runs(whole).of(each, gradients=True)["gradients"]
    errors = [
        float((gradients[name].double().view(value.shape) - value).norm() / value.norm())
        for name, value in true_sum().items()
    ]
    if each.options:
        assert 1e-3 < max(errors) < 0.1
    else:
        assert max(errors) < 1e-6


@part_and_rest(REHEARSED_PART, REHEARSED)
def test_the_rehearsal_of_the_longest_batch_leaves_no_trace(
    runs: Callable[[bool], Runs], each: Case, whole: bool
) -> None:
    rehearsed, without = (runs(whole).of(each, rehearsed=choice) for choice in (True, False))
    assert (rehearsed["rehearsals"], without["rehearsals"]) == (1, 0)
    assert rehearsed["losses"] == without["losses"]
    assert rehearsed["norms"] == without["norms"]
    assert all(torch.equal(rehearsed["weights"][name], value) for name, value in without["weights"].items())


@part_and_rest(BAD_PART, BAD)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(
    runs: Callable[[bool], Runs], each: tuple[Case, str], whole: bool
) -> None:
    """Nothing moves in the bad steps, on any rank; all else is as if they had never been."""
    case, kind = each
    result = runs(whole).of(case, kind=kind)
    assert result["unchanged"] == [True] * len(BAD_STEPS) * case.processes
    assert result["skipped"] == ["0", "1", "2", "2"]
    expected = equality.plain(case.optimizer, case.clip, steps=case.steps, left_out=frozenset(BAD_STEPS))
    loss, weights = (1e-6, 1e-5) if case.precision == "fp32" else (1e-2, 5e-2)
    assert equality.weight_distance(trained(result), expected) <= weights
    finite = [step for step in range(case.steps) if step not in BAD_STEPS]
    assert [result["losses"][s] for s in finite] == pytest.approx([expected.losses[s] for s in finite], rel=loss)
    assert all(math.isnan(result["losses"][s]) == (kind == "loss") for s in BAD_STEPS)


@part_and_rest(VALIDATED_PART, VALIDATED)
def test_two_processes_validate_as_one_with_fewer_windows_than_ranks(
    runs: Callable[[bool], Runs], each: dict[str, Any], whole: bool
) -> None:
    """And nobody waits for a rank without a batch, or for rank 0, which writes samples alone after every step."""
    one, two = (runs(whole).validated(each, processes) for processes in (1, 2))
    for key, digits in (("train/loss", 1e-6), ("val/loss", 1e-6), ("train/grad_norm", 1e-5)):
        values = [[float(row[key]) for row in rows if row[key]] for rows in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=digits), key
    assert [row["step"] for row in two if row["val/loss"]] == ["2", "3"]
