"""What text bits per byte are measured on: shards that are named, a corpus that is named, or the model's own validation
text, found by what its folder remembers.

Knows settings by name, model folders and shards; measuring is `llmtrain.evaluation`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.data.shards import ShardSet

logger = logging.getLogger(__name__)


def shards_from(settings: DictConfig, loaded: LoadedModel) -> ShardSet | None:
    """The shards to measure on: those named, those of the corpus named, or the model's own validation text."""
    from llmtrain.data.shards import ShardSet

    if settings.shards_dir is None:
        return None
    if settings.shards_dir != "auto":
        folder = Path(settings.shards_dir)
        shards = ShardSet.open(folder / "val" if (folder / "val").is_dir() else folder)
    elif settings.get("data") is not None:
        shards = _prepared(settings, settings.data, loaded)
    else:
        found = _own_shards(settings, loaded)
        if found is None:
            return None
        shards = found
    shards.check_tokenizer(loaded.tokenizer)
    return shards


def _own_shards(settings: DictConfig, loaded: LoadedModel) -> ShardSet | None:
    """The validation text of the model's pretraining: found by its fingerprint, or prepared again."""
    from omegaconf import OmegaConf

    from llmtrain.data.shards import ShardSet

    pretraining = _pretraining(loaded.info)
    fingerprint = pretraining.get("data_fingerprint")
    if fingerprint:
        folders = sorted((Path(settings.paths.data_dir) / "shards").glob(f"*-{fingerprint[:12]}/val/manifest.json"))
        for folder in folders:
            shards = ShardSet.open(folder.parent)
            if shards.manifest["tokenizer_hash"] == loaded.tokenizer.hash:
                return shards
    data = data_of(pretraining)
    if data and data.get("kind") not in task_names():
        return _prepared(settings, OmegaConf.create(dict(data)), loaded)
    logger.warning(
        "%s does not say what text it was trained on, so there are no bits per byte: give data=… or shards_dir=…",
        loaded.folder,
    )
    return None


def _pretraining(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is remembered of the pretraining: of a fine-tuned model, that of its base, or of its base's base."""
    while isinstance(info.get("base"), Mapping):
        info = info["base"]
    return info


def data_of(info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section `data` of the settings that a model folder remembers."""
    config = info.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    return data if isinstance(data, Mapping) else None


def _prepared(settings: DictConfig, data: DictConfig, loaded: LoadedModel) -> ShardSet:
    """The validation shards of a corpus, made with the model's own tokenizer unless they are there."""
    from omegaconf import OmegaConf

    from llmtrain.data.prepare import prepare
    from llmtrain.launch.prepare import corpus_from

    if data.get("kind") in task_names():
        raise ValueError(
            f"data={data.kind} is a task and has no text to measure bits per byte on: say tasks={data.kind} instead"
        )
    corpus = corpus_from(OmegaConf.create({"data": data, "paths": settings.paths}))
    return prepare(corpus, loaded.tokenizer, data_dir=settings.paths.data_dir).val


def task_names() -> frozenset[str]:
    """The built-in tasks, which are no text."""
    from llmtrain.data.tasks import TASKS

    return frozenset(TASKS)
