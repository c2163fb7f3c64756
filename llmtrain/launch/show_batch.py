"""`llmtrain show-batch`: the texts of one optimiser step of a run, with where each comes from.

Which samples a step has is a function of the run's settings, so nothing had to be written down: they are computed again
from its config.yaml, on one process whatever the run had. Only reads; a run that is still going is not disturbed.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.data.examples import Example
    from llmtrain.data.modules import PretrainDataModule
    from llmtrain.data.prepare import PreparedCorpus
    from llmtrain.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One sample of a step, ready to be shown.

    Attributes:
        id: Its sample id.
        source: The text's source, or the task.
        where: The document and the token that it begins at, or the example's file and line.
        tokens: How many it has.
        text: All of it, special tokens included.
    """

    id: int
    source: str
    where: str
    tokens: int
    text: str


class Reader(Protocol):
    """The samples of one run."""

    def steps(self) -> int:
        """How many steps the run has by its settings."""

    def step_ids(self, step: int) -> list[int]:
        """The sample ids of a step, counted from 1 as in metrics.csv."""

    def sample(self, sample_id: int) -> Sample:
        """One of them; ValueError if there is none of that id."""


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Prints the samples of `step`, or those named in `samples`.

    Returns:
        `run`, `step`, and `samples` with `id`, `source`, `where`, `tokens` and `text`.

    Raises:
        ValueError: No such run, neither step nor samples, no such sample, or data that have changed since.
    """
    from omegaconf import OmegaConf

    if (settings.step is None) == (settings.samples is None):
        given = "both are given" if settings.step is not None else "neither is given"
        raise ValueError(f"show-batch takes step=… or samples=[…] ({given}): llmtrain show-batch step=37.")
    folder = _run_folder(settings)
    config: Any = OmegaConf.load(folder / "config.yaml")
    if "trainer" not in config:
        raise ValueError(f"run={folder} was not trained, so it has no steps; give runs/pretrain/<name>.")
    _check_step(settings.step, config.trainer.max_steps)
    reader: Reader = _Examples(config, folder) if "adapter" in config else _Windows(config, folder)
    _check_step(settings.step, reader.steps())
    ids = list(settings.samples) if settings.samples is not None else reader.step_ids(settings.step)
    shown = ids if settings.limit is None else ids[: settings.limit]
    samples = [reader.sample(sample_id) for sample_id in shown]
    for each in samples:
        print(f"── sample {each.id} · {each.source} · {each.where} · {each.tokens} tokens ──\n{each.text}\n")
    if len(shown) < len(ids):
        logger.info("%d of %d samples are shown; limit=null shows all", len(shown), len(ids))
    return {
        "command": "show-batch",
        "run": str(folder),
        "step": settings.step,
        "ids": ids,
        "samples": [asdict(each) for each in samples],
    }


def _check_step(step: int | None, steps: int | None) -> None:
    """Refuses a step that the run does not have."""
    if step is not None and steps is not None and step > steps:
        raise ValueError(f"step={step} is beyond the end of the run, which has {steps} steps.")


def _run_folder(settings: DictConfig) -> Path:
    from llmtrain.launch.runs import latest_run

    if settings.run is not None:
        folder = Path(settings.run)
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"run={folder} is no run folder (it has no config.yaml); give runs/pretrain/<name>.")
        return folder.resolve() if folder.is_symlink() else folder
    found = [latest_run(Path(settings.paths.runs_dir), command) for command in ("pretrain", "finetune")]
    runs = [folder for folder in found if folder is not None and (folder / "config.yaml").is_file()]
    if not runs:
        raise ValueError(f"there is no run in {settings.paths.runs_dir} yet; give one with run=….")
    return max(runs, key=lambda folder: (folder / "config.yaml").stat().st_mtime)


def _check_unchanged(folder: Path, fact: str, value: str) -> None:
    """Refuses data that are not those of the run, as far as one of its checkpoints says so."""
    from llmtrain.training.checkpointing import list_checkpoints

    checkpoints = list_checkpoints(folder)
    kept = checkpoints[-1].state().fixed.get(fact) if checkpoints else None
    if kept not in (None, value):
        raise ValueError(f"{fact} differs from that of {folder}: what it was trained on is not there any more.")


class _Windows:
    """The windows of a pretraining run."""

    def __init__(self, config: Any, folder: Path) -> None:
        from llmtrain.data.modules import PretrainDataModule
        from llmtrain.data.prepare import prepare
        from llmtrain.launch.fitting import checked_length
        from llmtrain.launch.prepare import corpus_from
        from llmtrain.training.geometry import rows_per_step

        corpus = corpus_from(config)
        self._tokenizer = _pretraining_tokenizer(config, corpus)
        prepared: PreparedCorpus = prepare(corpus, self._tokenizer, data_dir=config.paths.data_dir)
        _check_unchanged(folder, "the data's fingerprint", prepared.fingerprint)
        self._names = [weighted.source.name for weighted in corpus.sources]
        self._shards = [shards for shards, _ in prepared.train]
        self._length: int = config.data.sequence_length
        rows = rows_per_step(config.trainer.batch_tokens, self._length)
        self._data: PretrainDataModule = PretrainDataModule(
            prepared.train,
            None,
            eos_id=self._tokenizer.eos_id,
            sequence_length=self._length,
            micro_batch_size=rows,
            accumulation=1,
            total_steps=1,
            seed=config.seed,
        )
        epoch_rows = sum(shards.num_tokens // self._length for shards in self._shards)
        self._steps = checked_length(config, rows=rows, epoch_rows=epoch_rows, row_tokens=self._length).steps

    def steps(self) -> int:
        return self._steps

    def step_ids(self, step: int) -> list[int]:
        return self._data.step_sample_ids(step - 1).tolist()

    def sample(self, sample_id: int) -> Sample:
        from llmtrain.data.windows import read_windows

        sources, starts = self._data.places([sample_id])
        window = read_windows(self._shards, sources, starts, self._length)[0]
        source, start = int(sources[0]), int(starts[0])
        ends = self._shards[source].document_ends()
        document = int(ends.searchsorted(start, side="right"))
        offset = start - (int(ends[document - 1]) if document else 0)
        return Sample(
            id=sample_id,
            source=self._names[source],
            where=f"document {document + 1} of {len(ends)}, token {offset + 1}",
            tokens=len(window),
            text=self._tokenizer.decode(window.tolist(), skip_special=False),
        )


def _pretraining_tokenizer(config: Any, corpus: Any) -> Tokenizer:
    from llmtrain.checkpoint import resolve_model
    from llmtrain.launch.prepare import tokenizer_from
    from llmtrain.tokenizer import Tokenizer

    if config.init is not None:
        return Tokenizer.load(resolve_model(config.init))
    return tokenizer_from(config, corpus)[0]


def _light_base(config: Any, folder: Path) -> Any:
    """The base model of a fine-tuning run without its weights: what its examples depend on."""
    from llmtrain.checkpoint import read_config, read_info, resolve_model
    from llmtrain.tokenizer import Tokenizer

    base = resolve_model(config.model)
    with_markers = folder / "base"  # a copy, where the base's own tokenizer lacks the role markers
    tokenizer = Tokenizer.load(with_markers if with_markers.is_dir() else base)
    return SimpleNamespace(tokenizer=tokenizer, config=read_config(base), info=read_info(base))


class _Examples:
    """The examples of a fine-tuning run."""

    def __init__(self, config: Any, folder: Path) -> None:
        from llmtrain.data.modules import FinetuneDataModule
        from llmtrain.launch import task_examples
        from llmtrain.launch.fitting import checked_length

        base = _light_base(config, folder)
        task = task_examples.task_from(config)
        self._tokenizer, self._task = base.tokenizer, task.name
        self._train: list[Example] = task_examples.examples_from(config, base, task)[0]
        _check_unchanged(folder, "the training examples", task_examples.fingerprint(self._train))
        self._data = FinetuneDataModule(
            self._train,
            [],
            pad_id=self._tokenizer.pad_id,
            micro_batch_size=config.trainer.batch_examples,
            accumulation=1,
            total_steps=1,
            seed=config.seed,
        )
        self._steps = checked_length(config, rows=config.trainer.batch_examples, epoch_rows=len(self._train)).steps

    def steps(self) -> int:
        return self._steps

    def step_ids(self, step: int) -> list[int]:
        return self._data.step_sample_ids(step - 1).tolist()

    def sample(self, sample_id: int) -> Sample:
        if not 0 <= sample_id < len(self._train):
            raise ValueError(f"there is no sample {sample_id}: the run has the examples 0 … {len(self._train) - 1}.")
        example = self._train[sample_id]
        ids = example.input_ids + example.labels[-1:]  # the last label is the end token, always trained
        return Sample(
            id=sample_id,
            source=self._task,
            where=example.where,
            tokens=len(ids),
            text=self._tokenizer.decode(ids, skip_special=False),
        )
