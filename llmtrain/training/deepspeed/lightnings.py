"""Lightning's own way of scaling the gradient under DeepSpeed, so that it can be shown beside ours.

For `llmtrain bench which=[equality]` only: training never comes here.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lightnings_own_backward() -> Iterator[None]:
    """While inside, strategies scale the loss as Lightning's `DeepSpeedStrategy` does: by the accumulation, twice.

    Lightning's strategy itself refuses the CPU; this exchanges the one method in which the two differ in their numbers.
    """
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision

    from llmtrain.training.deepspeed.strategy import _Precision

    ours = _Precision.backward
    _Precision.backward = DeepSpeedPrecision.backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Precision.backward = ours  # type: ignore[method-assign]
