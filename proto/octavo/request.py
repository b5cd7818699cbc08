"""The arguments of a request, and the message made of them. Values are checked by the server, which knows the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from google.protobuf.duration_pb2 import Duration

from octavo.v1 import generation_pb2 as pb

# One user's message; or the whole conversation: {"role": …, "content": …} or (role, content), oldest first.
Conversation = str | Sequence[Mapping[str, str] | tuple[str, str]]


class GenerateOptions(TypedDict, total=False):
    """Arguments of `generate` and `complete`, by keyword. One prompt is needed; all else may be absent."""

    text: str  # a prompt to go on with
    token_ids: Sequence[int]  # a prompt of ids, fed as they are
    chat: Conversation  # a conversation, rendered by the model's chat template
    add_generation_prompt: bool  # of a chat: end with the header of an assistant's turn (True)

    temperature: float  # 0 is greedy; absent: the model's default, as for those down to repetition_penalty
    top_k: int  # keep the k best tokens; 0 keeps all
    top_p: float  # keep the best tokens that make up this probability
    min_p: float  # drop tokens less likely than this share of the best
    repetition_penalty: float  # 1 changes nothing
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    seed: int  # absent: drawn, and told in Started

    n: int  # outputs (1)
    beam_width: int  # beam search with so many hypotheses
    max_tokens: int  # of an output; absent: what the model can hold
    min_tokens: int
    stop: str | Sequence[str]  # end where one of these appears
    stop_token_ids: Sequence[int]
    include_stop: bool  # keep the stop string in the text (False)
    ignore_eos: bool  # go on over the model's end (False)
    echo: bool  # put the prompt before the output's text (False)
    logprobs: int  # report each token's log probability, and so many alternatives
    prompt_logprobs: int

    priority: int  # smaller is served first (0)
    cache_salt: str  # prefix-cache hits only among requests of one salt
    queue_timeout: float  # seconds that the request may wait
    request_id: str  # absent: the server's choice, told in Started
    tenant: str


_SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def request_of(options: GenerateOptions) -> pb.GenerateRequest:
    """None means absent. Raises TypeError for an unknown argument; ValueError unless there is exactly one prompt, or
    for a value that the wire cannot carry."""
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unknown argument {sorted(unknown)[0]!r}")
    prompts = sorted({"text", "token_ids", "chat"} & given.keys())
    if len(prompts) != 1:
        raise ValueError(f"exactly one of text=, token_ids= and chat= is needed; given: {prompts or 'none'}")
    request = pb.GenerateRequest()
    for name, value in given.items():
        match name:
            case "token_ids":
                request.token_ids.SetInParent()
                _set(request.token_ids, "ids", value)
            case "chat":
                request.chat.CopyFrom(chat_of(options["chat"], options.get("add_generation_prompt")))
            case "add_generation_prompt":
                pass
            case "stop":
                _set(request, "stop", [value] if isinstance(value, str) else value)
            case "queue_timeout":
                request.queue_timeout.CopyFrom(_duration(options["queue_timeout"]))
            case _:
                _set(request.sampling if name in _SAMPLING else request, name, value)
    return request


def chat_of(conversation: Conversation, add_generation_prompt: bool | None = None) -> pb.Chat:
    if isinstance(conversation, str):
        conversation = [("user", conversation)]
    chat = pb.Chat(add_generation_prompt=add_generation_prompt)
    for message in conversation:
        role, content = message if isinstance(message, tuple) else (message["role"], message["content"])
        try:
            chat.messages.add(role=role, content=content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the message {(role, content)!r} cannot be sent: {error}") from None
    return chat


def _set(message: pb.SamplingParams | pb.GenerateRequest | pb.TokenIds, name: str, value: object) -> None:
    try:
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} cannot be sent: {error}") from None


def watch_of(interval: float | None) -> pb.WatchLoadRequest:
    """Of an interval in seconds; None: the server's default."""
    return pb.WatchLoadRequest(interval=None if interval is None else _duration(interval))


def watch_blocks_of(interval: float | None) -> pb.WatchBlocksRequest:
    """As `watch_of`."""
    return pb.WatchBlocksRequest(interval=None if interval is None else _duration(interval))


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration
