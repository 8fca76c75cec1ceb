"""Settings of tokenizers and chat templates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from rollout_server.settings.types import TOY, Paths, env_names


class TokenizerSettings(BaseSettings):
    """Tokenizers and chat templates."""

    tokenizer_cache_size: int = Field(
        5, ge=1, validation_alias=env_names("TOKENIZER_CACHE_SIZE"), description="Maximum tokenizers in memory."
    )
    tokenizer_trust_remote_code: bool = Field(
        False,
        validation_alias=env_names("TOKENIZER_TRUST_REMOTE_CODE"),
        description="Run code from tokenizer repositories. Requests name tokenizers, so callers can then run code on the server.",
    )
    tokenizers: Paths = Field(
        {},
        validation_alias=env_names("ROLLOUT_TOKENIZERS"),
        description=f"NAME=DIRECTORY,...: local directories of tokenizers, loaded at startup; {TOY!r} in place of a directory is "
        "the built-in toy tokenizer.",
    )
    templates: Paths = Field(
        {},
        validation_alias=env_names("ROLLOUT_TEMPLATES"),
        description="NAME=FILE,...: chat templates that replace those of the tokenizers.",
    )
    tokenizer_directories: bool = Field(
        False,
        validation_alias=env_names("ROLLOUT_TOKENIZER_DIRECTORIES"),
        description="Allow requests to name a local directory as tokenizer.",
    )
    tokenizers_offline: bool = Field(
        False, validation_alias=env_names("ROLLOUT_TOKENIZERS_OFFLINE"), description="Never download a tokenizer."
    )
    count_arguments: Literal["auto", "received", "parsed"] = Field(
        "auto",
        validation_alias=env_names("ROLLOUT_COUNT_ARGUMENTS"),
        description="How trainers that check the response mask render tool call arguments: as the received string or the parsed "
        "object. Used until a response shows otherwise; auto: received, unless the template accepts only objects.",
    )
