"""Where tokenizers come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import TOY, Paths, env_names


class TokenizerSettings(BaseSettings):
    """Where tokenizers come from."""

    tokenizer_cache_size: int = Field(
        5, ge=1, validation_alias=env_names("TOKENIZER_CACHE_SIZE"), description="Tokenizers that are kept in memory."
    )
    tokenizer_trust_remote_code: bool = Field(
        False,
        validation_alias=env_names("TOKENIZER_TRUST_REMOTE_CODE"),
        description="Run code that comes with a tokenizer. Requests name tokenizers, so this lets callers run code here.",
    )
    tokenizers: Paths = Field(
        {},
        validation_alias=env_names("ROLLOUT_TOKENIZERS"),
        description=f"NAME=DIRECTORY,...: where the tokenizers of these names are; the directory {TOY!r} is the built-in one. "
        "They are loaded before the server is ready.",
    )
    templates: Paths = Field(
        {},
        validation_alias=env_names("ROLLOUT_TEMPLATES"),
        description="NAME=FILE,...: chat templates of these tokenizers.",
    )
    tokenizer_directories: bool = Field(
        False,
        validation_alias=env_names("ROLLOUT_TOKENIZER_DIRECTORIES"),
        description="Requests may name local directories.",
    )
    tokenizers_offline: bool = Field(
        False, validation_alias=env_names("ROLLOUT_TOKENIZERS_OFFLINE"), description="Never fetch a tokenizer."
    )
    count_arguments: Literal["auto", "received", "parsed"] = Field(
        "auto",
        validation_alias=env_names("ROLLOUT_COUNT_ARGUMENTS"),
        description="How trainers that count masks render the arguments of tool calls, until they show otherwise; auto: as they "
        "came, unless the template takes objects only.",
    )
