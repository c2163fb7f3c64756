"""The part `generate` of `llmtrain bench`: what the engine does beside `transformers`, on two models and in two dtypes.

Names the models, the work and the marks. Neither clocks nor loops are here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import bench_models

if TYPE_CHECKING:
    from llmtrain.bench.generating import GenerationBench
    from llmtrain.bench.results import Comparison
    from llmtrain.launch.bench import Bench

DEFAULT, LARGER = "default", "30m"
_DTYPES = ("fp32", "bf16")
_DECODE_MARKS = {
    (DEFAULT, "fp32"): {1: 2.5, 16: 1.8, 64: 1.5},
    (DEFAULT, "bf16"): {1: 2.5, 16: 1.8, 64: 1.5},
    (LARGER, "fp32"): {1: 1.3, 16: 1.2, 64: 1.2},
}
_UNEQUAL_MARKS = {DEFAULT: 2.5, LARGER: 2.0}
_DECODE_TOKENS = {DEFAULT: 128, LARGER: 48}


def measure(bench: Bench) -> list[Comparison]:
    """All comparisons; the facts go to `bench.facts["generating"]`."""
    wanted = {
        name: bench_models.model_folder(bench) if name == DEFAULT else _random_folder(bench, name)
        for name in bench.settings.generate_models
    }
    bench.facts["generating"] = {name: str(folder) for name, folder in wanted.items()}
    found: list[Comparison] = []
    for name, folder in wanted.items():
        for dtype in _DTYPES:
            found += _decoding(bench, name, folder, dtype)
        found += _work(bench, name, folder)
    return found


def _decoding(bench: Bench, name: str, folder: Path, dtype: str) -> list[Comparison]:
    """Requests of equal length, a fixed number at once."""
    from llmtrain.bench import decoding
    from llmtrain.bench.results import Comparison
    from llmtrain.training import hardware

    pair = decoding.DecodingPair(
        folder,
        device=bench.device,
        prompt_tokens=bench.settings.prompt_tokens,
        new_tokens=_DECODE_TOKENS[name],
        dtype=hardware.DTYPES[dtype],
    )
    found = []
    for size in bench.settings.generate_batch_sizes:
        what = f"{name} {dtype}, decoding, batch {size},"
        compiled = bench.settings.generate_compile
        result = pair.measure(size, bench.rounds(), report=bench.report(what, "tokens/s"), compiled=compiled)
        mark = _DECODE_MARKS.get((name, dtype), {}).get(size)
        key = f"decode_{name}_{dtype}_batch_{size}"
        twin = "transformers' generate"
        ratio = result.rounds.compare(decoding.FRAMEWORK, decoding.TWIN)
        found.append(Comparison(key, what, ratio, twin, "tokens/s", None if compiled else mark))
        if compiled:
            ratio = result.rounds.compare(decoding.COMPILED, decoding.TWIN)
            found.append(Comparison(f"{key}_compiled", f"{what} compiled", ratio, twin, "tokens/s", mark))
        bench.facts["generating"][f"{key}_equal_tokens"] = round(result.agreement, 4)
    return found


def _work(bench: Bench, name: str, folder: Path) -> list[Comparison]:
    """What evaluation, chat and samples do, in fp32."""
    import torch

    from llmtrain.bench import generating
    from llmtrain.bench.results import Comparison
    from llmtrain.bench.rounds import Ratio

    work = generating.GenerationBench(
        folder,
        device=bench.device,
        dtype=torch.float32,
        items=bench.settings.generate_requests,
        compile=bench.settings.generate_compile,
    )

    def compared(key: str, what: str, method: Any, side: str, theirs: str, unit: str, mark: float | None) -> Comparison:
        what = f"{name} fp32, {what},"
        rounds = method(bench.rounds(), bench.report(what, unit))
        return Comparison(f"{key}_{name}", what, rounds.compare(generating.FRAMEWORK, side), theirs, unit, mark)

    floor_mark, twin = 0.75 if name == LARGER else None, generating.TWIN
    batches, alone = "transformers in batches of 16", "transformers one by one"
    found = [
        compared(
            "floor", "decoding, batch 1", work.floor, generating.FLOOR, "its matrix products", "tokens/s", floor_mark
        ),
        compared("unequal", "unequal requests", work.unequal, twin, batches, "tokens/s", _UNEQUAL_MARKS[name]),
    ]
    if name == DEFAULT:
        found += [
            compared("choices", "four-way questions", work.choices, twin, alone, "questions/s", 3.0),
            compared("second_turn", "a second turn's first token", work.second_turn, generating.WHOLE, "reading it all",
                     "turns/s", 5.0),
        ]  # fmt: skip
        found += _recording(bench, name, work)
        seconds = work.samples(bench.rounds())
        share = Ratio([60 - 2 * each for each in seconds], [60.0] * len(seconds))
        what = "training with samples twice a minute"
        found.append(Comparison("train_with_samples", what, share, "without", "s of 60", 0.98))
    return found


def _recording(bench: Bench, name: str, work: GenerationBench) -> list[Comparison]:
    """What the inspector costs the engine: nothing for requests that are not recorded."""
    from llmtrain.bench import generating
    from llmtrain.bench.results import Comparison

    what = f"{name} fp32, decoding,"
    rounds = work.recording(bench.rounds(), bench.report(f"{what} recorded and not", "tokens/s"))
    off = rounds.compare(generating.FRAMEWORK, generating.NEVER)
    on = rounds.compare(generating.RECORDED, generating.NEVER)
    return [
        Comparison("recording_off", f"{what} others recorded,", off, "an engine that never records", "tokens/s", 0.97),
        Comparison("recording_on", f"{what} recorded,", on, "an engine that never records", "tokens/s"),
    ]


def _random_folder(bench: Bench, shape: str) -> Path:
    """A model folder with random weights of a shape in `configs/model`, and 16,384 ids."""
    from omegaconf import OmegaConf

    from llmtrain.launch.composing import compose
    from llmtrain.model import ModelConfig, build_model

    paths = [f"paths.{name}={bench.settings.paths[name]}" for name in ("runs_dir", "data_dir")]
    section = compose("pretrain", [f"model={shape}", "model.vocab_size=16384", *paths]).settings.model
    values: dict[str, Any] = OmegaConf.to_container(section, resolve=True)  # type: ignore[assignment]
    return bench_models.random_folder(bench, build_model(ModelConfig(**values), seed=0), shape)
