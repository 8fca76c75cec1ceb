"""Where tokenizers come from: a directory, or the Hugging Face Hub and its cache. Everything here blocks.

Failures are texts for the caller of a rollout, so they hold the name that was asked for and the setting that would help, but
no path of this machine, no address and nothing of the libraries' own words.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.tokenizer import ChatTokenizer
from rollout_server.runtime.errors import RolloutFailed

_HUB_SECONDS = 5.0
_LONGEST_NAME = 200
_NOT_HERE = (
    "is not on this server, and the Hugging Face Hub was not there to be asked for it; check the name, give the server "
    "a network, or map the name to a directory with its setting ROLLOUT_TOKENIZERS"
)


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """How tokenizers are found and kept.

    Args:
        cache_size: how many are kept when no rollout uses them, at least 1.
        trust_remote_code: run Python code that comes with a tokenizer.
        directories: local directories by the name that requests use; their revision is not looked at.
        templates: files with chat templates, by the name that requests use.
        allow_directories: let requests name directories themselves.
        local_files_only: never ask the Hub; only what its cache holds.
        threads: for loading, and as many for rendering.
    """

    cache_size: int = 5
    trust_remote_code: bool = False
    directories: Mapping[str, Path] = field(default_factory=dict)
    templates: Mapping[str, Path] = field(default_factory=dict)
    allow_directories: bool = False
    local_files_only: bool = False
    threads: int = 2


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer with a chat template, and the ids at which the model's `generation_config.json`, if there is one, stops."""

    tokenizer: ChatTokenizer
    ends: Sequence[int] = ()


def read_tokenizer(name: TokenizerName, settings: LoaderSettings) -> TokenizerFiles:
    """Loads a tokenizer that has a chat template. Raises `RolloutFailed`."""
    shown = repr(name.name[:_LONGEST_NAME])
    directory = settings.directories.get(name.name)
    if directory is None and _is_directory(name.name):
        if not settings.allow_directories:
            raise _failed(
                f"tokenizer {shown} names a directory, which requests may not do; map a name to the directory with the server's "
                "setting ROLLOUT_TOKENIZERS, or allow directories with ROLLOUT_TOKENIZER_DIRECTORIES=true"
            )
        directory = Path(name.name).expanduser()
    source, revision, local = str(directory), None, True
    if directory is None:
        local = settings.local_files_only or not _on_hub(name, shown)
        source, revision = name.name, name.revision or None
        if local and not _is_cached(source, revision):
            raise _failed(f"tokenizer {shown} {_NOT_HERE}")
    try:
        tokenizer = _load(source, revision, settings.trust_remote_code, local)
    except Exception as error:  # transformers raises whatever its readers do
        raise _failed(f"tokenizer {shown} {_why(error, settings, directory is not None, local)}") from error
    return TokenizerFiles(
        _with_template(tokenizer, settings.templates.get(name.name), shown), _ends(source, revision, local)
    )


def _failed(text: str) -> RolloutFailed:
    return RolloutFailed(Failure(Category.TOKENIZER, text))


def _is_directory(name: str) -> bool:
    if name.startswith((".", "~", "/")) or ".." in name or "\\" in name or re.match("[A-Za-z]:", name):
        return True
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long a name, or one with a null character
        return False


def _on_hub(name: TokenizerName, shown: str) -> bool:
    """Whether the Hub knows the name; False if it cannot be asked. Raises `RolloutFailed` if it does not know it.

    Asking once with a short time limit comes first because the libraries retry each file of a tokenizer for half a minute.
    """
    _quiet()
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(name.name, revision=name.revision or None, timeout=_HUB_SECONDS)
    except errors.GatedRepoError:
        raise _failed(
            f"tokenizer {shown} is gated on the Hugging Face Hub and this server has no access to it"
        ) from None
    except errors.RevisionNotFoundError:
        raise _failed(f"tokenizer {shown} has no revision {name.revision[:_LONGEST_NAME]!r}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise _failed(
            f"tokenizer {shown} is unknown: the Hugging Face Hub has no such name that this server may read, and the "
            "server's setting ROLLOUT_TOKENIZERS does not map it to a directory"
        ) from None
    except errors.HfHubHTTPError:
        return True  # it answers; what is wrong shows when the files are wanted
    except Exception:  # each version of the library has another HTTP client with errors of its own
        return False
    return True


def _is_cached(name: str, revision: str | None) -> bool:
    """Whether the Hub's cache holds the tokenizer. Asked first, because transformers asks the Hub about names it does not find."""
    from huggingface_hub import errors, try_to_load_from_cache

    files = ("tokenizer_config.json", "tokenizer.json")
    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except errors.HFValidationError:  # what cannot be a name on the Hub is in no cache of it
        return False


def _load(source: str, revision: str | None, trust_remote_code: bool, local: bool) -> ChatTokenizer:
    _quiet()
    from transformers import AutoTokenizer

    tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local
    )
    return tokenizer


def _ends(source: str, revision: str | None, local: bool) -> Sequence[int]:
    """The ids at which the model stops; none where no file says so, or one that cannot be read."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(source, revision=revision, local_files_only=local)
    except Exception:  # as for tokenizers; the probe finds the stops that the template writes
        return ()
    ends = config.eos_token_id
    return tuple(each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int))


def _why(error: Exception, settings: LoaderSettings, mapped: bool, local: bool) -> str:
    if not settings.trust_remote_code and "trust_remote_code" in str(error):
        return (
            "brings Python code of its own, which this server does not run; "
            "set TOKENIZER_TRUST_REMOTE_CODE=true on the server if you trust that code"
        )
    if local and not mapped and isinstance(error, OSError):
        return _NOT_HERE
    where = "its directory" if mapped else "its files on the Hugging Face Hub"
    return f"cannot be loaded: {where} cannot be read as a tokenizer ({type(error).__name__})"


def _with_template(tokenizer: ChatTokenizer, template: Path | None, shown: str) -> ChatTokenizer:
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = (
                f"the chat template file that the setting ROLLOUT_TEMPLATES names for tokenizer {shown} cannot be read"
            )
            raise _failed(reason) from error
    if not tokenizer.chat_template:
        raise _failed(
            f"tokenizer {shown} was loaded, but its chat template is missing; the server's setting ROLLOUT_TEMPLATES can map "
            "the name to a file with the template that the trainer uses"
        )
    return tokenizer


def _quiet() -> None:
    """Imports the libraries without their remarks and progress bars. Leaves them alone if somebody else uses them already."""
    if "transformers" in sys.modules:
        return
    root = logging.getLogger("transformers")
    root.disabled = True
    try:
        import transformers
        from huggingface_hub.utils.tqdm import disable_progress_bars

        transformers.utils.logging.set_verbosity_error()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        disable_progress_bars()
    finally:
        root.disabled = False
