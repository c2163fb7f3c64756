"""The only decode loop of the project: read prompts, choose tokens, make room, again.

Requests wait in a queue, enter free rows of one key/value cache while others decode (continuous batching), and leave as
soon as they are finished. Knows a model that takes a cache, and requests; does not know text, tokenizers, who asked, or
whether a request makes sense.

Shapes: N rows, T time, C hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from llmtrain.generation.request import GenerationRequest, Likely, Request, ScoreRequest
from llmtrain.generation.results import EngineStats
from llmtrain.generation.rows import Rows
from llmtrain.generation.sampling import BatchSampling, choose
from llmtrain.generation.scoring import score_piece
from llmtrain.model import CompiledOneToken, KVCache, OneToken, RowDeltas, Transformer, can_step

logger = logging.getLogger(__name__)


class DecodeLoop:
    """Runs requests through one model, many at a time.

    Args:
        model: The transformer, in evaluation mode whenever `step` is called.
        cache: The rows to run them in.
        excluded_ids: Ids that must never be chosen.
        prefill_tokens: The most prompt tokens, padding included, of one forward pass.
        trained_length: Text that grows beyond this many tokens gives one warning; None gives none.
        compile: Compile the decode step.

    Raises:
        ValueError: `compile`, and the model is no plain one on a CPU, or this machine cannot compile.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        excluded_ids: Sequence[int] = (),
        prefill_tokens: int = 2048,
        trained_length: int | None = None,
        compile: bool = False,
    ):
        self.model = model
        self.waiting: deque[Request] = deque()
        self.stats = EngineStats(cache_bytes=cache.bytes)
        self._prefill_tokens = prefill_tokens
        self._trained_length = trained_length
        self._rows = Rows(cache, model.config.vocab_size)
        self._device = cache.keys[0].device
        self._excluded = torch.zeros(model.config.vocab_size, device=self._device)  # (V,), added to logits
        self._excluded[list(excluded_ids)] = -torch.inf
        self._one_token = _decode_step(model, cache, compile)
        self._settings: BatchSampling | None = None  # of the decoding rows; None when these have changed

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit what fits, read prompts, generate one token for every decoding row.

        Returns:
            Whether any request is left.
        """
        if self.model.training:
            raise ValueError("the model is in training mode (dropout is on): call model.eval() before generating")
        try:
            self._advance()
        except BaseException as error:
            self._abandon(error)
            raise
        return bool(self.waiting or len(self._rows))

    def _advance(self) -> None:
        self._rows.admit(self.waiting.popleft() for _ in range(min(self._rows.free, len(self.waiting))))
        # Running rows wait for at most one forward pass of prompt reading; with none running, nobody waits.
        patient = self._rows.decoding == 0
        while self._rows.reading:
            self._prefill()
            if not patient:
                break
        if self._rows.decoding:
            self._decode()

    def _abandon(self, error: BaseException) -> None:
        """A round was broken off, so nobody knows what the rows hold: end what runs in them, and wipe them."""
        for request in self._rows.requests:
            if not request.done:
                request.fail(f"the engine was stopped: {error!r}")
        for row in reversed(range(len(self._rows))):
            self._rows.release(row, wipe=True)
        self._settings = None

    @torch.inference_mode()
    def drop(self, request: Request) -> bool:
        """Take a request out, waiting or running; returns whether it was there."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self._rows.requests:
            self._release([self._rows.requests.index(request)])
        else:
            return False
        return True

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._rows)

    def _prefill(self) -> None:
        """One forward pass over the prompts of the first reading rows."""
        started = time.perf_counter()
        start = self._rows.decoding
        # Those that generate wait for a quarter of what a pass may read when nobody does.
        count, width = self._rows.reading_group(self._prefill_tokens if not start else -(-self._prefill_tokens // 4))
        group = self._rows.requests[start : start + count]
        pieces = [request.input_ids[request.fed : request.fed + width] for request in group]
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (width - len(piece)) for piece in pieces]
        hidden = self.model.hidden_states(
            torch.tensor(padded, device=self._device),
            cache=self._rows.cache,
            rows=(start, start + count),
            new_lengths=lengths,
            deltas=self._deltas(group),
        )  # (N, T, C)
        score_piece(self.model, group, hidden, lengths, self._excluded)
        for request, length in zip(group, lengths, strict=True):
            request.fed += length
        self.stats.prefill_tokens += sum(lengths)
        self.stats.cached_tokens += sum(
            request.reused
            for request, length in zip(group, lengths, strict=True)
            if request.fed == request.reused + length
        )
        if group[0].fed == len(group[0].input_ids):  # else: one piece of a long prompt, and more to read
            self._rows.decoding += count
            self._begin(start, hidden, lengths)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _begin(self, start: int, hidden: Tensor, lengths: list[int]) -> None:
        """The rows from `start` on have been read: choose first tokens; those that were only scored leave."""
        self._settings = None
        rows, done = [], []
        for row, request in enumerate(self._rows.requests[start : start + len(lengths)], start):
            if isinstance(request, ScoreRequest):
                request.complete()
                done.append(row)
                continue
            rows.append(row)
            if request.params.repetition_penalty != 1:
                self._rows.note_prompt(row)
        if rows:
            of_group = torch.tensor([row - start for row in rows], device=self._device)
            last = torch.tensor([lengths[row - start] - 1 for row in rows], device=self._device)
            requests = self._generating(rows)
            settings = BatchSampling.of([request.params for request in requests], self._device)
            logits = self.model.logits(hidden[of_group, last], self._deltas(requests))
            done += self._choose(rows, logits, settings)
            for request in requests:
                self.stats.first_tokens += request.ttft_seconds is not None
                self.stats.ttft_seconds_sum += request.ttft_seconds or 0.0
        self._release(sorted(done))

    def _decode(self) -> None:
        """One more token for every decoding row."""
        started = time.perf_counter()
        rows = list(range(self._rows.decoding))
        requests = self._generating(rows)
        last = torch.tensor([request.token_ids[-1] for request in requests], device=self._device)
        if self._settings is None:
            self._settings = BatchSampling.of([request.params for request in requests], self._device)
        self._release(self._choose(rows, self._step_logits(requests, last), self._settings))
        self.stats.decode_tokens += len(rows)
        self.stats.decode_seconds += time.perf_counter() - started

    def _step_logits(self, requests: list[GenerationRequest], last: Tensor) -> Tensor:
        """Reads each decoding row's last token (N,); returns the scores of its next one (N, V)."""
        deltas = self._deltas(requests)
        if deltas is None and self._one_token is not None:
            return self._one_token(last, self._rows.cache, len(requests))
        hidden = self.model.hidden_states(
            last.unsqueeze(1), cache=self._rows.cache, rows=(0, len(requests)), deltas=deltas
        )  # (N, 1, C)
        return self.model.logits(hidden.squeeze(1), deltas)

    def _deltas(self, requests: Sequence[Request]) -> RowDeltas | None:
        return RowDeltas.of([request.adapter for request in requests], self._device)

    def _choose(self, rows: list[int], logits: Tensor, settings: BatchSampling) -> list[int]:
        """Choose a token for each row from its logits (N, V) and hand it over; returns the rows that are done."""
        requests = self._generating(rows)
        logits = logits.float()
        uniform = seen = None
        if not settings.all_greedy:
            uniform = torch.tensor([request.uniform() for request in requests], device=self._device)
        if settings.penalty is not None:
            seen = self._rows.seen(rows)
        ids = choose(logits + self._excluded, settings, uniform, seen)  # (N,)
        if settings.penalty is not None:
            self._rows.note_tokens(rows, ids)
        details = self._details(requests, logits, ids, uniform)
        done = []
        for row, request, token_id, detail in zip(rows, requests, ids.tolist(), details, strict=True):
            if request.accept(token_id, *detail):
                done.append(row)
            if self._trained_length is not None and request.length > self._trained_length:
                self._warn_length(self._trained_length)
        return done

    def _details(
        self, requests: list[GenerationRequest], logits: Tensor, ids: Tensor, uniform: Tensor | None
    ) -> list[tuple[()] | tuple[float, Likely]]:
        """Per row: the chosen token's log-probability and the likeliest tokens, or nothing where nobody asked.

        Observers are told here, too.
        """
        if not any(request.wants_details for request in requests):
            return [()] * len(requests)
        for row, request in enumerate(requests):
            if request.observer is not None:
                drawn = None if uniform is None or request.params.greedy else float(uniform[row])
                request.observer(logits[row], self._excluded, drawn)
        logprobs = logits.log_softmax(dim=-1)  # over all V, as in training and in scoring
        chosen = logprobs.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1).tolist()
        top = (logprobs + self._excluded).topk(max(request.candidates for request in requests), dim=-1)
        likely = [
            list(zip(ids, probabilities, strict=True))
            for ids, probabilities in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
        ]
        return [(chosen[i], likely[i][: request.candidates]) for i, request in enumerate(requests)]

    def _release(self, rows: Sequence[int]) -> None:
        """Free rows, given in ascending order; from the last one down, so that what fills a gap is no row to free."""
        for row in reversed(rows):
            self._rows.release(row, wipe=self._rows.requests[row].failed)
            self._settings = None

    def _generating(self, rows: Sequence[int]) -> list[GenerationRequest]:
        requests = self._rows.requests
        return [requests[row] for row in rows]  # type: ignore[misc]  # score requests never get this far

    def _warn_length(self, trained_length: int) -> None:
        self._trained_length = None
        logger.warning(
            "the text is now longer than the %d tokens that the model was trained on: expect it to get worse",
            trained_length,
        )


@torch.inference_mode()
def _decode_step(model: Transformer, cache: KVCache, compile: bool) -> OneToken | None:
    """The way to read one token for many rows that is faster than the model's own, where there is one."""
    if not can_step(model):
        if compile:
            raise ValueError(
                "compile=true is for a model on a CPU in fp32 or bf16, without an adapter's own layers: leave it out"
            )
        return None
    return CompiledOneToken(model, cache) if compile else OneToken(model)
