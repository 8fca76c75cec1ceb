"""Prompts as message lists, and images in all forms in which datasets store them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rollout_server import Image
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.dataset.prompt import (
    MAX_IMAGE_BYTES,
    MAX_MESSAGES,
    InvalidPrompt,
    PromptImage,
    prompt_messages,
)

from tests.authoring.dataset.test_formats import json_lines, parquet
from tests.support.datasets import read_rows

PNG = b"\x89PNG\r\n\x1a\nrest"
JPEG = b"\xff\xd8\xffrest"
WEBP = b"RIFF\0\0\0\0WEBPrest"
LINK = "https://example.com/a.png"


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def images(*values: object) -> list[PromptImage]:
    return [PromptImage(f"images[{n}]", value) for n, value in enumerate(values)]


PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "link": (shown(LINK), shown(LINK)),
    "data_url": (shown(data_url(PNG)), shown(data_url(PNG))),
    "url_as_text": ({"type": "image_url", "image_url": LINK}, shown(LINK)),
    "detail": (
        {"type": "image_url", "image_url": {"url": LINK, "detail": "low", "more": None}},
        {"type": "image_url", "image_url": {"url": LINK, "detail": "low"}},
    ),
    "url": ({"type": "image", "url": LINK, "image": None}, shown(LINK)),
    "bytes_and_path": ({"type": "image", "image": {"bytes": JPEG, "path": "a"}}, shown(data_url(JPEG, "jpeg"))),
    "linked_path": ({"type": "image", "image": {"bytes": None, "path": LINK}}, shown(LINK)),
    "bytes": ({"type": "image", "image": WEBP}, shown(data_url(WEBP, "webp"))),
    "image": ({"type": "image", "image": Image(b"x", "image/tiff")}, shown(data_url(b"x", "tiff"))),
    "text": ({"type": "text", "text": "hi", "image": None}, text("hi")),
    "another_kind": (
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "video_url", "video_url": {"url": "x"}},
    ),
}


@pytest.mark.parametrize(("part", "converted"), PARTS.values(), ids=PARTS.keys())
def test_parts_get_urls(part: dict[str, Any], converted: dict[str, Any]) -> None:
    assert prompt_messages("prompt", user(part)) == user(converted)


def test_images_of_pil_become_png() -> None:
    pil = pytest.importorskip("PIL.Image", reason="needs Pillow, which nothing here installs")
    [message] = prompt_messages("prompt", user({"type": "image", "image": pil.new("RGB", (1, 1))}))
    assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


def test_images_of_a_column_go_where_the_prompt_has_places() -> None:
    both, urls = images(PNG, LINK), (shown(data_url(PNG)), shown(LINK))
    place = {"type": "image"}
    assert prompt_messages("prompt", user(place, text("or"), place), both) == user(urls[0], text("or"), urls[1])
    assert prompt_messages("prompt", "<image><image>Which?", both) == user(*urls, text("Which?"))
    assert prompt_messages("prompt", "Is <image> or <image>", both) == user(text("Is "), urls[0], text(" or "), urls[1])
    assert prompt_messages("prompt", "Which?", both) == user(*urls, text("Which?"))
    system = {"role": "system", "content": "Look."}
    assert prompt_messages("prompt", [system, *user(text("Which?"))], both) == [system, *user(*urls, text("Which?"))]
    assert prompt_messages("prompt", "<image> is a tag") == [{"role": "user", "content": "<image> is a tag"}]


def test_nulls_of_tables_are_removed_and_calls_stay() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c"},
    ]
    assert prompt_messages("prompt", messages) == [{"role": "user", "content": "hi"}, *messages[1:]]


def test_arguments_that_a_table_adds_to_a_call_are_removed(tmp_path: Path) -> None:
    """Parquet gives every call the arguments of all tools."""
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in ({"x": 1}, {"y": 2})
    ]
    talk = [[{"role": "assistant", "content": None, "tool_calls": [each]}, *user(text("b"))] for each in calls]
    rows = read_rows(parquet(tmp_path / "d.parquet", [{"prompt": each} for each in talk]))
    assert [row.messages for row in rows] == talk


WRONG: dict[str, tuple[object, list[PromptImage], str]] = {
    "none": (None, [], "prompt is empty"),
    "no_message": ([], [], "prompt is empty"),
    "one_message": ({"role": "user", "content": "x"}, [], "prompt must be a text or a list of messages, not dict"),
    "no_object": (["x"], [], "prompt[0] must be an object with role and content, not str"),
    "no_role": ([{"content": "x"}], [], "prompt[0].role is None"),
    "blank_role": ([{"role": " ", "content": "x"}], [], "prompt[0].role is ' '"),
    "no_content": ([{"role": "user"}], [], "prompt[0].content must be a text or a list of parts, not null"),
    "number": ([{"role": "user", "content": 5}], [], "prompt[0].content must be a text or a list of parts, not int"),
    "part": (user(text("a")) + user("b"), [], "prompt[1].content[0] must be an object with a type"),  # type: ignore[arg-type]
    "part_without_text": (user({"type": "text"}), [], "prompt[0].content[0].text is missing"),
    "answered": (
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [],
        "prompt[1]: the last message is the assistant's",
    ),
    "many": ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), [], "prompt has 10,001 messages"),
    "file": (user(shown("file:///etc/passwd")), [], "prompt[0].content[0].image_url: 'file:///etc/passwd' is neither"),
    "path": ("hi", images({"bytes": None, "path": "/etc/passwd"}), "images[0]: '/etc/passwd' is neither"),
    "html": (user(shown("data:text/html;base64,AAAA")), [], "prompt[0].content[0].image_url: 'data:text/html"),
    "no_base64": (user(shown("data:image/png;base64,A A")), [], "prompt[0].content[0].image_url: 'data:image/png"),
    "no_url": (user({"type": "image_url"}), [], "prompt[0].content[0].image_url: an image must be a URL or"),
    "no_image": ("hi", images(PNG, b"%PDF"), "images[1]: the bytes are no PNG, JPEG, GIF, WebP or BMP image"),
    "null": ("hi", images(None), "images[0]: an image must be a URL or the bytes of a file, not null"),
    "image_number": ("hi", images(5), "images[0]: an image must be a URL or the bytes of a file, not int"),
    "large": ("hi", images(PNG + bytes(MAX_IMAGE_BYTES)), "images[0]: the image has 16,777,228 bytes"),
    "large_url": (
        user(shown("data:image/png;base64," + "A" * 2 * MAX_IMAGE_BYTES)),
        [],
        "prompt[0].content[0].image_url: the image has more than",
    ),
    "too_few": (user({"type": "image"}), [], "prompt[0].content[0]: there is no image for it"),
    "fewer_marks": ("<image>", images(PNG, PNG), "prompt has places for 1 of the row's 2 images"),
    "more_marks": ("<image><image>", images(PNG), "prompt[0].content: <image> 2: there is no image for it"),
    "no_user": ([{"role": "system", "content": "x"}], images(PNG), "prompt has no user message"),
}


@pytest.mark.parametrize(("prompt", "given", "said"), WRONG.values(), ids=WRONG.keys())
def test_wrong_prompts_name_the_place(prompt: object, given: list[PromptImage], said: str) -> None:
    with pytest.raises(InvalidPrompt) as caught:
        prompt_messages("prompt", prompt, given)
    assert str(caught.value).startswith(said)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "<image>", LINK])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "image_url", "audio"])},
    optional={"text": JSON, "image": JSON, "image_url": JSON | st.fixed_dictionaries({"url": SCALARS}), "url": SCALARS},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", " "]) | SCALARS},
    optional={"content": JSON | st.lists(PART, max_size=3), "tool_calls": JSON, "name": JSON},
)


@example([{"role": "user", "tool_calls": [{"id": "1"}]}], [LINK])
@given(JSON | st.lists(MESSAGE, max_size=3), st.lists(st.sampled_from([LINK, PNG]) | JSON, max_size=2))
def test_a_prompt_is_refused_or_converted_once(prompt: object, given_images: list[object]) -> None:
    try:
        messages = prompt_messages("prompt", prompt, images(*given_images))
    except InvalidPrompt:
        return
    assert json.loads(json.dumps(messages)) == messages
    assert prompt_messages("prompt", messages) == messages
    assert json.dumps(messages).count('"image_url": {"url"') >= len(given_images)


def test_images_of_tables(tmp_path: Path) -> None:
    """Rows as TRL and verl store them in Parquet."""
    rows = [
        {"prompt": [{"role": "user", "content": "<image>Which?"}], "images": [{"bytes": PNG, "path": None}], "n": 1}
    ]
    [row] = read_rows(parquet(tmp_path / "d.parquet", rows))
    assert row.messages == user(shown(data_url(PNG)), text("Which?"))
    assert row.metadata == {"n": 1}
    [row] = read_rows(parquet(tmp_path / "one.parquet", [{"question": "Which?", "image": {"bytes": PNG, "path": "a"}}]))
    assert row.messages == user(shown(data_url(PNG)), text("Which?"))
    wrong = [rows[0], {**rows[0], "images": [{"bytes": b"text", "path": None}]}]
    with pytest.raises(AuthorError, match=r"d\.parquet: row 2: images\[0\]: the bytes are no PNG"):
        read_rows(parquet(tmp_path / "d.parquet", wrong))


def test_a_place_in_a_message_is_named_with_the_line(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "x"}]}, {"messages": [{"role": "user", "content": 5}]}]
    with pytest.raises(AuthorError, match=r"d\.jsonl:3: messages\[0\]\.content must be a text"):
        read_rows(json_lines(tmp_path / "d.jsonl", rows))
