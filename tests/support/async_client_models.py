"""The models with which clients of the asynchronous HTTP API validate responses: exactly these fields, no type coercion."""

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
    """The response to `POST /v1/rollout/init`."""

    rollout_id: str
    tools: list[ClientTool]
