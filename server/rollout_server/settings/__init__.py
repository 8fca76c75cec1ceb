"""Settings from flags, the environment and `.env`, in this order of precedence.

A setting may have several environment names: the first is this project's, the others are those of the reference servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import AliasChoices, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollout_server.settings.capacity import CapacitySettings
from rollout_server.settings.journal import JournalSettings
from rollout_server.settings.models import ModelSettings
from rollout_server.settings.security import SecuritySettings
from rollout_server.settings.serving import ServingSettings
from rollout_server.settings.tokenizers import TokenizerSettings
from rollout_server.settings.tools import ToolSettings
from rollout_server.settings.trainers import StreamSettings, TrainerSettings
from rollout_server.settings.types import TOY, WrongSettings

__all__ = ["TOY", "Settings", "WrongSettings", "load", "names_of", "read_settings"]

_Kind = TypeVar("_Kind", bound=BaseSettings)


class Settings(
    ServingSettings,
    CapacitySettings,
    JournalSettings,
    TrainerSettings,
    StreamSettings,
    TokenizerSettings,
    ToolSettings,
    ModelSettings,
    SecuritySettings,
):
    """All settings of the server."""

    model_config = SettingsConfigDict(
        env_file=".env", env_file_encoding="utf-8", extra="ignore", populate_by_name=True, allow_inf_nan=False
    )


def load(**flags: object) -> Settings:
    """Return the settings in force. Flags, by field name, take precedence.

    `_env_file` names another file than `.env`; None reads no file. Raises `WrongSettings`, also for an unknown flag.
    """
    unknown = sorted(flags.keys() - Settings.model_fields.keys() - {"_env_file"})
    if unknown:
        like = get_close_matches(unknown[0], Settings.model_fields)
        raise WrongSettings(
            f"unknown setting {unknown[0]!r}" + (f"; did you mean {' or '.join(like)}?" if like else "")
        )
    return read_settings(Settings, flags)


def read_settings(kind: type[_Kind], flags: Mapping[str, Any]) -> _Kind:
    """Return the settings of a class, from flags by field name and the environment. Raises `WrongSettings`."""
    try:
        return kind(**flags)
    except ValidationError as error:
        raise WrongSettings("; ".join(_error_text(kind, e["loc"], e["msg"]) for e in error.errors())) from None


def names_of(field: str, kind: type[BaseSettings] = Settings) -> list[str]:
    """Return the environment names of a setting, this project's first."""
    alias = kind.model_fields[field].validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [field.upper()]


def _error_text(kind: type[BaseSettings], loc: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    if not loc:
        return text
    name = str(loc[0])
    field = next((f for f in kind.model_fields if name == f or name in names_of(f, kind)), None)
    names = names_of(field, kind) if field is not None else [name]
    also = f" ({', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]}{also}: {text}"
