"""What a request may say: the fields of OpenAI's API that are supported here, and a few of ours.

A body is checked before anything else happens with it. Three kinds of fields: those that are used; those that change
nothing here and are accepted (`user`, `metadata` …); and those that would change the answer and are not supported,
which are refused by name unless they have the one value that asks for nothing. Any other field is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from llmtrain.generation import SamplingParams

MOST_CHOICES = 128
MOST_CANDIDATES = 20
MOST_MESSAGES = 4096
MOST_PROMPTS = 1024
SEED_END = 2**63 - 1


class ApiError(Exception):
    """A request that is refused, in the API's own shape.

    Args:
        status: The HTTP status.
        message: One sentence.
        param: The field.
        code: A word for programs.
        headers: More headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The error as the API writes it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) <= 2**53


_Strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_WHOLE = BeforeValidator(lambda value: int(value) if _is_whole(value) else value)
"""To JSON 3 and 3.0 are the same number."""
Text = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31), _WHOLE]


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = _Strict
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation. What clients send back of an answer, all null, is accepted."""

    model_config = _Strict
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As the chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = _Strict
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(BaseModel):
    """The only format there is."""

    model_config = _Strict
    type: Literal["text"]


class _Sampled(BaseModel):
    """What completions and chats have in common."""

    model_config = _Strict
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), _WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), _WHOLE] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=0, le=SEED_END), _WHOLE] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted, and of no consequence here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Not supported: only with the value that asks for nothing.
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """How long an answer may be, if the request says so."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        """How many answers."""
        return self.n or 1

    def sampling(self, most: int, default: int) -> SamplingParams:
        """The sampling settings of the first choice; choice i of a stated seed has the seed + i.

        Args:
            most: The server's limit on the tokens of an answer.
            default: What counts when the request states none.

        Raises:
            ApiError: More tokens than the limit.
        """
        tokens = self.most_tokens
        if tokens is not None and tokens > most:
            raise ApiError(400, f"max_tokens={tokens} is more than this server gives, {most}", param="max_tokens")
        given = {"top_k": self.top_k, "min_p": self.min_p, "repetition_penalty": self.repetition_penalty}
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_new_tokens=tokens or default,
            stop=tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(_Sampled):
    """`POST /v1/completions`."""

    model_config = _Strict | ConfigDict(
        json_schema_extra={
            "not": {
                "properties": {"echo": {"const": True}, "logprobs": {"type": "integer"}},
                "required": ["echo", "logprobs"],
            }
        }
    )
    prompt: (
        Text
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_CANDIDATES), _WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1), _WHOLE] | None = None
    suffix: Annotated[str, StringConstraints(max_length=0)] | None = None


class ChatRequest(_Sampled):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_CANDIDATES), _WHOLE] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None

    @property
    def most_tokens(self) -> int | None:
        """The newer name goes first."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: a text as completions read it, or a conversation as a chat does."""

    model_config = _Strict | ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}, "required": ["prompt"]},
                {"properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}, "required": ["messages"]},
            ]
        }
    )
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = _Strict
    model: str | None = None
    tokens: list[TokenId]


REQUESTS: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
# Known to the API, and refused with any value that asks for something.
_UNSUPPORTED = frozenset(
    (
        *("logit_bias", "presence_penalty", "frequency_penalty", "best_of", "suffix", "response_format", "modalities"),
        *("tools", "tool_choice", "tool_calls", "functions", "function_call", "parallel_tool_calls", "audio"),
        *("prediction", "web_search_options", "reasoning_effort", "verbosity"),
    )
)


def read(kind: type[BaseModel], body: bytes) -> Any:
    """One body, checked.

    Raises:
        ApiError: It is no JSON, or not this request; the message names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
    # Of a union's branches the one that came furthest knows best what is wrong.
    fault = max(faults, key=lambda each: len(_path(each["loc"])))
    path = _path(fault["loc"])
    name = ".".join(map(str, path))
    if path and path[0] in _UNSUPPORTED and fault["type"] != "missing":
        hint = " (repetition_penalty is)" if str(path[0]).endswith("penalty") else ""
        raise ApiError(400, f"{path[0]} is not supported here{hint}: leave it out", param=str(path[0]))
    if fault["type"] == "extra_forbidden":
        raise ApiError(400, f"there is no field {_short(name)}", param=_short(name))
    message = fault["msg"][:300]
    raise ApiError(400, f"{_short(name)}: {message}" if name else message, param=_short(name) or None)


def _path(loc: Iterable[int | str]) -> list[int | str]:
    """Where a fault is, without pydantic's names of a union's branches."""
    return [each for each in loc if isinstance(each, int) or (each.isidentifier() and each not in _BRANCHES)]


_BRANCHES = frozenset({"str", "constrained-str"})


def _short(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:80]}…"
