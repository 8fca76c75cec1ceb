"""Settings of the journal, which keeps rollouts across restarts of the server (docs/durability.md)."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

from rollout_server.settings.types import WrongSettings, env_names

MEMORY = "memory"
"""In place of a directory: rollouts are kept in memory only. A directory of this name is written `./memory`."""
_KEY_BYTES = 32


class JournalSettings(BaseSettings):
    """The journal, which keeps rollouts across restarts of the server."""

    journal: str | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_JOURNAL"),
        description="Directory of the journal, used by one server at a time, or memory: rollouts end with the process. Unset: "
        "`rollout serve` uses $XDG_STATE_HOME/rollout-server/PORT (~/.local/state without XDG_STATE_HOME), where PORT is the gRPC "
        "port, or memory if that port is 0.",
    )
    journal_key: SecretStr | None = Field(
        None,
        validation_alias=env_names("ROLLOUT_JOURNAL_KEY"),
        description="Fernet key that encrypts the credentials in the journal: 32 bytes in URL-safe base64. Unset: that of the file "
        "`key` in the journal's directory, which the server creates.",
    )
    on_interrupt: Literal["resume", "end"] = Field(
        "resume",
        validation_alias=env_names("ROLLOUT_ON_INTERRUPT"),
        description="What happens to rollouts that a stop or crash of the server interrupts, if the request leaves `on_interrupt` "
        "unset: resume continues them after the restart where that is possible, end gives them the outcome `interrupted`.",
    )

    @field_validator("journal")
    @classmethod
    def _named(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError(f"is empty; name a directory, or {MEMORY}, or remove it for the default")
        return value

    @field_validator("journal_key")
    @classmethod
    def _fernet(cls, value: SecretStr | None) -> SecretStr | None:
        # Checked here and not where it is used, so that a wrong key stops the server before it opens the journal.
        if value is not None and not _is_fernet_key(value.get_secret_value()):
            raise ValueError(
                "is not a Fernet key; create one with "
                "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
            )
        return value


def journal_directory(setting: str | None, grpc_port: int, *, durable_by_default: bool) -> Path | None:
    """Return the absolute path of the journal's directory, which may not exist yet. None: rollouts are kept in memory.

    Args:
        setting: the value of ROLLOUT_JOURNAL, or None if it is unset.
        grpc_port: the value of ROLLOUT_GRPC_PORT. Servers on different ports have different directories by default.
        durable_by_default: whether an unset ROLLOUT_JOURNAL means the directory of this port and not memory.

    Raises `WrongSettings` if the user has no home directory, and the path depends on it.
    """
    if setting == MEMORY:
        return None
    try:
        if setting is not None:
            return Path(setting).expanduser().absolute()
        if not durable_by_default:
            return None
        if grpc_port == 0:
            # Each start gets another port, so no later start would find the rollouts of this one.
            return None
        return _state_home() / "rollout-server" / str(grpc_port)
    except RuntimeError:
        raise WrongSettings(
            f"ROLLOUT_JOURNAL: this user has no home directory; name a directory by its full path, or {MEMORY}"
        ) from None


def _state_home() -> Path:
    """Return the directory for state of the user's programs. The XDG specification ignores a relative XDG_STATE_HOME."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    return home if home.is_absolute() else Path.home() / ".local" / "state"


def _is_fernet_key(text: str) -> bool:
    try:
        return len(urlsafe_b64decode(text.encode("ascii"))) == _KEY_BYTES
    except ValueError:  # not ASCII, or not base64
        return False
