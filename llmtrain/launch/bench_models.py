"""Which model folder a measurement decodes with: one that is asked for, the latest run's, or random weights.

Knows settings and run folders; not what is measured.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.launch.bench import Bench

logger = logging.getLogger(__name__)


def model_folder(bench: Bench) -> Path:
    """The model asked for, the latest pretraining run's, or random weights of `pretrain`'s shape."""
    from llmtrain.checkpoint import ModelFolderError, resolve_model
    from llmtrain.launch.runs import latest_run

    if bench.settings.model is not None:
        return resolve_model(bench.settings.model)
    latest = latest_run(Path(bench.settings.paths.runs_dir), "pretrain")
    if latest is not None:
        try:
            return resolve_model(latest)
        except ModelFolderError:
            logger.info("%s has no model yet: decoding is measured with random weights", latest)
    return random_folder(bench, bench.start.model, "model")


def random_folder(bench: Bench, model: Any, name: str) -> Path:
    """A folder in the bench's work folder, with a model as it is and the bench's tokenizer."""
    from llmtrain.checkpoint import save_model_folder

    tokenizer, folder = bench.start.tokenizer, bench.work / name
    state = dict(model.state_dict())
    for table in ("model.embed_tokens.weight", "lm_head.weight"):
        # Our engine never says the ids that only fill up the vocabulary; so transformers should not either.
        state[table] = state[table].clone()
        state[table][tokenizer.vocab_size :] = 0
    save_model_folder(folder, config=model.config, state_dict=state, tokenizer=tokenizer, info={})
    return folder
