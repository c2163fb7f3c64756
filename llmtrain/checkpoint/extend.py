"""A copy of a model whose tokenizer learns the chat's role markers: for models of another origin.

Knows rows of embedding tables and which files make a model folder. Deliberately knows nothing of what the markers are
for: training their rows is fine-tuning's business.
"""

from dataclasses import replace
from pathlib import Path

import torch

from llmtrain.checkpoint.load import LoadedModel, load_model_folder
from llmtrain.checkpoint.save import save_model_folder
from llmtrain.model import build_model, padded_vocab_size


def with_role_markers(base: LoadedModel, folder: Path, *, write: bool) -> LoadedModel:
    """Add the special tokens that a base's tokenizer lacks, and rows to its tables where none are free.

    The rows of the new ids start as the mean of the others, and the new ids are recorded as never seen.

    Args:
        base: A model as loaded from its folder.
        folder: Where the extended model is written; the base's own folder stays as it is.
        write: Whether this process writes it; the others of a distributed run make the same model in memory.

    Returns:
        The extended model, its folder being `folder`.
    """
    old, tokenizer = base.tokenizer.vocab_size, base.tokenizer.with_special_tokens()
    rows = max(base.config.vocab_size, padded_vocab_size(tokenizer.vocab_size))
    config = replace(base.config, vocab_size=rows)
    state = dict(base.model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = _extended(state[name], old, rows)
    never_seen = [*base.info.get("never_seen", []), *range(old, tokenizer.vocab_size)]
    info = {**base.info, "extended_from": str(base.folder), "never_seen": never_seen}
    if write:
        save_model_folder(folder, config=config, state_dict=state, tokenizer=tokenizer, info=info)
        return load_model_folder(folder)
    model = build_model(config, seed=0)
    model.load_state_dict(state)
    return replace(base, model=model.eval(), config=config, tokenizer=tokenizer, info=info, folder=folder)


def _extended(table: torch.Tensor, used: int, rows: int) -> torch.Tensor:
    """(V, C) → (rows, C); rows from `used` on, which no training touched, become the mean of those before."""
    extended = table.new_empty((rows, table.shape[1]))
    extended[:used] = table[:used]
    extended[used:] = table[:used].mean(dim=0)
    return extended
