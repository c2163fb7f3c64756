"""The same model in `transformers`: the only place outside the tests that imports it, and only when it is called.

Knows how to build, train and decode a Hugging Face twin. Does not know how it is timed.

Shapes: B rows, T time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.model import ModelConfig, Transformer


def twin_of(model: Transformer) -> nn.Module:
    """A `transformers` model (`LlamaForCausalLM` for our default shape) with the same weights, dtype and device.

    Raises:
        ValueError: The shape has no twin there.
    """
    config: ModelConfig = model.config
    if config.position != "rope":
        raise ValueError(
            f"model.position={config.position} has no twin in transformers; measure rope, or leave out what is "
            "compared with transformers (which=[prepare])."
        )
    transformers = _quiet_transformers()
    fields = config.to_hf()
    twin_config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    twin = transformers.AutoModelForCausalLM.from_config(twin_config, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict(), strict=True)
    weight = next(model.parameters())
    return twin.to(device=weight.device, dtype=weight.dtype)


def twin_loss_sum(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of a twin, through its own loss function, on labels that are already shifted."""
    return model(input_ids=input_ids, labels=labels, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss


class TwinGenerator:
    """`transformers` on a model folder: `generate`, greedy with its cache, and the likelihood of a text.

    Args:
        folder: The model folder.
        device: Where to compute.
        dtype: What in; None is the dtype that the weights are stored in.
    """

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
        transformers = _quiet_transformers()
        stored = "auto" if dtype is None else dtype
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=stored).to(device).eval()
        self._config = transformers.GenerationConfig.from_pretrained(folder)
        self._device = device

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> list[list[int]]:
        """Continues prompts by exactly `new_tokens` tokens each; returns the new ids. Shorter ones are left-padded."""
        width = max(map(len, prompts))
        inputs = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts], device=self._device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        mask = (torch.arange(width, device=self._device) >= width - lengths[:, None]).long()  # (B, T)
        # Without an end token nothing is checked after each token, which is the fastest that `generate` offers.
        self._config.update(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        output = self._model.generate(inputs, attention_mask=mask, generation_config=self._config)
        return output[:, width:].tolist()

    @torch.inference_mode()
    def score(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        """The log-probability of a continuation, by one forward pass."""
        ids = torch.tensor([[*context, *continuation]], device=self._device)
        logits = self._model(ids[:, :-1], logits_to_keep=len(continuation), use_cache=False).logits[0].float()
        wanted = ids[0, len(context) :]
        return float((logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)).sum())


def _quiet_transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # folders on disk are all that is read
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers
