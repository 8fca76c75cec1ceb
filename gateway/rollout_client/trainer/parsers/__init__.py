"""Tool-call parsers for model families: completion text to `ParsedCompletion`.

A malformed call raises no exception: its text stays in `content`, where the model sees it in the next turn. Arguments keep the
exact characters that the model generated.
"""

from __future__ import annotations

import pkgutil
from typing import Final, cast

from rollout_client.trainer.completion import Parse, plain
from rollout_client.trainer.parsers.hermes import hermes, thinking
from rollout_client.trainer.parsers.llama import llama
from rollout_client.trainer.parsers.mistral import mistral

__all__ = ["hermes", "llama", "mistral", "plain", "thinking"]

_NAMED: Final[dict[str, Parse]] = {"hermes": hermes, "llama": llama, "mistral": mistral, "plain": plain}


def parser_by_name(name: str) -> Parse:
    """Return a parser by its name, for configuration files.

    Args:
        name: the name of one in `rollout_client.trainer.parsers`, which is applied after the reasoning, or
            "package.module:function".

    Raises ValueError, ImportError and AttributeError that name it.
    """
    if ":" in name:
        return cast(Parse, pkgutil.resolve_name(name))
    if name not in _NAMED:
        raise ValueError(
            f'parse: there is no parser {name!r}; use one of {", ".join(_NAMED)}, or a function as "package.module:function"'
        )
    return thinking(_NAMED[name])
