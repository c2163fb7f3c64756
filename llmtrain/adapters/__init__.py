"""LoRA adapters: attach through peft, save, load, merge, or lay onto a model unmerged.

`attach.py` needs peft, and imports it only while an adapter is attached; `deltas.py` reads and merges adapters with
plain tensor arithmetic, and `applied.py` lays them onto a model. Knows nothing of tokenizers, run folders or training.
"""

from llmtrain.adapters.applied import lay_onto
from llmtrain.adapters.attach import (
    LINEAR_LAYERS,
    Adapted,
    adapter_config,
    attach,
    check_adapter,
    save_adapter,
)
from llmtrain.adapters.deltas import (
    ADAPTER_CONFIG_FILE,
    AdapterDeltas,
    AdapterError,
    LowRank,
    deltas_from,
    has_adapter,
    load_adapter_deltas,
    merge_state_dict,
    split_state_dict,
)

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "LINEAR_LAYERS",
    "Adapted",
    "AdapterDeltas",
    "AdapterError",
    "LowRank",
    "adapter_config",
    "attach",
    "check_adapter",
    "deltas_from",
    "has_adapter",
    "lay_onto",
    "load_adapter_deltas",
    "merge_state_dict",
    "save_adapter",
    "split_state_dict",
]
