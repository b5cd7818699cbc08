"""From a GenerateRequest to a Submission: every field checked, every default resolved.

Knows the message and the model's numbers; knows no engine and no tokenizer. A field that cannot be served raises
InvalidArgument with its name, its value and the reason; what is returned can be run as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.v1 import generation_pb2 as pb

from scheduler.caller import tenant_of
from scheduler.chat_template import Message
from scheduler.core.request import SamplingParams
from scheduler.outputs import ModelInfo, Submission
from scheduler.statuses import InvalidArgument

MAX_ID_CHARACTERS = 128
MAX_ROLE_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_QUEUE_TIMEOUT_SECONDS = 24 * 3600.0
MIN_WATCH_SECONDS = 0.1
DEFAULT_WATCH_SECONDS = 1.0
MAX_WATCH_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is, and its name among theirs. None: to be chosen."""

    tenant: str
    request_id: str | None


def read_identity(request: pb.GenerateRequest | pb.AbortRequest) -> Identity:
    """Raises InvalidArgument, or NotPermitted for a tenant that is not the caller's."""
    tenant = tenant_of(_name("tenant", request.tenant) if request.HasField("tenant") else None)
    named = isinstance(request, pb.AbortRequest) or request.HasField("request_id")
    return Identity(tenant, _name("request_id", request.request_id) if named else None)


def _salt_of(tenant: str, salt: str) -> str:
    """A tenant's own, whatever salts the others choose: how soon an answer begins tells nothing of their prompts."""
    return f"{len(tenant)}:{tenant}:{salt}"


def read_messages(chat: pb.Chat, max_model_len: int) -> list[Message]:
    """The conversation of a request. Empty messages cost no bytes, but a template's time: so their number is bound."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", [], "a conversation has at least one message")
    if len(chat.messages) > max_model_len:
        raise InvalidArgument(
            "chat.messages", f"{len(chat.messages)} messages", f"more than the {max_model_len} tokens of max_model_len"
        )
    for i, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= MAX_ROLE_CHARACTERS:
            raise InvalidArgument(
                f"chat.messages[{i}].role", message.role, f"must have 1 to {MAX_ROLE_CHARACTERS} characters"
            )
    return [Message(message.role, message.content) for message in chat.messages]


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        i = next(i for i, token_id in enumerate(token_ids) if token_id >= vocab_size)
        raise InvalidArgument(f"{field}[{i}]", token_ids[i], f"not in the vocabulary of {vocab_size} tokens")


def read_submission(
    request: pb.GenerateRequest,
    prompt_token_ids: Sequence[int],
    model: ModelInfo,
    *,
    seed: int,
    queue_timeout: float,
    request_id: str = "",
    share_prefixes: bool = False,
) -> Submission:
    """`prompt_token_ids` are those of the request's prompt; `seed` and `queue_timeout` stand in for absent fields.
    `share_prefixes`: cached prefixes are found by other tenants too."""
    identity = read_identity(request)
    max_tokens = _max_tokens(request, len(prompt_token_ids), model)
    check_token_ids(_prompt_field(request), prompt_token_ids, model.vocab_size)
    n, beam_width = _num_outputs(request, model)
    check_stop_strings(request)
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", request.cache_salt, f"at most {MAX_SALT_CHARACTERS} characters")
    sampling = _sampling(request, model, seed)
    if sampling.min_tokens > max_tokens:
        raise InvalidArgument("min_tokens", sampling.min_tokens, f"more than the {max_tokens} tokens that are possible")
    return Submission(
        prompt_token_ids=tuple(prompt_token_ids),
        n=n,
        beam_width=beam_width,
        max_tokens=max_tokens,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt if share_prefixes else _salt_of(identity.tenant, request.cache_salt),
        queue_timeout=_queue_timeout(request, queue_timeout),
        tenant=identity.tenant,
        request_id=request_id,
    )


def read_interval(request: pb.WatchLoadRequest | pb.WatchBlocksRequest) -> float:
    """Seconds between two messages."""
    if not request.HasField("interval"):
        return DEFAULT_WATCH_SECONDS
    seconds = request.interval.seconds + request.interval.nanos / 1e9
    if not 0 <= seconds <= MAX_WATCH_SECONDS:
        raise InvalidArgument("interval", f"{seconds:g} s", f"must be in [0 s, {MAX_WATCH_SECONDS:g} s]")
    return max(seconds, MIN_WATCH_SECONDS)


def check_stop_strings(request: pb.GenerateRequest) -> None:
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop", f"{len(request.stop)} strings", f"at most {MAX_STOP_STRINGS}")
    for i, string in enumerate(request.stop):
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            raise InvalidArgument(f"stop[{i}]", string, f"must have 1 to {MAX_STOP_CHARACTERS} characters")


def _name(field: str, name: str) -> str:
    if not 1 <= len(name) <= MAX_ID_CHARACTERS or not name.isprintable():
        raise InvalidArgument(field, name, f"must have 1 to {MAX_ID_CHARACTERS} printable characters")
    return name


def _prompt_field(request: pb.GenerateRequest) -> str:
    return {"token_ids": "token_ids.ids"}.get(kind := request.WhichOneof("prompt") or "prompt", kind)


def _max_tokens(request: pb.GenerateRequest, num_prompt_tokens: int, model: ModelInfo) -> int:
    """What is asked for, bounded by what the model and the pool of blocks can hold."""
    field = _prompt_field(request)
    if num_prompt_tokens == 0:
        raise InvalidArgument(field, "", "the prompt has no tokens")
    limit = min(model.max_model_len, model.capacity_tokens)
    if num_prompt_tokens >= limit:
        raise InvalidArgument(
            field,
            f"{num_prompt_tokens} tokens",
            f"no room for an output: max_model_len is {model.max_model_len}, "
            f"and the KV cache holds {model.capacity_tokens} tokens",
        )
    if request.HasField("max_tokens") and request.max_tokens == 0:
        raise InvalidArgument("max_tokens", 0, "must be at least 1")
    left = limit - num_prompt_tokens
    return min(request.max_tokens, left) if request.HasField("max_tokens") else left


def _num_outputs(request: pb.GenerateRequest, model: ModelInfo) -> tuple[int, int | None]:
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= model.max_num_seqs:
        raise InvalidArgument("n", n, f"must be in [1, {model.max_num_seqs}], the sequences of one step")
    if not request.HasField("beam_width"):
        return n, None
    width = request.beam_width
    most = min(model.max_num_seqs, model.vocab_size // 2)
    if not n <= width <= most:
        raise InvalidArgument("beam_width", width, f"must be in [n, {most}], and n is {n}")
    _check_beams(request)
    allowed = set(request.sampling.allowed_token_ids)
    if allowed and len(allowed) < n:
        raise InvalidArgument(
            "sampling.allowed_token_ids", sorted(allowed), f"fewer than the {n} outputs of the search"
        )
    return n, width


def _check_beams(request: pb.GenerateRequest) -> None:
    """Beam search draws nothing and knows its outputs only at the end: what speaks of either has no meaning."""
    why = "has no meaning with beam_width: beam search draws no tokens"
    sampling = request.sampling
    for field in ("top_k", "top_p", "min_p", "seed"):
        if sampling.HasField(field):
            raise InvalidArgument(f"sampling.{field}", getattr(sampling, field), why)
    if sampling.temperature != 0:
        raise InvalidArgument("sampling.temperature", sampling.temperature, why)
    if request.stop:
        raise InvalidArgument("stop", list(request.stop), "is not offered with beam_width")
    for field in ("logprobs", "prompt_logprobs"):
        if request.HasField(field):
            raise InvalidArgument(field, getattr(request, field), "is not offered with beam_width")


def _sampling(request: pb.GenerateRequest, model: ModelInfo, seed: int) -> SamplingParams:
    given, defaults = request.sampling, model.defaults
    check_token_ids("sampling.allowed_token_ids", given.allowed_token_ids, model.vocab_size)
    return SamplingParams(
        temperature=_number(given, "temperature", defaults.temperature, 1.0, 0.0, 100.0),
        top_k=min(given.top_k if given.HasField("top_k") else defaults.top_k or 0, model.vocab_size),
        top_p=_number(given, "top_p", defaults.top_p, 1.0, 0.0, 1.0, zero=False),
        min_p=_number(given, "min_p", defaults.min_p, 0.0, 0.0, 1.0),
        presence_penalty=_number(given, "presence_penalty", None, 0.0, -2.0, 2.0),
        frequency_penalty=_number(given, "frequency_penalty", None, 0.0, -2.0, 2.0),
        repetition_penalty=_number(
            given, "repetition_penalty", defaults.repetition_penalty, 1.0, 0.0, 10.0, zero=False
        ),
        logit_bias=_logit_bias(given, model.vocab_size),
        allowed_token_ids=tuple(sorted(set(given.allowed_token_ids))),
        seed=given.seed if given.HasField("seed") else seed,
        min_tokens=request.min_tokens,
        stop_token_ids=_stop_token_ids(request, model),
        logprobs=_num_logprobs(request, "logprobs", model.vocab_size),
        prompt_logprobs=_num_logprobs(request, "prompt_logprobs", model.vocab_size),
    )


def _number(
    given: pb.SamplingParams,
    field: str,
    of_model: float | None,
    otherwise: float,
    low: float,
    high: float,
    *,
    zero: bool = True,
) -> float:
    """A sampling number in [low, high]; without `zero` in (0, high]."""
    if not given.HasField(field):
        return otherwise if of_model is None else of_model
    value = float(getattr(given, field))
    if not low <= value <= high or (value == 0 and not zero):  # NaN is in no range
        bracket = "[" if zero else "("
        raise InvalidArgument(f"sampling.{field}", value, f"must be in {bracket}{low:g}, {high:g}]")
    return value


def _logit_bias(given: pb.SamplingParams, vocab_size: int) -> dict[int, float]:
    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(
            "sampling.logit_bias", f"{len(given.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries"
        )
    for token_id, bias in given.logit_bias.items():
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            raise InvalidArgument(field, bias, f"token {token_id} is not in the vocabulary of {vocab_size} tokens")
        if not -100 <= bias <= 100:
            raise InvalidArgument(field, bias, "must be in [-100, 100]")
    return dict(given.logit_bias)


def _stop_token_ids(request: pb.GenerateRequest, model: ModelInfo) -> frozenset[int]:
    if len(request.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument("stop_token_ids", f"{len(request.stop_token_ids)} tokens", f"at most {MAX_STOP_TOKENS}")
    check_token_ids("stop_token_ids", request.stop_token_ids, model.vocab_size)
    stops = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(model.eos_token_ids))
    allowed = request.sampling.allowed_token_ids
    if request.min_tokens and allowed and stops.issuperset(allowed):
        raise InvalidArgument("min_tokens", request.min_tokens, "allowed_token_ids leaves stop tokens alone")
    return stops


def _num_logprobs(request: pb.GenerateRequest, field: str, vocab_size: int) -> int | None:
    if not request.HasField(field):
        return None
    value = int(getattr(request, field))
    most = min(MAX_LOGPROBS, vocab_size)
    if value > most:
        raise InvalidArgument(field, value, f"must be in [0, {most}]")
    return value


def _queue_timeout(request: pb.GenerateRequest, default: float) -> float:
    if not request.HasField("queue_timeout"):
        return default
    seconds = request.queue_timeout.seconds + request.queue_timeout.nanos / 1e9
    if not 0 < seconds <= MAX_QUEUE_TIMEOUT_SECONDS:
        raise InvalidArgument("queue_timeout", f"{seconds:g} s", f"must be in (0 s, {MAX_QUEUE_TIMEOUT_SECONDS:g} s]")
    return seconds
