"""What clients of the asynchronous dialect validate, as they write it down: exactly these fields, no value converted."""

from typing import Literal

from pydantic import BaseModel


class ClientProperty(BaseModel):
    type: str
    description: str | None = None
    enum: list[str] | None = None


class ClientParameters(BaseModel):
    type: Literal["object"]
    properties: dict[str, ClientProperty]
    required: list[str]


class ClientFunction(BaseModel):
    name: str
    description: str
    parameters: ClientParameters
    strict: bool


class ClientTool(BaseModel):
    type: Literal["function"]
    function: ClientFunction


class ClientAnswer(BaseModel):
    """The answer to `POST /v1/rollout/init`."""

    rollout_id: str
    tools: list[ClientTool]
