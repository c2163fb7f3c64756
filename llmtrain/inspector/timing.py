"""Clocks: the same work with and without the key/value cache, and the first token against the prompt's length.

Everything is measured by an engine of its own, made for one request like the one that answered. A prompt of n tokens,
read whole, gives the first token after n, and what each next one takes with n in the cache; reading the whole text
again for every token is what a model without a cache would do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from llmtrain.generation import Engine, SamplingParams
from llmtrain.inspector.arrays import rounded
from llmtrain.inspector.recording import Recording
from llmtrain.model import kv_cache_bytes_per_token

STEPS = 6
"""Tokens that are decoded at each length; the first of them is the prompt's."""

ROUNDS = 3
PATIENCE = 20.0
"""Seconds that all lengths together may take: none is begun that would go beyond, at four times the one before."""


def cache_facts(engine: Engine, recording: Recording, dtype: str) -> dict[str, Any]:
    """Bytes of cache, and what this answer took: the growth of each step is one token's."""
    per_token = kv_cache_bytes_per_token(engine.model.config, dtype)
    read = len(recording.ids) - 1
    return {
        "bytes_per_token": per_token,
        "bytes": per_token * read,
        "tokens": read,
        "allocated_bytes": engine.stats.cache_bytes,
        "ttft_seconds": rounded(recording.completion.ttft_seconds or 0.0),
        "seconds": rounded(recording.completion.seconds),
        "cached_prompt_tokens": recording.completion.num_cached_tokens,
    }


def measure(engine: Engine, recording: Recording) -> dict[str, Any]:
    """Times at growing lengths, up to the engine's context.

    Args:
        engine: The one that answered; it is left alone.
        recording: Whose text is read, repeated where it is too short, and with whose adapter.

    Returns:
        For each length in tokens: seconds to the first token, seconds of each next one with the cache, and seconds of
        one without it; each the median of several.
    """
    ids = recording.ids
    own = Engine(engine.model, engine.tokenizer, max_rows=1, max_length=engine.max_length)
    adapter = None
    if recording.adapter is not None:
        adapter = "the answer's"
        own.add_adapter(adapter, recording.adapter)
    lengths = lengths_up_to(own.max_length - STEPS, len(ids))
    began = now = time.perf_counter()
    found: list[dict[str, Any]] = []
    if lengths:
        _at_length(own, ids, lengths[0], adapter)  # what comes first pays for what is made once
    for length in lengths:
        before, now = now, time.perf_counter()
        if now - began + 4 * (now - before) > PATIENCE:
            break
        found.append(_at_length(own, ids, length, adapter))
    return {"rounds": ROUNDS, "steps": STEPS, "stopped_early": len(found) < len(lengths), "lengths": found}


def lengths_up_to(most: int, own: int) -> list[int]:
    """1, 2, 4, 8 … and the text's own length, as far as there is room."""
    doubling = [1]
    while doubling[-1] * 2 <= most:
        doubling.append(doubling[-1] * 2)
    return sorted({each for each in (*doubling, own, most) if 1 <= each <= most})


def _at_length(engine: Engine, ids: Sequence[int], length: int, adapter: str | None) -> dict[str, Any]:
    text = [ids[place % len(ids)] for place in range(length)]
    firsts, nexts, wholes = [], [], []
    for _ in range(ROUNDS):
        seen = _timed(engine, _fresh(engine, text, 1), STEPS, adapter)
        firsts.append(seen[0])
        nexts += [after - before for before, after in pairwise(seen)]
        # Without a cache the next token costs a reading of all the text, the newest token too.
        wholes.append(_timed(engine, _fresh(engine, [*text, text[0]], 2), 1, adapter)[0])
    return {
        "tokens": length,
        "ttft_seconds": rounded(median(firsts)),
        "with_cache": rounded(median(nexts)),
        "without_cache": rounded(median(wholes)),
    }


def _fresh(engine: Engine, text: Sequence[int], step: int) -> list[int]:
    """The text with a first token so many ids further: the only row holds the request before this one, and must not
    hold this one's beginning, which the engine would not read again.
    """
    return [(text[0] + step) % engine.tokenizer.vocab_size, *text[1:]]


def _timed(engine: Engine, ids: list[int], tokens: int, adapter: str | None) -> list[float]:
    """When each token of an answer came, in seconds since the request was submitted."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    began = time.perf_counter()
    request = engine.submit(ids, sampling, adapter=adapter, streamed=True)
    times = [time.perf_counter() - began for event in engine.events(request) if event.token_id is not None]
    completion = request.result()
    if completion.error is not None:
        raise ValueError(completion.error)
    assert completion.num_cached_tokens == 0, "a prompt that is measured must be read whole"
    return times
