"""From what the engine says to the bytes of an answer, whole or as a stream of server-sent events.

A stream writes one chunk per token, so its chunks are put together from parts made once; nothing else here is hot.
Knows the API's shapes and the tokens' bytes; does not know HTTP, queues or how a request was written.
"""

from __future__ import annotations

import codecs
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from llmtrain.generation.results import Candidate, Completion, Event

LEAST_LOGPROB = -9999.0
"""Stands for a probability of zero, whose logarithm JSON cannot say; the API's own number."""
DONE = b"data: [DONE]\n\n"
_REASONS = {"stop": "stop", "length": "length", "context": "length"}


@dataclass(frozen=True)
class Form:
    """What the chunks of one answer share.

    Args:
        chat: A chat's answer; otherwise a completion's.
        model: The name that was asked for.
        token_bytes: The bytes of a token.
        logprobs: Whether to report them.
        include_usage: Whether a stream ends with the usage.
        echoes: Per choice, the prompt to be repeated before the answer; empty for none.
    """

    chat: bool
    model: str
    token_bytes: Callable[[int], bytes]
    logprobs: bool = False
    include_usage: bool = False
    echoes: Sequence[str] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, *, chunk: bool) -> dict[str, Any]:
        """The fields in front of the choices."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def echo(self, index: int) -> str:
        """What is repeated before a choice."""
        return self.echoes[index] if self.echoes else ""


def finish_reason(completion: Completion) -> str:
    """The API's word for the end of a completion; a full context counts as its length."""
    return _REASONS.get(completion.finish_reason, "stop")


def timing(completion: Completion) -> dict[str, Any]:
    """Our extra: times of one completion, and the seed that gives it again."""
    ttft, tokens = completion.ttft_seconds, len(completion.token_ids)
    after = completion.seconds - (ttft or 0.0)
    return {
        "ttft_ms": None if ttft is None else round(1000 * ttft, 3),
        "tokens_per_second": round((tokens - 1) / after, 2) if tokens > 1 and after > 0 else None,
        "seconds": round(completion.seconds, 4),
        "seed": completion.seed,
    }


def usage(completions: Sequence[Completion], choices: int) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once however many choices it has."""
    prompt = sum(each.num_prompt_tokens for each in completions[::choices])
    cached = sum(each.num_cached_tokens for each in completions[::choices])
    made = sum(len(each.token_ids) for each in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole(form: Form, completions: Sequence[Completion], choices: int) -> dict[str, Any]:
    """An answer in one piece."""
    answers = []
    for index, completion in enumerate(completions):
        choice: dict[str, Any] = {"index": index}
        if form.chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = form.echo(index) + completion.text
        logprobs = _logprobs(form, _steps(completion), len(form.echo(index))) if form.logprobs else None
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason(completion), "llmtrain": timing(completion)}
        answers.append(choice)
    return {**form.head(chunk=False), "choices": answers, "usage": usage(completions, choices)}


class StreamEncoder:
    """Writes the chunks of one answer.

    Args:
        form: What they share.
        choices: How many answers each prompt has.
        count: How many answers there are.
    """

    def __init__(self, form: Form, choices: int, count: int):
        self._form, self._choices = form, choices
        head = json.dumps(form.head(chunk=True), ensure_ascii=False)[:-1]
        self._head = head
        self._starts = [f'data: {head}, "choices": [{{"index": {index}, ' for index in range(count)]
        self._tail = ', "usage": null}\n\n' if form.include_usage else "}\n\n"
        self._offsets = [len(form.echo(index)) for index in range(count)]
        self._completions: list[Completion | None] = [None] * count

    def opening(self) -> bytes:
        """What comes before the first token: the role of a chat's answer, an echoed prompt."""
        form, parts = self._form, []
        for index, start in enumerate(self._starts):
            if form.chat:
                delta = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null}]'
                parts.append(f"{start}{delta}{self._tail}")
            elif form.echo(index):
                text = encode_basestring(form.echo(index))
                parts.append(f'{start}"text": {text}, "logprobs": null, "finish_reason": null}}]{self._tail}')
        return "".join(parts).encode()

    def chunk(self, index: int, event: Event) -> str:
        """One event; empty when there is nothing to tell yet (half a character)."""
        completion = event.completion
        if not event.text and completion is None and not self._form.logprobs:
            return ""
        logprobs = "null"
        if self._form.logprobs and event.token_id is not None:
            step = (event.token_id, event.logprob, event.candidates)
            logprobs = json.dumps(_logprobs(self._form, [step], self._offsets[index]), ensure_ascii=False)
            self._offsets[index] += len(event.text)
        text = encode_basestring(event.text)
        if not self._form.chat:
            content = f'"text": {text}'
        elif event.text or completion is None:
            content = f'"delta": {{"content": {text}}}'
        else:
            content = '"delta": {}'
        if completion is None:
            return f'{self._starts[index]}{content}, "logprobs": {logprobs}, "finish_reason": null}}]{self._tail}'
        self._completions[index] = completion
        return (
            f'{self._starts[index]}{content}, "logprobs": {logprobs}, "finish_reason": "{finish_reason(completion)}"}}]'
            f', "llmtrain": {json.dumps(timing(completion))}{self._tail}'
        )

    def closing(self) -> bytes:
        """What comes after the last token: the usage, if it was asked for, and the end mark."""
        done = [each for each in self._completions if each is not None]
        if not self._form.include_usage:
            return DONE
        total = json.dumps(usage(done, self._choices))
        return f'data: {self._head}, "choices": [], "usage": {total}}}\n\n'.encode() + DONE


def error_chunk(body: dict[str, Any]) -> bytes:
    """An error in the middle of a stream."""
    return f"data: {json.dumps(body)}\n\n".encode() + DONE


_Step = tuple[int, float | None, list[Candidate] | None]


def _steps(completion: Completion) -> list[_Step]:
    candidates: Sequence[list[Candidate] | None] = completion.candidates or [None] * len(completion.token_ids)
    return list(zip(completion.token_ids, completion.logprobs or (), candidates, strict=True))


def _logprobs(form: Form, steps: Sequence[_Step], offset: int) -> dict[str, Any]:
    """Log-probabilities as the chat's or the completion's API has them, with the tokens' ids besides."""
    if form.chat:
        content = []
        for token_id, logprob, candidates in steps:
            likely = [_named(form, each.token_id, _log(each.probability)) for each in candidates or ()]
            content.append({**_named(form, token_id, _finite(logprob)), "top_logprobs": likely})
        return {"content": content, "refusal": None}
    tokens = [_text(form, token_id) for token_id, _, _ in steps]
    offsets, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
    for token_id, _, _ in steps:
        offsets.append(offset)
        offset += len(decoder.decode(form.token_bytes(token_id)))
    return {
        "tokens": tokens,
        "token_ids": [token_id for token_id, _, _ in steps],
        "token_logprobs": [_finite(logprob) for _, logprob, _ in steps],
        "top_logprobs": [
            None if likely is None else {_text(form, each.token_id): _log(each.probability) for each in likely}
            for _, _, likely in steps
        ],
        "text_offset": offsets,
    }


def _named(form: Form, token_id: int, logprob: float) -> dict[str, Any]:
    data = form.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "token_id": token_id, "logprob": logprob, "bytes": list(data)}


def _text(form: Form, token_id: int) -> str:
    """A token where the API has only room for text: half a character is written as OpenAI does, `bytes:\\xe4\\xb8`."""
    data = form.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _log(probability: float) -> float:
    return max(math.log(probability), LEAST_LOGPROB) if probability > 0 else LEAST_LOGPROB


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob
