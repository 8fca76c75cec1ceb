"""The sampler for trainers that count masks: `http(s)://` targets of the synchronous dialect."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rollout_server.core.message import JSON, parse_object
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.core.spec import Spec
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.render import Rendered, Renderer
from rollout_server.edge.trainer.chat import Answer, RequestWriter, read_answer
from rollout_server.edge.trainer.client import TRAINER_TEXT, HttpAnswer, HttpClient, HttpRequest
from rollout_server.runtime.port import Ask, Failed, Tool

_LARGE = 1024 * 1024
_LOOKED_AT = 256 * 1024


@dataclass(frozen=True, slots=True)
class Trainers:
    """What all samplers of the process share."""

    client: HttpClient
    tokenizers: Tokenizers

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> MaskedSampler:
        """The sampler of one rollout."""
        return MaskedSampler(self, spec, tools)


class MaskedSampler:
    """Asks one trainer for the completions of one rollout, with a mask over what is new since its last answer."""

    def __init__(self, trainers: Trainers, spec: Spec, tools: Sequence[Tool]) -> None:
        self._trainers = trainers
        self._spec = spec
        self._tools = tools
        self._url = f"{spec.completions.url}/v1/chat/completions"
        self._writer = RequestWriter(spec.rollout_id, spec.sampling)
        self._renderer: Renderer | None = None

    async def sample(self, ask: Ask) -> Answered:
        """Renders, posts, checks. Raises `Failed`."""
        turn = ask.asked.turn
        messages = ask.messages[: ask.asked.messages]
        renderer = await self._open_renderer()
        rendered = await renderer.predict(messages, ask.last, ask.last_messages)
        if rendered.mask_length is not None and rendered.mask_length < 0:
            raise Failed(_negative(turn, rendered.mask_length))
        body = self._writer.write(messages, rendered.mask_length)
        started = time.monotonic()
        reply = await self._trainers.client.post(HttpRequest(self._url, body, self._headers(ask), turn, ask.deadline))
        elapsed = 1000 * (time.monotonic() - started)
        if reply.status != 200:
            raise Failed(_refused(reply, turn, ask.credential))
        answer = await _read(reply.body, turn)
        predicted = rendered.predicted
        if answer.reported is not None and ask.last is None:
            predicted = await renderer.learn(messages, predicted, answer.reported)
        return Answered(
            turn=turn,
            message=answer.message,
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            predicted=predicted,
            reported=answer.reported,
            mask_length=rendered.mask_length or None,
            attempts=reply.attempts,
            elapsed_ms=elapsed,
            notes=self._notes(answer, rendered, turn),
            tool_calls=answer.tool_calls,
        )

    async def _open_renderer(self) -> Renderer:
        if self._renderer is None:
            name = self._spec.tokenizer
            if name is None:
                raise Failed(Failure(Category.TOKENIZER, "the rollout names no tokenizer, so no mask can be counted"))
            loaded = await self._trainers.tokenizers.load(name)
            kwargs = parse_object(name.template_kwargs_json) if name.template_kwargs_json else {}
            self._renderer = Renderer(loaded, [_function(tool) for tool in self._tools], kwargs)
        return self._renderer

    def _headers(self, ask: Ask) -> dict[str, str]:
        headers = {"content-type": "application/json", "idempotency-key": ask.asked.turn_key}
        if ask.credential:
            headers["authorization"] = f"Bearer {ask.credential}"
        return headers

    def _notes(self, answer: Answer, rendered: Rendered, turn: int) -> tuple[tuple[str, str], ...]:
        notes = []
        if not rendered.exact:
            text = f"turn {turn}: the chat template shows no place at which the last answer ends; environment tokens are a guess"
            notes.append(("rendering_inexact", text))
        if answer.reported is None:
            text = f"turn {turn}: the trainer sent no prompt_token_ids; prompt and environment tokens are our rendering"
            notes.append(("unverified", text))
        if answer.logprobs is None and self._spec.sampling.logprobs is not False:
            text = (
                f"turn {turn}: the trainer sent no logprobs, or not one for each of its {len(answer.token_ids)} tokens"
            )
            notes.append(("logprobs_missing", text))
        asked = self._spec.sampling.max_tokens
        if asked is not None and len(answer.token_ids) > asked:
            text = (
                f"turn {turn}: the answer has {len(answer.token_ids)} tokens, {asked} were asked for; it is kept whole"
            )
            notes.append(("length_exceeded", text))
        return tuple(notes)


async def _read(body: bytes, turn: int) -> Answer:
    """Parses an answer; a large one in a thread, so that other rollouts do not wait for it."""
    if len(body) > _LARGE:
        return await asyncio.to_thread(read_answer, body, turn)
    return read_answer(body, turn)


def _function(tool: Tool) -> dict[str, JSON]:
    parameters = parse_object(tool.parameters_json_schema)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _negative(turn: int, length: int) -> Failure:
    text = (
        f"turn {turn}: the conversation renders to {-length} tokens fewer than the trainer counted after its last answer. Its "
        "tokenizer or template is another one than tokenizer_name says, or its template rewrites earlier messages; no mask "
        "that such a trainer accepts exists, so nothing was sent"
    )
    return Failure(Category.TOKEN_DRIFT, text, turn)


def _refused(reply: HttpAnswer, turn: int, credential: str) -> Failure:
    text = _redacted(reply.body, credential)
    said = f": {text}" if text else ""
    if reply.status == 429:
        category = Category.RATE_LIMITED
    elif reply.status >= 500:
        category = Category.TRAINER_SERVER
    elif reply.status >= 400:
        category = Category.TRAINER_CLIENT
    else:
        category = Category.VALIDATION
        said = "; only 200 is an answer, and redirects are not followed"
    return Failure(category, f"turn {turn}: the trainer answered {reply.status}{said}", turn, reply.status)


def _redacted(body: bytes, credential: str) -> str:
    """The beginning of a trainer's text without the credential that it may repeat, escaped or cut off."""
    window = body[:_LOOKED_AT].decode("utf-8", "replace")
    if credential:
        for form in {credential, json.dumps(credential)[1:-1], quote(credential, safe="")}:
            window = window.replace(form, "[redacted]")
        if len(body) > _LOOKED_AT:  # its end may be a part of one
            window = window[: -len(credential) * 6]
    return window.strip()[:TRAINER_TEXT]
