"""The picture of a rollout's tokens: well-formed, complete, coloured by author, and without references to other places."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from rollout_server.inspection.svg import transcript_svg
from rollout_server.inspection.transcript import transcript_of
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from tokenizers import Tokenizer

from tests.inspection.conftest import Played

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {"prompt · mask 0": "#374151", "model · mask 1": "#064e3b", "environment · mask 0": "#78350f"}
ADD = ScriptedReply(content="Adding.", tool_calls=(tool_call("c1", "add", '{"a": 5, "b": 3}'),))
tokenizer = Tokenizer.from_file(f"{TOY_TOKENIZER}/tokenizer.json")


def decode(ids: object) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))  # type: ignore[call-overload]


async def test_every_token_of_the_model_and_the_environment_is_a_box(played: Played) -> None:
    rollout = await played.play(Script((ADD, ScriptedReply(content='It is 8 <b> & "8"\n'))))
    transcript = transcript_of(rollout)
    text = transcript_svg(transcript, decode)
    picture = ElementTree.fromstring(text)
    assert text.count("http") == 1  # the name of the SVG namespace
    boxes = picture.findall(f"{SVG}g")
    (segment,) = transcript.segments
    titles = [box.findtext(f"{SVG}title") or "" for box in boxes]
    trained = [title for title in titles if ", mask 1" in title]
    assert sum(len(title.split(",")[0].removeprefix("id ").split()) for title in trained) == segment.trained
    assert all("logprob -" in title for title in trained)
    colours = {each.text: each.get("fill") for each in picture.findall(f"{SVG}text")}
    assert COLOURS.items() <= colours.items()
    shown = "".join(box.findtext(f"{SVG}text") or "" for box in boxes)
    assert '<b>·&·"8"⏎' in shown.replace(" ", "·")


async def test_a_long_prompt_is_cut_in_the_middle(played: Played) -> None:
    rollout = await played.play(
        Script((ScriptedReply(content="8"),)), messages=[{"role": "user", "content": "one two three " * 200}]
    )
    boxes = ElementTree.fromstring(transcript_svg(transcript_of(rollout), None)).findall(f"{SVG}g")
    (cut,) = [text for box in boxes if "tokens …" in (text := box.findtext(f"{SVG}text") or "")]
    (segment,) = transcript_of(rollout).segments
    kinds = Counter(run.letter for run in segment.runs for _ in run.ids)
    assert cut == f"… {kinds['P'] - 48} tokens …"
    assert len(boxes) == 48 + 1 + sum(count for letter, count in kinds.items() if letter != "P")
