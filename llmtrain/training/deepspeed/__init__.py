"""Everything DeepSpeed: which settings go together, the process environment it needs, the Lightning strategy.

The only package that imports deepspeed, and it does so when a strategy is built. `config` is free of heavy
imports, so that a command can refuse bad settings in its first second.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.training.deepspeed.strategy import DeepSpeedStrategy, build_strategy

__all__ = ["DeepSpeedStrategy", "build_strategy"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from llmtrain.training.deepspeed import strategy

        return getattr(strategy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
