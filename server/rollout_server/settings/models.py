"""Settings of further models, which agents call by name."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings

from rollout_server.settings.types import Entries, env_names


class ModelSettings(BaseSettings):
    """Further models, such as a judge or a simulated user."""

    models: Entries = Field(
        (),
        validation_alias=env_names("ROLLOUT_MODELS"),
        description="NAME=URL|MODEL[|ENGINE],...: further models that agents call with run.model(NAME); MODEL is the name at the "
        "endpoint, ENGINE is openai (the default), vllm or sglang.",
    )
    models_keys: SecretStr | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_MODELS_KEYS"),
        description="NAME=KEY,...: the API keys of ROLLOUT_MODELS.",
    )
    models_keys_file: Path | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_MODELS_KEYS_FILE"),
        description="A file of such entries, one per line, read at startup.",
    )
    models_by_request: bool = Field(
        True,
        validation_alias=env_names("ROLLOUT_MODELS_BY_REQUEST"),
        description="Allow requests to name further models, which replace those of ROLLOUT_MODELS with the same name.",
    )
    models_calls: int = Field(
        1000,
        ge=1,
        validation_alias=env_names("ROLLOUT_MODELS_CALLS"),
        description="Maximum calls of each further model in one rollout.",
    )
    models_tokens: int = Field(
        1_000_000,
        ge=1,
        validation_alias=env_names("ROLLOUT_MODELS_TOKENS"),
        description="Maximum generated tokens of each further model in one rollout, as its endpoint reports them.",
    )
    models_concurrency: int = Field(
        128,
        ge=1,
        validation_alias=env_names("ROLLOUT_MODELS_CONCURRENCY"),
        description="Maximum concurrent calls of one further model, over all rollouts; further calls wait.",
    )
