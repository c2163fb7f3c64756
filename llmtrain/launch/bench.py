"""`llmtrain bench`: how fast the framework is beside plain PyTorch, `transformers` and bare `tokenizers`.

Reads the settings, composes those of `make pretrain` (what is measured is that command's own path), hands plain values
to `llmtrain.bench` and shows the results. Neither clocks nor loops are here.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.bench.results import Comparison
    from llmtrain.bench.rounds import Rounds
    from llmtrain.bench.training import TrainingSetup

logger = logging.getLogger(__name__)

PARTS = ("train", "decode", "generate", "prepare", "memory", "training-memory", "equality", "harness", "peers")
_BUSY = 0.5  # load per core at the start from which the figures are called rough
_WARMUP_ROUNDS = 1


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Measures what `which` names.

    Returns:
        `ratios` (median by name), `comparisons` (by name: median, min, max, mark, met, both sides' rates of every
        round), `met` (whether every mark is), and the facts of `machine` and of what was measured.

    Raises:
        ValueError: A setting that does not do, here or in those of `pretrain`.
    """
    parts = _checked_parts(settings)
    from llmtrain.bench.results import machine_facts, table

    bench = Bench(settings, run_dir / "work")
    bench.check(parts)
    machine = machine_facts(threads=bench.threads)
    if (machine["load_at_start"] or 0) > _BUSY * (machine["cores"] or 1):
        logger.warning(
            "the machine is busy (load %.1f on %d cores): the ratios will be rough",
            machine["load_at_start"],
            machine["cores"],
        )
    logger.info("%d threads for every side", bench.threads)
    bench.work.mkdir(parents=True, exist_ok=True)
    comparisons: list[Comparison] = []
    try:
        for part in parts:
            comparisons += getattr(bench, part.replace("-", "_"))()
    finally:
        shutil.rmtree(bench.work, ignore_errors=True)
    if comparisons:
        logger.info("\n%s\n", table(comparisons))
    marks = [each.met for each in comparisons if each.met is not None] + bench.equal
    return {
        "command": "bench",
        "run_dir": str(run_dir),
        "ratios": {each.name: round(each.ratio.median, 4) for each in comparisons},
        "met": all(marks),
        "comparisons": {each.name: each.to_dict() for each in comparisons},
        "machine": machine,
        **bench.facts,
    }


def _checked_parts(settings: DictConfig) -> list[str]:
    """The parts to measure, in the order of `PARTS`; everything that can be checked without work is."""
    from llmtrain.bench.rounds import MIN_ROUNDS

    wanted = [settings.which] if isinstance(settings.which, str) else list(settings.which)
    for part in wanted:
        if part not in PARTS:
            raise ValueError(f"which={part!r} is nothing that can be measured: use {', '.join(PARTS)}.")
    if not wanted:
        raise ValueError(f"which=[] measures nothing: name some of {', '.join(PARTS)}.")
    if settings.rounds < MIN_ROUNDS:
        raise ValueError(f"rounds={settings.rounds} must be at least {MIN_ROUNDS}: fewer give no spread.")
    for name in ("steps", "megabytes", "prompt_tokens", "new_tokens", "generate_requests"):
        if not settings[name] > 0:
            raise ValueError(f"{name}={settings[name]} must be above 0.")
    if settings.threads is not None and settings.threads < 1:
        raise ValueError(f"threads={settings.threads} must be at least 1, or null.")
    if not settings.batch_sizes or min(settings.batch_sizes) < 1:
        raise ValueError(
            f"batch_sizes={list(settings.batch_sizes)} must be one or more numbers of prompts, at least 1."
        )
    sizes = list(settings.memory_megabytes)
    if len(sizes) != 2 or not 0 < sizes[0] < sizes[1]:
        raise ValueError(f"memory_megabytes={sizes} must be two sizes, the smaller one first.")
    return [part for part in PARTS if part in wanted]


class Bench:
    """The parts of one run. What several of them need (corpus, tokenizer, device) is made once, when first used.

    Attributes:
        work: A folder for files that only the measurement needs.
        facts: What was measured, for the results.
        equal: For each of our cases, whether it equals plain PyTorch.
    """

    def __init__(self, settings: DictConfig, work: Path) -> None:
        import torch

        self.settings, self.work = settings, work
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.threads = torch.get_num_threads()
        os.environ["RAYON_NUM_THREADS"] = str(self.threads)  # of tokenizers, whose pool starts at its first use
        self.facts: dict[str, Any] = {}
        self.equal: list[bool] = []

    @cached_property
    def pretrain(self) -> DictConfig:
        """The settings of `make pretrain`, with the changes that `pretrain` asks for."""
        from llmtrain.launch.composing import compose

        paths = [f"paths.{name}={self.settings.paths[name]}" for name in ("runs_dir", "data_dir")]
        return compose("pretrain", [*self.settings.pretrain, *paths]).settings

    @cached_property
    def start(self) -> Any:
        """What `make pretrain` starts from: shards, tokenizer, model."""
        from llmtrain.launch.starting import prepare_start

        return prepare_start(self.pretrain)

    @cached_property
    def accelerator(self) -> str:
        """`cpu` or `gpu`."""
        from llmtrain.training import hardware

        return hardware.resolve_accelerator(self.pretrain.trainer.accelerator)

    @cached_property
    def device(self) -> Any:
        """Where everything is computed."""
        import torch

        return torch.device("cuda", 0) if self.accelerator == "gpu" else torch.device("cpu")

    def check(self, parts: list[str]) -> None:
        """Refuses what cannot work, before anything is measured."""
        from llmtrain.checkpoint import resolve_model
        from llmtrain.launch.starting import check_settings

        check_settings(self.pretrain)
        if "decode" in parts and self.settings.model is not None:
            resolve_model(self.settings.model)
        if "peers" in parts:
            from llmtrain.launch import bench_peers

            bench_peers.check(self.settings.peers_python)

    def rounds(self) -> Rounds:
        """Fresh rounds, which wait for the device."""
        from llmtrain.bench.rounds import Rounds
        from llmtrain.training import hardware

        return Rounds(
            self.settings.rounds,
            warmup_rounds=_WARMUP_ROUNDS,
            synchronize=lambda: hardware.synchronize(self.device),
        )

    def report(self, what: str, unit: str) -> Callable[[int, Mapping[str, float]], None]:
        """Shows each round as it ends."""
        from llmtrain.training.progress import compact

        def show(number: int, rates: Mapping[str, float]) -> None:
            name = f"round {number}/{self.settings.rounds}" if number > 0 else "warming up"
            sides = ", ".join(f"{side} {compact(rate)}" for side, rate in rates.items())
            logger.info("%s, %s: %s %s", what.rstrip(","), name, sides, unit)

        return show

    def train(self) -> list[Comparison]:
        """`fit` beside two bare loops."""
        from llmtrain.bench import training
        from llmtrain.bench.results import Comparison
        from llmtrain.model import parameter_count
        from llmtrain.training import hardware

        setup = self._training_setup()
        rounds = self.rounds()
        folder = self.work / "fit"
        folder.mkdir()
        training.measure_training(
            setup, rounds, steps=self.settings.steps, run_dir=folder, report=self.report("training", "tokens/s")
        )
        self.facts["training"] = {
            "parameters": parameter_count(setup.config),
            "batch": [setup.accumulation, setup.micro_batch_size, setup.sequence_length],
            "precision": hardware.resolve_precision(setup.precision, self.accelerator),
            "optimizer": setup.optimizer,
            "strategy": setup.fit_options["strategy"],
            "compile": setup.compile_model,
            "device": str(self.device),
        }
        return [
            Comparison(name, "training", rounds.compare(training.FRAMEWORK, side), what, "tokens/s", mark)
            for name, side, what, mark in (
                ("train_vs_torch", training.BARE, "a bare PyTorch loop", 0.90),
                ("train_vs_transformers", training.TWIN, "transformers' model in one", 1.0),
            )
        ]

    def _training_setup(self) -> TrainingSetup:
        from llmtrain.bench.training import TrainingSetup
        from llmtrain.launch.starting import check_settings
        from llmtrain.model import flops_per_token

        settings, config = self.pretrain, self.start.model.config
        if settings.logger.kind != "csv":
            logger.warning("logger=%s is not measured: the bench logs to metrics.csv only", settings.logger.kind)
        if settings.trainer.devices not in ("auto", 1) or settings.trainer.num_nodes not in ("auto", 1):
            logger.warning("trainer.devices and trainer.num_nodes are not used: every side of the bench is one process")
        settings.trainer.devices = settings.trainer.num_nodes = 1
        batch = check_settings(settings)
        options = fit_settings(settings)
        options["flops_per_position"] = flops_per_token(config, settings.data.sequence_length)
        shared = {name: options.pop(name) for name in TrainingSetup.SHARED}
        return TrainingSetup(
            config=config,
            tokenizer=self.start.tokenizer,
            streams=self.start.prepared.train,
            sequence_length=settings.data.sequence_length,
            micro_batch_size=batch.micro_batch_size,
            accumulation=batch.accumulation,
            seed=settings.seed,
            fit_options=options,
            **shared,
        )

    def decode(self) -> list[Comparison]:
        """The engine beside `generate` of transformers, for each batch size."""
        from llmtrain.bench import decoding
        from llmtrain.bench.results import Comparison
        from llmtrain.launch import bench_models

        settings = self.settings
        folder = bench_models.model_folder(self)
        pair = decoding.DecodingPair(
            folder, device=self.device, prompt_tokens=settings.prompt_tokens, new_tokens=settings.new_tokens
        )
        facts = self.facts["decoding"] = {"model": str(folder), "dtype": pair.dtype, "device": str(self.device)}
        found = []
        for size in settings.batch_sizes:
            report = self.report(f"decoding, batch {size}", "tokens/s")
            result = pair.measure(size, self.rounds(), report=report)
            ratio = result.rounds.compare(decoding.FRAMEWORK, decoding.TWIN)
            name, what = f"decode_batch_{size}", f"decoding, batch {size},"
            found.append(Comparison(name, what, ratio, "transformers' generate", "tokens/s", 1.3))
            facts[f"equal_tokens_batch_{size}"] = round(result.agreement, 4)
        return found

    def harness(self) -> list[Comparison]:
        """The adapter for lm-eval beside lm-eval's own `hf`, for each kind of request."""
        from llmtrain.bench import harness
        from llmtrain.bench.results import Comparison
        from llmtrain.launch import bench_models

        folder, size = bench_models.model_folder(self), max(self.settings.batch_sizes)
        pair = harness.HarnessPair(folder, device=self.device.type, batch_size=size, questions=40)
        self.facts["harness"] = {"model": str(folder), "batch_size": size, "difference": {}}
        found = []
        for kind in harness.KINDS:
            laps, difference = pair.measure(kind, self.rounds(), report=self.report(f"lm-eval, {kind}", "requests/s"))
            self.facts["harness"]["difference"][kind] = difference
            ratio = laps.compare(harness.FRAMEWORK, harness.TWIN)
            found.append(Comparison(f"harness_{kind}", f"lm-eval, {kind},", ratio, harness.TWIN, "requests/s", None))
        return found

    def generate(self) -> list[Comparison]:
        """The engine's work beside transformers, on two models and in two dtypes."""
        from llmtrain.launch import bench_generate

        return bench_generate.measure(self)

    def peers(self) -> list[Comparison]:
        """Decoding of one request beside litgpt and llama.cpp, which `make bench-peers` installs."""
        from llmtrain.launch import bench_peers

        return bench_peers.measure(self)

    def prepare(self) -> list[Comparison]:
        """The whole preparation beside bare `tokenizers`."""
        from llmtrain.bench import preparing
        from llmtrain.bench.results import Comparison

        folder = self.work / "prepare"
        folder.mkdir()
        size = int(self.settings.megabytes * 1e6)
        rounds = preparing.measure_preparing(
            self._documents(size),
            self.start.tokenizer,
            self.rounds(),
            size=size,
            folder=folder,
            report=self.report("preparation", "characters/s"),
        )
        self.facts["preparation"] = {"corpus": self.start.prepared.folder.name, "megabytes": self.settings.megabytes}
        return [
            Comparison(name, "preparation", rounds.compare(preparing.FRAMEWORK, side), side, "characters/s", mark)
            for name, side, mark in (
                ("prepare_vs_encode_batch", preparing.BARE, 0.85),
                ("prepare_vs_encode_batch_fast", preparing.FAST, None),
            )
        ]

    def memory(self) -> list[Comparison]:
        """Peak memory of preparing much text beside that of little."""
        from llmtrain.bench.preparing import measure_memory
        from llmtrain.bench.results import Comparison

        folder = self.work / "memory"
        folder.mkdir()
        small, large = self.settings.memory_megabytes
        ratio = measure_memory(
            self._documents(int(small * 1e6)),
            self.start.tokenizer,
            small=int(small * 1e6),
            large=int(large * 1e6),
            folder=folder,
        )
        what = f"memory of preparing {large:,} MB"
        return [Comparison("prepare_memory", what, ratio, f"{small:,} MB", "MB", at_most=1.15)]

    def training_memory(self) -> list[Comparison]:
        """Peak memory of training processes beside what the plan says, at each ZeRO stage."""
        from llmtrain.launch.training_memory import measure, table

        found = measure(list(self.settings.training_memory), paths=self.settings.paths)
        logger.info("\n%s\n", table(found))
        self.facts["training_memory"] = [each.to_dict() for each in found]
        return [each.comparison() for each in found]

    def equality(self) -> list[Comparison]:
        """Losses and weights beside plain PyTorch's, not speed: a table of its own."""
        from dataclasses import asdict

        from llmtrain.bench import equality

        folder = self.work / "equality"
        folder.mkdir()
        rows = equality.measure(folder)
        logger.info("\n%s\n", equality.table(rows))
        self.facts["equality"] = [asdict(row) for row in rows]
        self.equal = [row.equal for row in rows if row.scaling == equality.OURS]
        return []

    def _documents(self, limit_bytes: int) -> list[str]:
        from llmtrain.bench.preparing import documents_of

        shards, _ = self.start.prepared.train[0]
        return documents_of(shards, self.start.tokenizer, limit_bytes=limit_bytes)


def fit_settings(settings: DictConfig) -> dict[str, Any]:
    """What `make pretrain` hands to `fit` straight from its settings (a test compares the two)."""
    from llmtrain.launch.fitting import fit_arguments

    # The rest says where a run is saved and how it is resumed, or how many processes it has: here it is one, unsaved.
    left_out = {"seed", "devices", "num_nodes", "val_every", "checkpoint_every", "keep_last", "wandb", "resume"}
    options = fit_arguments(settings, steps=settings.trainer.max_steps or 10**6)
    return {key: value for key, value in options.items() if key not in left_out}
