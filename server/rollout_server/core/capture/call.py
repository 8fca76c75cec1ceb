"""A model call of an agent that owns its loop, and the completion that it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rollout_server.core.message import JSON
from rollout_server.core.spec import Sampling


class ModelApi(Enum):
    """An API in whose shape an agent calls the model."""

    GRPC = "grpc"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """A message that an agent sends.

    Args:
        fields: the message in the shape of OpenAI chat completions, with `reasoning_content` for reasoning.
        completion_id: id of the completion that it repeats, if the client sent one back; else empty.
        json: the text that `fields` were parsed from; empty if unknown.
    """

    fields: Mapping[str, JSON]
    completion_id: str = ""
    json: str = field(default="", repr=False, compare=False)

    def repeats(self, other: HistoryMessage) -> bool:
        """Return whether both are known to be the same text. Equal fields are not enough: 1, 1.0 and True are equal."""
        return self.json == other.json != "" and self.completion_id == other.completion_id


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that an agent offers to the model and runs itself. `parameters_json_schema` is JSON text."""

    name: str
    description: str
    parameters_json_schema: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A request for a completion.

    Args:
        messages: the conversation; with `previous`, only what follows that completion.
        instructions: texts of the system prompt, where the API has them apart from the messages.
        tools: the tools offered to the model, in order.
        previous: id of the completion that the messages follow; empty: they are the whole conversation.
        hosted_tools: names of tools that the API's provider runs itself; the model is not offered them.
        api: the API that the agent uses.
        sampling: the agent's sampling parameters. `extra_json` may have `tool_choice`, `parallel_tool_calls`, `response_format`.
        repeat_key: the client's idempotency key; empty: none.
        repeated: the client says that it repeats an earlier request.
        auxiliary: the client declares the call as one beside the task.
        model: the name by which the client calls the model.
        client_agent: the client's id of the agent that calls; empty: none.
    """

    messages: tuple[HistoryMessage, ...]
    instructions: tuple[str, ...] = ()
    tools: tuple[OfferedTool, ...] = ()
    previous: str = ""
    hosted_tools: tuple[str, ...] = ()
    api: ModelApi = ModelApi.GRPC
    sampling: Sampling = Sampling()
    repeat_key: str = ""
    repeated: bool = False
    auxiliary: bool = False
    model: str = ""
    client_agent: str = ""


@dataclass(frozen=True, slots=True)
class Completed:
    """A completion, as the agent gets it.

    Args:
        id: unique in the rollout and not guessable.
        message_json: the assistant message as sampled, in the shape of OpenAI chat completions.
        finish_reason: as the trainer sent it.
        prompt_tokens: number of tokens of the prompt; 0: unknown.
        generated_tokens: number of generated tokens; 0: unknown.
        turn: the turn of the rollout.
        replayed: nothing was sampled for this call: it gets the answer of an earlier, equal one.
    """

    id: str
    message_json: str
    finish_reason: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    turn: int = 0
    replayed: bool = False
