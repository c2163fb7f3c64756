"""A stream of tokens that stands for a shard folder."""

from pathlib import Path

import numpy as np
import pytest


class Stream:
    """What is asked of a ShardSet here, over a list of ids; it claims to come from `utf8_bytes` bytes of text."""

    folder = Path("stream")

    def __init__(self, ids, utf8_bytes):
        self.ids = np.array(ids, dtype=np.int64)
        self.num_tokens = len(ids)
        self.utf8_bytes = utf8_bytes

    def read(self, start, count):
        return self.ids[start : start + count]


@pytest.fixture(scope="session")
def stream():
    return Stream
