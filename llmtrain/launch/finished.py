"""What a finished pretraining run says: its figures, measured anew on the model folder, samples, and what comes next.

Knows the settings' names and the folder that training left; not how it was trained.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.generation import SamplingParams
    from llmtrain.training.fit import FitResult

logger = logging.getLogger(__name__)


def conclude(
    settings: DictConfig,
    run_dir: Path,
    prepared: PreparedCorpus,
    result: FitResult,
    prompts: list[str],
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Measure the finished model folder in fp32, print samples, and say what comes next."""
    import torch

    from llmtrain.checkpoint import load_model_folder
    from llmtrain.evaluation import bits_per_byte

    device = "cuda" if torch.cuda.is_available() and settings.trainer.accelerator != "cpu" else "cpu"
    loaded = load_model_folder(result.model_dir, device=device)
    measured = bits_per_byte(
        loaded.model,
        prepared.val,
        sequence_length=settings.data.sequence_length,
        eos_id=loaded.tokenizer.eos_id,
    )
    samples, figures = _samples(settings, loaded, prepared, prompts, sampling)
    if settings.callbacks.recall:
        figures["recall"] = _recall(settings, loaded, prepared)
    logger.info(
        "%.3f bits per byte (%.3f nats per token) on held-out text, model of step %d; %s tokens in %.0f s, %s tokens/s",
        measured["bpb"],
        measured["loss"],
        result.best_step,
        f"{result.tokens:,}",
        result.train_seconds,
        f"{result.tokens_per_second:,.0f}",
    )
    listed = run_dir.parent.resolve() == Path("runs/pretrain").resolve()  # where the other commands look by themselves
    model = "" if listed else f' ARGS="model={run_dir}"'
    logger.info(
        'model folder: %s\nnext: make generate%s PROMPT="…"   or   make finetune%s', result.model_dir, model, model
    )
    return {
        "command": "pretrain",
        "run_dir": str(run_dir),
        "model": str(result.model_dir),
        "val_loss": measured["loss"],
        "val_bpb": measured["bpb"],
        "tokens": result.tokens,
        "steps": result.steps,
        "best_step": result.best_step,
        "tokens_per_second": round(result.tokens_per_second, 1),
        "train_seconds": round(result.train_seconds, 2),
        "samples": samples,
        **figures,
    }


def _samples(
    settings: DictConfig, loaded: LoadedModel, prepared: PreparedCorpus, prompts: list[str], sampling: SamplingParams
) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Texts of the finished model, shown, and how much they repeat and copy."""
    from dataclasses import replace

    from llmtrain.evaluation import sample_report
    from llmtrain.generation import Engine
    from llmtrain.training.callbacks import seeded

    if not prompts:
        return [], {}
    seed = settings.seed if sampling.seed is None else sampling.seed
    engine = Engine(loaded.model, loaded.tokenizer, max_rows=len(prompts))
    completions = engine.generate(prompts, seeded(replace(sampling, seed=seed), len(prompts)))
    for prompt, completion in zip(prompts, completions, strict=True):
        logger.info("\n%s│%s", prompt, completion.text)
    figures = sample_report([each.text for each in completions], [s for s, _ in prepared.train], loaded.tokenizer)
    logger.info(
        "\nof the samples' runs of four characters %.0f %% occur once; the longest span copied from the training text "
        "has %d characters",
        100 * figures["distinct_4"],
        figures["longest_copied_characters"],
    )
    pairs = zip(prompts, completions, strict=True)
    return [{"prompt": prompt, "text": completion.text} for prompt, completion in pairs], dict(figures)


def _recall(settings: DictConfig, loaded: LoadedModel, prepared: PreparedCorpus) -> dict[str, Any]:
    """What the model says by heart of the text it was trained on and of the text held out, said as what it is."""
    from llmtrain.evaluation import recall
    from llmtrain.generation import Engine

    engine = Engine(loaded.model, loaded.tokenizer, max_rows=32)
    known, unknown = (
        recall(engine, shards, limit=settings.callbacks.recall, sequence_length=settings.data.sequence_length)
        for shards in ([each for each, _ in prepared.train], [prepared.val])
    )
    logger.info(
        "\nasked for the next line, given those before it, the model gives %d of %d exactly (%.0f %%) of the text it "
        "was trained on, and %d of %d of the text held out; %.2f nats per token on the one, %.2f on the other. What is "
        "right in the first alone is memory, not skill.",
        known["right"],
        known["asked"],
        100 * known["right"] / max(known["asked"], 1),
        unknown["right"],
        unknown["asked"],
        known["loss"],
        unknown["loss"],
    )
    return {"trained_on": known, "held_out": unknown}
