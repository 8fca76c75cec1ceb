"""Load tokenizers from a directory, or from the Hugging Face Hub and its cache. All functions block.

Error texts are returned to the caller who started the rollout. They contain the requested name and the setting that would help.
They contain no path of this machine, no address and no text of the libraries.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from rollout_server.core.outcome import Category, Failure
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.tokenizer import ChatTokenizer
from rollout_server.runtime.errors import RolloutFailed

_HUB_SECONDS = 5.0
_LONGEST_NAME = 200
_SAMPLE = "The sum of 17 and 25.50 is\t42.5!\n\n  naïve Größe, 数据 데이터 данные بيانات 🙂 def f(x): return x**2 - 1  # done\r\n"
"""Tokenizers with other vocabularies, merges or normalizers nearly always encode it differently."""
_NOT_HERE = (
    "is not on this server, and the Hugging Face Hub could not be reached; check the name, give the server "
    "network access, or map the name to a directory with the server's setting ROLLOUT_TOKENIZERS"
)


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Settings for finding and caching tokenizers.

    Args:
        cache_size: number of tokenizers to keep in memory, at least 1.
        trust_remote_code: run Python code that is part of a tokenizer's repository.
        directories: local directories by the name that requests use. Their revision is ignored.
        templates: chat template files by the name that requests use.
        allow_directories: allow requests to name a directory.
        local_files_only: never contact the Hub; use only its local cache.
        threads: number of threads for loading; rendering uses as many other threads.
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
    """A tokenizer with a chat template, and the stop ids of the model.

    `ends` are the `eos_token_id` values of `generation_config.json`; empty if that file is missing. `digest` is equal for files
    that render and encode conversations alike.
    """

    tokenizer: ChatTokenizer
    ends: Sequence[int] = ()
    digest: str = ""


def read_tokenizer(name: TokenizerName, settings: LoaderSettings) -> TokenizerFiles:
    """Load a tokenizer that has a chat template. Raises `RolloutFailed` (TOKENIZER)."""
    shown = repr(name.name[:_LONGEST_NAME])
    directory = settings.directories.get(name.name)
    if directory is None and _is_directory(name.name):
        if not settings.allow_directories:
            raise _failed(
                f"tokenizer {shown} names a directory, which requests may not do; map a name to the directory with the server's "
                "setting ROLLOUT_TOKENIZERS, or allow directories in requests with ROLLOUT_TOKENIZER_DIRECTORIES=true"
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
    except Exception as error:  # transformers passes on the errors of many file readers
        raise _failed(f"tokenizer {shown} {_why(error, settings, directory is not None, local)}") from error
    tokenizer = _with_template(tokenizer, settings.templates.get(name.name), shown)
    ends = _ends(source, revision, local)
    return TokenizerFiles(tokenizer, ends, _digest(tokenizer, ends))


def _digest(tokenizer: ChatTokenizer, ends: Sequence[int]) -> str:
    """Return a digest of what decides which tokens a conversation has.

    The vocabulary itself takes too long to read, so its size, the added tokens and the ids of a sample stand for it.
    """
    from transformers import __version__

    added = {str(index): [str(token), token.special] for index, token in tokenizer.added_tokens_decoder.items()}
    sample = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    # Of transformers the major version counts (docs/design.md, R7).
    parts = [__version__.partition(".")[0], tokenizer.chat_template, len(tokenizer), added, sample, list(ends)]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _failed(text: str) -> RolloutFailed:
    return RolloutFailed(Failure(Category.TOKENIZER, text))


def _is_directory(name: str) -> bool:
    if name.startswith((".", "~", "/")) or ".." in name or "\\" in name or re.match("[A-Za-z]:", name):
        return True
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # the name is too long or contains a null character
        return False


def _on_hub(name: TokenizerName, shown: str) -> bool:
    """Return whether the Hub knows the name; False if the Hub cannot be reached. Raises `RolloutFailed` if it does not know it.

    This single request with a short timeout comes first, because the libraries retry each file of a tokenizer for half a
    minute.
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
        return True  # the Hub is reachable; reading the files will show the error
    except Exception:  # versions of the library use different HTTP clients, each with its own exceptions
        return False
    return True


def _is_cached(name: str, revision: str | None) -> bool:
    """Return whether the Hub's local cache holds the tokenizer.

    Checked first, because transformers contacts the Hub about names that it does not find in the cache.
    """
    from huggingface_hub import errors, try_to_load_from_cache

    files = ("tokenizer_config.json", "tokenizer.json")
    try:
        return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)
    except errors.HFValidationError:  # not a valid Hub name, so it cannot be in the cache
        return False


def _load(source: str, revision: str | None, trust_remote_code: bool, local: bool) -> ChatTokenizer:
    _quiet()
    from transformers import AutoTokenizer

    tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(
        source, revision=revision, trust_remote_code=trust_remote_code, local_files_only=local
    )
    return tokenizer


def _ends(source: str, revision: str | None, local: bool) -> Sequence[int]:
    """Return the stop ids of `generation_config.json`; empty if the file is missing or unreadable.

    `eos_token_id` there is an int or a list: gpt-oss lists `<|return|>` and `<|call|>`, GLM the tokens that begin the next
    message.
    """
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(source, revision=revision, local_files_only=local)
    except Exception:  # see read_tokenizer; without the file, the template probe finds the stop tokens
        return ()
    ends = config.eos_token_id
    return tuple(each for each in (ends if isinstance(ends, list) else [ends]) if isinstance(each, int))


def _why(error: Exception, settings: LoaderSettings, mapped: bool, local: bool) -> str:
    if not settings.trust_remote_code and "trust_remote_code" in str(error):
        return (
            "needs Python code from its repository, which this server does not run; "
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
            reason = f"tokenizer {shown}: the chat template file that the server's setting ROLLOUT_TEMPLATES names cannot be read"
            raise _failed(reason) from error
    if not tokenizer.chat_template:
        raise _failed(
            f"tokenizer {shown} has no chat template; set ROLLOUT_TEMPLATES on the server to map the name to a file with "
            "the template that the trainer uses"
        )
    return tokenizer


def _quiet() -> None:
    """Import the libraries without log output and progress bars. Do nothing if another module imported transformers before."""
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
