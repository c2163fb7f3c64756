"""The training loss: a *sum* of token losses and the number of trained tokens, never a mean.

Means are taken once, over the whole optimiser step, by whoever knows how many tokens all micro-batches and ranks hold.

Shapes: B batch, T time, C hidden, V vocabulary, N = B·T.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llmtrain.model.transformer import Transformer

IGNORED = -100  # the label of a position that is not trained
LOGITS_BUDGET_BYTES = 1 << 30  # fp32 logits above this are computed in chunks and recomputed in backward


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy in nats.

    Args:
        logits: (..., V) in any float dtype; the softmax is taken in fp32.
        labels: (...) targets of the same positions (already shifted), `IGNORED` where not trained.

    Returns:
        An fp32 scalar.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def loss_sum(
    model: Transformer,
    input_ids: Tensor,
    labels: Tensor,
    *,
    document_ids: Tensor | None = None,
    logits_budget_bytes: int = LOGITS_BUDGET_BYTES,
) -> tuple[Tensor, Tensor]:
    """Summed token loss of a batch and how many tokens it sums over.

    Args:
        model: the transformer.
        input_ids: (B, T).
        labels: (B, T), already shifted: labels[b, t] is the token after input_ids[b, t].
        document_ids: (B, T) for rows of several documents, as in `Transformer.forward`.
        logits_budget_bytes: above this size of fp32 logits, tokens are taken in chunks whose logits are recomputed in
            backward, so that memory does not grow with B·T·V.

    Returns:
        (sum, count): an fp32 scalar in nats and an int64 scalar.
    """
    hidden = model.hidden_states(input_ids, document_ids=document_ids)  # (B, T, C)
    count = (labels != IGNORED).sum()
    bytes_per_token = 4 * model.config.vocab_size
    if labels.numel() * bytes_per_token <= logits_budget_bytes:
        return token_loss_sum(model.logits(hidden), labels), count
    chunk = max(1, logits_budget_bytes // bytes_per_token)
    hidden, labels = hidden.flatten(0, 1), labels.flatten()  # (N, C), (N,)

    def chunk_loss(part: Tensor, targets: Tensor) -> Tensor:
        return token_loss_sum(model.logits(part), targets)

    total = torch.zeros((), device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        total = total + checkpoint(
            chunk_loss, hidden[start : start + chunk], labels[start : start + chunk], use_reentrant=False
        )
    return total, count
