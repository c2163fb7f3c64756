"""The part `peers` of `llmtrain bench`: decoding of one request beside litgpt and llama.cpp, where they are installed.

Names the sides and the marks. Neither clocks nor processes are here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.launch import bench_models

if TYPE_CHECKING:
    from llmtrain.bench.foreign import PeersResult
    from llmtrain.bench.results import Comparison
    from llmtrain.launch.bench import Bench

logger = logging.getLogger(__name__)

_DTYPES = ("fp32", "bf16")
_LITGPT_MARK = 2.0  # for the default model; how far llama.cpp is away is told, without a mark


def check(python: str) -> None:
    """Refuses to measure where nothing is installed.

    Raises:
        ValueError: There is no such Python.
    """
    if not Path(python).exists():
        raise ValueError(
            f"peers_python={python} does not exist: `make bench-peers` installs litgpt and llama.cpp in an environment "
            "of their own, and then measures."
        )


def measure(bench: Bench) -> list[Comparison]:
    """All comparisons, on the CPU; the facts go to `bench.facts["peers"]`.

    Raises:
        ValueError: None of the peers can be loaded.
    """
    from llmtrain.bench.foreign import PeersBench
    from llmtrain.training import hardware

    settings = bench.settings
    folder, work = bench_models.model_folder(bench), bench.work / "peers"
    work.mkdir()
    peers = PeersBench(
        folder,
        work=work,
        python=Path(settings.peers_python),
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
    )
    facts = bench.facts["peers"] = {"model": str(folder), "versions": {}, "missing": {}, "equal_tokens": {}}
    found: list[Comparison] = []
    for dtype in _DTYPES:
        what = f"{dtype}, decoding, one request,"
        result = peers.measure(
            hardware.DTYPES[dtype],
            bench.rounds(),
            compiled=settings.generate_compile,
            report=bench.report(what, "tokens/s"),
        )
        for name, reason in result.missing.items():
            logger.warning("%s is left out: %s", name, reason)
        facts["versions"] |= result.peers
        facts["missing"] |= result.missing
        facts["equal_tokens"][dtype] = result.agreement
        for side, share in result.agreement.items():
            logger.info("%s %s of the greedy tokens equal to ours: %.3f", what, side, share)
        found += _comparisons(dtype, what, result)
    if not found:
        raise ValueError(
            f"peers_python={settings.peers_python} has neither litgpt nor llama.cpp ({facts['missing']}): "
            "remove that environment and call `make bench-peers` again."
        )
    return found


def _comparisons(dtype: str, what: str, result: PeersResult) -> list[Comparison]:
    from llmtrain.bench.decoding import COMPILED, FRAMEWORK
    from llmtrain.bench.foreign_side import LITGPT
    from llmtrain.bench.results import Comparison

    compiled = COMPILED in result.agreement
    found = []
    for peer in result.peers:
        # As in `bench-generate`, the mark is on the faster setting where both are measured.
        mark = _LITGPT_MARK if peer.startswith(LITGPT) else None
        key = f"peers_{dtype}_{peer}".replace(" ", "_").replace(".", "_")
        ratio = result.rounds.compare(FRAMEWORK, peer)
        found.append(Comparison(key, what, ratio, peer, "tokens/s", None if compiled else mark))
        if compiled:
            ratio = result.rounds.compare(COMPILED, peer)
            found.append(Comparison(f"{key}_compiled", f"{what} compiled", ratio, peer, "tokens/s", mark))
    return found
