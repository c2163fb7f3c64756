"""EleutherAI's lm-evaluation-harness on the engine: its requests in, log-likelihoods and answers out.

    python -m llmtrain.evaluation.harness --model llmtrain --model_args model=runs/pretrain/latest --tasks …

is lm-eval's own command line, which knows this model then; lm-eval 0.4 finds no models of other packages by itself.
All requests of a call are queued at once, those that begin alike next to each other, and the engine does the rest.
Needs the extra `harness`: nothing imports this module but who wants to run lm-eval. Knows nothing of tasks and their
metrics.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llmtrain.generation import Engine, SamplingParams
from llmtrain.tokenizer import render_chat
from llmtrain.tokenizer.chat import END, ROLE_TOKENS, chat_template

logger = logging.getLogger(__name__)

MAX_GEN_TOKS = 256
"""The most tokens of an answer where the task does not say; lm-eval's `hf` has the same."""

_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
_MEANINGLESS = {"do_sample", "temperature", "until", "max_gen_toks", "use_cache", "num_beams"}  # or read elsewhere
_MARKERS = re.compile("|".join(re.escape(token) for token in (*ROLE_TOKENS.values(), END)))


class EngineLM(TemplateLM):
    """A model of ours as lm-eval asks one; the same token ids as its `hf` for all text without special-token strings.

    Args:
        engine: Whose model is asked.
        name: What fingerprints of lm-eval's caches call it.
        rank, world_size: Which part of the items this process takes; lm-eval deals them out.
    """

    def __init__(self, engine: Engine, *, name: str = "llmtrain", rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.engine = engine
        self.name = name
        self._rank, self._world_size = rank, world_size
        self._chats: dict[str, list[int]] = {}  # a conversation up to its last marker → its ids
        self._told: set[str] = set()

    # What the model is

    @property
    def eot_token_id(self) -> int:
        return self.engine.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: the begin-of-text token where there is one, else end-of-text."""
        bos = self.engine.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        return self.name

    # Text to ids

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """A text's ids, with exactly one begin-of-text token in families that have one.

        Special-token strings in a text stay ordinary text; only conversations that `apply_chat_template` made have
        role markers.
        """
        tokenizer = self.engine.tokenizer
        for marker in reversed(list(_MARKERS.finditer(string)) if self._chats else []):
            ids = self._chats.get(string[: marker.end()])
            if ids is not None:
                return ids + tokenizer.encode(string[marker.end() :])
        if add_special_tokens is False or not tokenizer.add_bos_token:
            return tokenizer.encode(string)
        return tokenizer.begin(tokenizer.encode(string.removeprefix(tokenizer.bos_token or "")))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As everywhere in lm-eval, the ids of both together, divided; apart where the two become one token."""
        ids, following = super()._encode_pair(context, continuation)
        if continuation and not following:
            following = self.tok_encode(continuation, add_special_tokens=False)
        return ids, following

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, as lm-eval wants it; its ids are kept, rendered piece by piece.

        Args:
            chat_history: Messages with "role" and "content".
            add_generation_prompt: False leaves the last answer open, to be continued.

        Raises:
            ValueError: Another conversation of other ids reads the same as text.
        """
        tokenizer = self.engine.tokenizer
        ids, _ = render_chat(chat_history, tokenizer, add_generation_prompt=add_generation_prompt)
        pieces = [tokenizer.bos_token or ""] if tokenizer.add_bos_token else []
        for message in chat_history:
            pieces += [ROLE_TOKENS[message["role"]], message["content"]]
            pieces += [END] if message["role"] == "assistant" else []
        if add_generation_prompt:
            pieces.append(ROLE_TOKENS["assistant"])
        rest = ""
        if not add_generation_prompt and chat_history and chat_history[-1]["role"] == "assistant":
            rest = chat_history[-1]["content"]
            pieces = pieces[:-2]
            ids = ids[: len(ids) - 1 - len(tokenizer.encode(rest))]
        elif pieces and not add_generation_prompt:
            rest = pieces.pop()
            ids = ids[: len(ids) - len(tokenizer.encode(rest))]
        text = "".join(pieces)
        if self._chats.setdefault(text, ids) != ids:
            raise ValueError(
                f"two conversations read the same as text, since a message holds role markers: {text[:80]!r}; take the "
                "markers out of the task's texts"
            )
        return text + rest

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return _template(self.engine) if chat_template else None

    # Requests

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Summed log-probability of each continuation, and whether greedy decoding would write it.

        What exceeds the context is cut from the left, with a warning.

        Raises:
            ValueError: A continuation that alone exceeds the context, or scores that are not finite.
        """
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        cut = sum(len(context) < len(given) for (context, _), (_, given, _) in zip(pairs, requests, strict=True))
        self._warn_of_cuts(cut, len(requests))
        asked = [number for number, (_, continuation) in enumerate(pairs) if continuation]
        asked.sort(key=lambda number: [*pairs[number][0], *pairs[number][1]])  # what begins alike stands together
        answers = [(0.0, True)] * len(requests)  # nothing is certain
        for number, score in zip(asked, self.engine.score([pairs[number] for number in asked]), strict=True):
            if score.error:
                raise ValueError(f"request {number + 1} of {len(requests)} cannot be scored: {score.error}")
            answers[number] = score.logprob_sum, score.greedy
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts; one that exceeds the context is read in windows that follow each other."""
        windows: list[tuple[None, list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            ends.append(len(windows))
        scores = [logprob for logprob, _ in self._loglikelihood_tokens(windows)]
        totals = [sum(scores[start:end]) for start, end in pairwise(ends)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers, each up to its first stop string or end token.

        A context that leaves less room than the answer may take is cut from the left, with a warning.

        Raises:
            ValueError: Settings that cannot be followed, an answer without room, or scores that are not finite.
        """
        prompts: list[list[int]] = []
        sampling: list[SamplingParams] = []
        cut = 0
        for request in requests:
            text, given = request.args
            params = self._sampling(given)
            ids = self.tok_encode(text) or [self.prefix_token_id]
            room = self.max_length - params.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks={params.max_new_tokens} leaves no room for a context in {self.max_length} tokens: "
                    f"lower it to at most {self.max_length - 1}"
                )
            cut += len(ids) > room
            prompts.append(ids[-room:])
            sampling.append(params)
        self._warn_of_cuts(cut, len(requests))
        order = sorted(range(len(prompts)), key=prompts.__getitem__)
        done = self.engine.generate([prompts[number] for number in order], [sampling[number] for number in order])
        texts = [""] * len(prompts)
        for number, completion in zip(order, done, strict=True):
            if completion.error:
                raise ValueError(f"request {number + 1} of {len(prompts)} cannot be answered: {completion.error}")
            texts[number] = completion.text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair, its context without what exceeds the model's from the left."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens exceeds the context of {self.max_length}: shorten the "
                "task's texts, or take a model with a longer context"
            )
        excess = len(context) + len(continuation) - self.max_length - 1
        return (context[excess:] if excess > 0 else context), continuation

    def _warn_of_cuts(self, cut: int, count: int) -> None:
        if cut:
            logger.warning(
                "%d of %d contexts are too long for %d tokens and were cut from the left", cut, count, self.max_length
            )

    def _sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        values: dict[str, Any] = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        if values.get("num_beams", 1) != 1:
            raise ValueError(f"num_beams={values['num_beams']}: the engine follows one beam; leave it out of the task")
        for name in sorted(values.keys() - {*_SAMPLING, *_MEANINGLESS} - self._told):
            self._told.add(name)
            logger.warning("generation_kwargs.%s=%s is not used: the engine has no such setting", name, values[name])
        temperature = float(values.get("temperature", 1.0)) if values.get("do_sample") else 0.0
        return SamplingParams(
            temperature=temperature,
            max_new_tokens=values["max_gen_toks"],
            stop=tuple(text for text in values["until"] if text),
            **{name: values[name] for name in _SAMPLING if values.get(name) is not None},
        )

    # Several processes

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """What every process has to say, on `dst`; None on the others."""
        if self._world_size == 1:
            return [obj]
        import torch.distributed as dist

        heard = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, heard, dst=dst)
        return heard

    def all_gather(self, tensor: Any) -> Any:
        """One tensor per process, joined along the first dimension."""
        if self._world_size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(tensor.reshape(-1)) for _ in range(self._world_size)]
        dist.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def barrier(self) -> None:
        if self._world_size > 1:
            import torch.distributed as dist

            dist.barrier()


@register_model("llmtrain")
class FolderLM(EngineLM):
    """`EngineLM` of a run, checkpoint, model folder or adapter, with the arguments that lm-eval's command line gives.

    Args:
        model: The folder.
        batch_size: The most requests that run at once; `auto` takes 64.
        device: `cpu` or `cuda`, which takes the CPU where there is no GPU; None is `cuda`.
        precision: `fp32`, `bf16`, `fp16`, or `auto`: as the folder stores it.
        max_length: The most tokens of context and continuation; None takes the model's context.
        max_batch_size: Not used; lm-eval passes it.

    Raises:
        ValueError: No model there, or a wrong argument.
    """

    def __init__(
        self,
        model: str,
        *,
        batch_size: int | str | None = "auto",
        device: str | None = None,
        precision: str = "auto",
        max_length: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        import torch

        from llmtrain.checkpoint import load_model_folder

        dtypes = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        if precision not in dtypes:
            raise ValueError(f"precision={precision}: give one of {', '.join(dtypes)}")
        where = device or "cuda"
        if where.startswith("cuda") and not torch.cuda.is_available():  # lm-eval's command line asks for cuda:0 itself
            where = "cpu"
            logger.info("there is no GPU that torch can use: the model runs on the CPU")
        loaded = load_model_folder(model, device=torch.device(where), dtype=dtypes[precision])
        rows = 64 if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            max_rows=rows,
            max_length=max_length,
            eos_ids=loaded.eos_ids,
            trained_length=loaded.info.get("trained_length"),
        )
        super().__init__(engine, name=str(loaded.adapter_folder or loaded.folder).replace("/", "__"))


def _template(engine: Engine) -> str:
    return chat_template(bos=engine.tokenizer.add_bos_token)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
