"""HTTP engines in the formats of vLLM, SGLang and OpenAI, with a real tokenizer and chat template behind them.

Sources. vLLM: vllm/entrypoints/openai/chat_completion/protocol.py,
vllm/entrypoints/scale_out/token_in_token_out/protocol.py and docs/serving/online_serving. SGLang:
python/sglang/srt/entrypoints/openai/protocol.py and serving_chat.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.engine_model import EngineModel, Generated, TooLong, calls_of

MODEL = "toy-model"
Handler = Callable[[web.Request], Awaitable[web.Response]]


@dataclass
class Engine:
    """Base of the engines: records requests. Responses in `first` are sent before the engine's own, one per request."""

    model: EngineModel
    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    first: list[web.Response] = field(default_factory=list)
    spoil: Callable[[dict[str, Any]], None] = lambda answer: None
    model_name: str = MODEL

    def routes(self) -> dict[str, Handler]:
        return {"/v1/chat/completions": self.chat}

    async def chat(self, request: web.Request) -> web.Response:
        raise NotImplementedError

    async def taken(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(await request.text())
        self.requests.append((request.path, body))
        self.headers.append(dict(request.headers))
        if self.first:
            raise Instead(self.first.pop(0))
        return body

    def answer(self, body: dict[str, Any]) -> web.Response:
        self.spoil(body)
        return web.json_response(body)

    def usage(self, generated: Generated) -> dict[str, int]:
        prompt, sampled = len(generated.prompt), len(generated.ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def bodies(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        return [body for where, body in self.requests if where == path]


class Instead(Exception):
    """Raised to send another response than the engine's own."""

    def __init__(self, response: web.Response) -> None:
        super().__init__()
        self.response = response


class VllmEngine(Engine):
    """vLLM with `--enable-scale-out`, a tool parser and a reasoning parser."""

    def routes(self) -> dict[str, Handler]:
        more: dict[str, Handler] = {
            "/inference/v1/generate": self.generate,
            "/v1/chat/completions/derender": self.derender,
        }
        return {**super().routes(), **more}

    async def chat(self, request: web.Request) -> web.Response:
        body = await self.taken(request)
        if body["model"] != self.model_name:
            return self.error(404, f"The model `{body['model']}` does not exist.", "NotFoundError", "model")
        kwargs = body.get("chat_template_kwargs", {})
        prompt = self.model.render(body["messages"], body.get("tools"), kwargs)
        try:
            generated = self.model.generate(prompt, body.get("max_tokens"))
        except TooLong:
            return self.too_long(prompt)
        answer = self.completion(generated.ids, generated.finish)
        answer["usage"] = self.usage(generated)
        choice = answer["choices"][0]
        if body.get("logprobs"):
            content = [
                {"token": self.model.text(token), "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in zip(generated.ids, generated.logprobs, strict=True)
            ]
            choice["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            answer["prompt_token_ids"], choice["token_ids"] = generated.prompt, generated.ids
        return self.answer(answer)

    async def generate(self, request: web.Request) -> web.Response:
        body = await self.taken(request)
        parameters = body["sampling_params"]
        try:
            generated = self.model.generate(body["token_ids"], parameters.get("max_tokens"))
        except TooLong:
            return self.too_long(body["token_ids"])
        content = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(generated.ids, generated.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "logprobs": {"content": content} if "logprobs" in parameters else None,
            "finish_reason": generated.finish,
            "token_ids": generated.ids,
            "routed_experts": None,
        }
        answer: dict[str, Any] = {"request_id": "generate-tokens-1", "output_mode": "tokens", "choices": [choice]}
        answer |= {"model": MODEL, "usage": self.usage(generated), "prompt_logprobs": None, "kv_transfer_params": None}
        answer["prompt_token_ids"] = generated.prompt if body.get("return_token_ids") else None
        return self.answer(answer)

    async def derender(self, request: web.Request) -> web.Response:
        body = await self.taken(request)
        assert body["chat_request"]["messages"], "parsers need the request"
        assert body["prompt_tokens"] >= len(body["prompt_token_ids"]) > 0
        (choice,) = body["generate_response"]["choices"]
        answer = self.completion(choice["token_ids"], choice["finish_reason"])
        answer["usage"] = {"prompt_tokens": body["prompt_tokens"], "completion_tokens": len(choice["token_ids"])}
        return web.json_response(answer)

    def completion(self, ids: list[int], finish: str) -> dict[str, Any]:
        read = self.model.read(ids)
        calls = calls_of(read, len(self.model.seen))
        message: dict[str, Any] = {"role": "assistant", "content": read.content or None, "refusal": None}
        message |= {"annotations": None, "audio": None, "function_call": None, "reasoning": read.reasoning}
        if calls:
            message["tool_calls"] = calls
        if calls and finish == "stop":
            finish = "tool_calls"
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": MODEL,
            "choices": [{**choice, "token_ids": None}],
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }

    def too_long(self, prompt: list[int]) -> web.Response:
        text = (
            f"This model's maximum context length is {self.model.context} tokens. However, your request has {len(prompt)} input "
            "tokens. Please reduce the length of the input messages."
        )
        return self.error(400, text, "BadRequestError", "input_tokens")

    def error(self, status: int, text: str, kind: str, parameter: str | None) -> web.Response:
        return web.json_response(
            {"error": {"message": text, "type": kind, "param": parameter, "code": status}}, status=status
        )


class SglangEngine(Engine):
    """SGLang with a tool-call parser and a reasoning parser. If `young`, it also supports `return_token_ids`."""

    young = True

    async def chat(self, request: web.Request) -> web.Response:
        body = await self.taken(request)
        kwargs = body.get("chat_template_kwargs", {})
        prompt = body.get("input_ids") or self.model.render(body["messages"], body.get("tools"), kwargs)
        try:
            generated = self.model.generate(prompt, body.get("max_tokens"))
        except TooLong:
            context, limit = self.model.context, body.get("max_tokens", 1)
            text = f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
            if len(prompt) < context:
                text = (
                    f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
                    f"of {len(prompt) + limit} tokens: {len(prompt)} tokens from the input messages and {limit} tokens for the "
                    "completion. Please reduce the number of tokens in the input messages or the completion."
                )
            error = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response(error, status=400)
        read = self.model.read(generated.ids)
        calls = calls_of(read, len(self.model.seen))
        message = {"role": "assistant", "content": read.content, "reasoning_content": read.reasoning}
        choice: dict[str, Any] = {"index": 0, "message": {**message, "tool_calls": calls or None}, "logprobs": None}
        choice["finish_reason"] = "tool_calls" if calls and generated.finish == "stop" else generated.finish
        choice["matched_stop"] = generated.ids[-1] if generated.finish == "stop" else None
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = generated.prompt
        if body.get("return_token_ids") and self.young:
            choice["prompt_token_ids"], choice["token_ids"] = generated.prompt, generated.ids
        if body.get("return_meta_info"):
            choice["meta_info"] = self.meta(generated, listed=bool(body.get("logprobs")))
        return self.answer(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "usage": self.usage(generated),
                "metadata": {"weight_version": "step-7"},
            }
        )

    def meta(self, generated: Generated, *, listed: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": "1", "finish_reason": {"type": generated.finish}, "weight_version": "step-7"}
        if listed:
            pairs = zip(generated.logprobs, generated.ids, strict=True)
            meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        return meta


class OpenaiEngine(Engine):
    """An endpoint as strict as OpenAI's: it refuses unknown parameters and reports no ids.

    `reasons`: the model is a reasoning model.
    """

    known = frozenset(
        {
            *("model", "messages", "tools", "temperature", "top_p", "max_tokens", "max_completion_tokens"),
            *("stop", "logprobs", "seed"),
        }
    )
    reasons = False

    async def chat(self, request: web.Request) -> web.Response:
        body = await self.taken(request)
        unknown = sorted(set(body) - self.known)
        if unknown:
            return self.error(f"Unrecognized request argument supplied: {unknown[0]}", unknown[0], None)
        if self.reasons and "max_tokens" in body:
            text = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
            return self.error(text, "max_tokens", "unsupported_parameter")
        prompt = self.model.render(body["messages"], body.get("tools"), {})
        try:
            generated = self.model.generate(prompt, body.get("max_tokens", body.get("max_completion_tokens")))
        except TooLong:
            return self.error("Your input exceeds the limit.", "messages", "context_length_exceeded")
        read = self.model.read(generated.ids)
        calls = calls_of(read, len(self.model.seen))
        message: dict[str, Any] = {"role": "assistant", "content": read.content or None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        finish = "tool_calls" if calls and generated.finish == "stop" else generated.finish
        choice = {"index": 0, "message": {**message, "annotations": []}, "logprobs": None, "finish_reason": finish}
        return self.answer(
            {
                "id": "1",
                "object": "chat.completion",
                "choices": [choice],
                "usage": self.usage(generated),
                "metadata": {},
            }
        )

    def error(self, text: str, parameter: str, code: str | None) -> web.Response:
        body = {"error": {"message": text, "type": "invalid_request_error", "param": parameter, "code": code}}
        return web.json_response(body, status=400)


@web.middleware
async def instead(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except Instead as other:
        return other.response
    return response


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[None]:
    """Serve on a free port and set `engine.url`."""
    app = web.Application(middlewares=[instead], client_max_size=2**26)
    for path, handler in engine.routes().items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    try:
        yield
    finally:
        await runner.cleanup()
