"""Prompts of a dataset: texts or lists of messages, with images as content parts that have URLs."""

from __future__ import annotations

import base64
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollout_client.adapters.dataset_rows import dataset_message

from rollout_server.authoring.dataset.row import json_value
from rollout_server.tool.result import content_of

MAX_IMAGE_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of an image file, and of a data URL."""
MAX_MESSAGES: Final = 10_000
_MARK: Final = "<image>"
_DATA_URL: Final = re.compile(r"data:image/[A-Za-z0-9][A-Za-z0-9.+-]*;base64,[A-Za-z0-9+/]+={0,2}", re.ASCII)
_SIGNATURES: Final = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "image/bmp": re.compile(rb"BM"),
}


class InvalidPrompt(ValueError):
    """A prompt is invalid. The text begins with the place, such as `prompt[1].content: `."""


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image that is not in the messages themselves, and where it comes from, such as `images[0]`."""

    where: str
    value: object


def prompt_messages(name: str, prompt: object, images: Sequence[PromptImage] = ()) -> list[dict[str, Any]]:
    """Return the messages of a prompt.

    Images replace the parts `{"type": "image"}` in order, or the marks `<image>` in texts. If there is neither, they precede the
    text of the first user message.

    Args:
        name: name of the prompt's column, for errors.
        prompt: the text of a user message, or a list of messages.
        images: images that are not in the messages themselves.

    Raises:
        InvalidPrompt: the prompt, a message or an image is invalid.
    """
    listed = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if listed is None or listed == [] or (isinstance(prompt, str) and not prompt.strip()):
        raise InvalidPrompt(f"{name} is empty; every row needs a prompt")
    if not isinstance(listed, list | tuple):
        raise InvalidPrompt(f"{name} must be a text or a list of messages, not {_kind(prompt)}")
    if len(listed) > MAX_MESSAGES:
        raise InvalidPrompt(f"{name} has {len(listed):,} messages; at most {MAX_MESSAGES:,} are allowed")
    left = deque(images)
    messages = [_message(message, f"{name}[{index}]", left) for index, message in enumerate(listed)]
    if len(left) == len(images):
        _prepend(name, messages, left)
    elif left:
        raise InvalidPrompt(f"{name} has places for {len(images) - len(left)} of the row's {len(images)} images")
    if messages[-1]["role"] == "assistant":
        text = "the last message is the assistant's; a prompt ends where the model continues, so remove it"
        raise InvalidPrompt(f"{name}[{len(messages) - 1}]: {text}, or name another column with --column prompt=NAME")
    return messages


def _message(message: object, where: str, images: deque[PromptImage]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidPrompt(f"{where} must be an object with role and content, not {_kind(message)}")
    # Tables give all messages the same keys, and null for those that a message does not have.
    fields = {str(key): value for key, value in message.items() if value is not None}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not role.strip():
        raise InvalidPrompt(f"{where}.role is {role!r}; it must be a text such as 'user'")
    if isinstance(content, list | tuple):
        fields["content"] = [_part(part, f"{where}.content[{n}]", images) for n, part in enumerate(content)]
    elif isinstance(content, str):
        fields["content"] = list(_split(content, where, images)) if images and _MARK in content else content
    elif content is None and role != "user" and fields.get("tool_calls"):
        fields["content"] = None
    else:
        raise InvalidPrompt(f"{where}.content must be a text or a list of parts, not {_kind(content)}")
    found = {key: json_value(value) for key, value in fields.items()}
    if "tool_calls" in found:  # in Parquet, all calls have the arguments of all tools
        found.update(dataset_message({"tool_calls": found["tool_calls"]}))
    return found


def _part(part: object, where: str, images: deque[PromptImage]) -> dict[str, Any]:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidPrompt(f"{where} must be an object with a type")
    fields = {str(key): value for key, value in part.items() if value is not None}
    if fields["type"] == "text" and not isinstance(fields.get("text"), str):
        raise InvalidPrompt(f"{where}.text is missing or not a text")
    if fields["type"] == "image_url":
        url = fields.get("image_url")
        others = {key: value for key, value in url.items() if value is not None} if isinstance(url, Mapping) else {}
        fields["image_url"] = {**others, "url": _image_url(url, f"{where}.image_url")}
    elif fields["type"] == "image":
        image = next((fields[key] for key in ("image", "image_url", "url", "bytes") if key in fields), None)
        return _image_part(_next(images, where) if image is None else PromptImage(where, image))
    return fields


def _split(text: str, where: str, images: deque[PromptImage]) -> Iterator[dict[str, Any]]:
    for index, piece in enumerate(text.split(_MARK)):
        if index:
            yield _image_part(_next(images, f"{where}.content: {_MARK} {index}"))
        if piece:
            yield {"type": "text", "text": piece}


def _prepend(name: str, messages: Sequence[dict[str, Any]], images: Sequence[PromptImage]) -> None:
    if not images:
        return
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise InvalidPrompt(f"{name} has no user message, in which the images of the row could be")
    content = first["content"]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    first["content"] = [*map(_image_part, images), *text]


def _next(images: deque[PromptImage], where: str) -> PromptImage:
    if not images:
        raise InvalidPrompt(f"{where}: there is no image for it; put it into the part, or into a column images")
    return images.popleft()


def _image_part(image: PromptImage) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _image_url(image.value, image.where)}}


def _image_url(image: object, where: str) -> str:
    """Return the URL of an image: of a URL itself, of the bytes of a file, of {bytes, path} or {url}, or of PIL's images."""
    if isinstance(image, Mapping):
        image = next((image[key] for key in ("bytes", "url", "path") if image.get(key) is not None), None)
    if isinstance(image, str):
        return _checked_url(image, where)
    if isinstance(image, bytes):
        return _data_url(image, where)
    content = None if image is None or isinstance(image, list | tuple) else _content(image)
    if content is None:
        raise InvalidPrompt(f"{where}: an image must be a URL or the bytes of a file, not {_kind(image)}")
    return content


def _content(image: object) -> str | None:
    """Return the data URL of an `Image` of this package or of PIL; None for any other value."""
    try:
        parts = content_of(image)
    except (ValueError, TypeError, RecursionError):
        return None
    return None if isinstance(parts, str) else str(parts[0]["image_url"]["url"])  # type: ignore[index, call-overload]


def _checked_url(url: str, where: str) -> str:
    if url.startswith(("https://", "http://")):
        return url
    if len(url) > 2 * MAX_IMAGE_BYTES:
        raise InvalidPrompt(f"{where}: the image has more than {MAX_IMAGE_BYTES:,} bytes; make it smaller")
    if not _DATA_URL.fullmatch(url):
        advice = "store its bytes or a data URL: files that a dataset names are not read"
        raise InvalidPrompt(f"{where}: {url[:40]!r} is neither an http(s) URL nor a data URL of an image; {advice}")
    return url


def _data_url(data: bytes, where: str) -> str:
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidPrompt(f"{where}: the image has {len(data):,} bytes; at most {MAX_IMAGE_BYTES:,} are allowed")
    media_type = next((name for name, signature in _SIGNATURES.items() if signature.match(data)), None)
    if media_type is None:
        raise InvalidPrompt(f"{where}: the bytes are no PNG, JPEG, GIF, WebP or BMP image; convert it")
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
