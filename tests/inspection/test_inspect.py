"""Finished rollouts, inspected by uid and from files, token by token."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from google.protobuf import json_format
from osmosis.rollout.v1 import outcome_pb2, outcome_service_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rich.console import Console
from rollout_gateway.rest.proto_json import message_to_json
from rollout_server.inspection.terminal import ViewOptions, print_transcript
from rollout_server.inspection.transcript import parting_text, transcript_of
from rollout_server.testing.script import Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

from tests.inspection.conftest import TOY, Invoke, Played, saved
from tests.support.processes import command, environment
from tests.support.random_rollouts import outcome_of, span
from tests.support.trainer_scenarios import SCENARIOS

ADD = (tool_call("c1", "add", '{"a": 5, "b": 3}'),)
CUT = Script((ScriptedReply(content="Adding.", tool_calls=ADD, cut=True), ScriptedReply(content="8")))
DRIFT = Script((ScriptedReply(content="Adding.", tool_calls=ADD, surplus=(5, 6, 7)), ScriptedReply(content="8")))
SCRIPTS = {
    "plain": SCENARIOS["add_then_multiply"].script,
    "unicode": SCENARIOS["three_turns_mixed_content"].script,
    "cut": CUT,
    "drift": DRIFT,
}
_LETTERS = {0: "M", 1: "P", 2: "E", 3: "C", 4: "A"}


def written(rollout: pb.Rollout) -> list[list[tuple[str, int]]]:
    """The author's letter and the id of each token, by segment, from the ledger."""
    segments = rollout.outcome.segments
    return [[(_LETTERS[s.mask_reason], token) for s in segment.spans for token in s.token_ids] for segment in segments]


def unreadable(rollout: pb.Rollout) -> pb.Rollout:
    """The same rollout with a tokenizer that is not available, so that ids are printed."""
    rollout.spec.tokenizer.name = "elsewhere"
    return rollout


def drawn(output: str) -> Iterator[list[tuple[str, int]]]:
    """The letters and ids, parsed from printed output."""
    for segment in re.split(r"\nsegment \d+ ", output)[1:]:
        found: list[tuple[str, int]] = []
        for letter, number, ids in re.findall(r"^([MPECA]) +(\d+)│ ([\d ]+)$", segment, re.MULTILINE):
            assert int(number) == len(found)
            found += [(letter, int(token)) for token in ids.split()]
        yield found


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_letters_are_the_ledgers_authors(played: Played, invoke: Invoke, tmp_path: Path, name: str) -> None:
    rollout = await played.play(SCRIPTS[name])
    told = await invoke(saved(unreadable(rollout), tmp_path))
    assert told.exit_code == 0, told.stderr
    assert list(drawn(told.stdout)) == written(rollout)
    assert "token ids are shown" in told.stderr


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_texts_are_the_tokens(played: Played, invoke: Invoke, tmp_path: Path, name: str) -> None:
    rollout = await played.play(SCRIPTS[name])
    told = json.loads((await invoke(saved(rollout, tmp_path), "--json")).stdout)  # "toy" needs no directory
    tokenizer = AutoTokenizer.from_pretrained(TOY_TOKENIZER)
    for segment, shown in zip(rollout.outcome.segments, told["segments"], strict=True):
        ids = [token for each in segment.spans for token in each.token_ids]
        assert "".join(run["text"] for run in shown["runs"]) == tokenizer.decode(ids)
        for own, run in zip(segment.spans, shown["runs"], strict=True):
            assert (run["turn"], run["token_ids"]) == (own.turn, list(own.token_ids))
            assert run["logprobs"] == (list(own.logprobs.values) if own.HasField("logprobs") else None)
            assert run["author"] == ("model" if own.author == token_pb2.AUTHOR_MODEL else "other")


async def test_a_uid_and_every_form_of_file_tell_the_same(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(SCRIPTS["plain"])
    forms = {
        "binary": rollout.SerializeToString(),
        "json": json_format.MessageToJson(rollout).encode(),
        "snake": json_format.MessageToJson(rollout, preserving_proto_field_name=True).encode(),
        "answer": pb.GetRolloutResponse(rollout=rollout).SerializeToString(),
        "delivery": outcome_service_pb2.DeliverOutcomeRequest(rollout=rollout).SerializeToString(),
    }
    url = f"http://127.0.0.1:{played.server.http_port}/v1/rollouts/{rollout.uid}?view=full"
    async with httpx.AsyncClient(trust_env=False) as http:
        forms["plain"] = (await http.get(url)).content
    by_uid = await invoke(rollout.uid, "--server", played.address, *TOY)
    assert (by_uid.exit_code, by_uid.stderr) == (0, "")
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        assert (await invoke(tmp_path / name, *TOY)).stdout == by_uid.stdout, name
        assert (await invoke("-", *TOY, stdin=content)).stdout == by_uid.stdout, name
    (tmp_path / "outcome").write_bytes(rollout.outcome.SerializeToString())
    nameless = (await invoke(tmp_path / "outcome", *TOY)).stdout
    assert nameless.splitlines()[1:] == by_uid.stdout.splitlines()[1:]


async def test_a_closing_token_is_told_from_what_surrounds_it(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(CUT, limits={"turns": 2})
    told = await invoke(saved(rollout, tmp_path), *TOY)
    spans = [span for segment in rollout.outcome.segments for span in segment.spans]
    closing = [span for span in spans if span.mask_reason == token_pb2.MASK_REASON_CLOSING]
    lines = [line for line in told.stdout.splitlines() if line.startswith("C ")]
    assert len(lines) == len(closing)
    assert all("<|im_end|>" in line for line in lines)


async def test_drift_is_marked_at_its_index_with_both_texts(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(DRIFT)
    before, after = rollout.outcome.segments
    (warning,) = [each for each in rollout.outcome.warnings if each.code == "token_drift"]
    lines = (await invoke(saved(rollout, tmp_path), *TOY)).stdout.splitlines()
    (marked,) = [number for number, line in enumerate(lines) if line.startswith(f"! {warning.index:>6}│ ")]
    assert marked > next(n for n, line in enumerate(lines) if line.startswith("segment 1 (drift of segment 0"))
    assert warning.message in lines[marked]
    told = json.loads((await invoke(saved(rollout, tmp_path), *TOY, "--json")).stdout)
    (drift,) = told["segments"][1]["drifts"]
    old, new = ([t for span in each.spans for t in span.token_ids] for each in (before, after))
    window = slice(warning.index, warning.index + len(drift["here_ids"]))
    assert drift["here_ids"] == new[window]
    assert drift["was_ids"] == old[warning.index :][: len(drift["was_ids"])]
    assert drift["was_ids"][0] != drift["here_ids"][0]
    assert lines[marked + 1].startswith("!       │ was   ")
    assert lines[marked + 2].startswith("!       │ here  ")


async def test_what_an_author_masked_has_a_letter_and_planes_are_named(invoke: Invoke, tmp_path: Path) -> None:
    planes = [token_pb2.TokenPlane(name="routed_experts", dtype="uint8", values=bytes(6))]
    rollout = pb.Rollout(
        uid="u" * 20,
        state=pb.ROLLOUT_STATE_FINISHED,
        outcome=outcome_of(
            span("prompt", 2),
            span("model", 2),
            span("environment", 1, turn=2),
            span("author", 3, turn=2, planes=planes),
        ),
    )
    (tmp_path / "plain").write_bytes(msgspec.json.encode(message_to_json(rollout, pb.ROLLOUT_VIEW_FULL)))
    for path in (saved(rollout, tmp_path), tmp_path / "plain"):
        told = (await invoke(path)).stdout
        assert list(drawn(told)) == written(rollout)
        assert "segment 0 (main): 2 of 8 tokens have mask 1, 3 generated tokens masked by the agent, verified" in told
        assert "turn 2, planes routed_experts (uint8)" in told.splitlines()
        (segment,) = json.loads((await invoke(path, "--json")).stdout)["segments"]
        assert [run["mask_reason"] for run in segment["runs"]] == ["prompt", None, "environment", "author"]
        assert [run["planes"] for run in segment["runs"]] == [
            [],
            [],
            [],
            [{"name": "routed_experts", "dtype": "uint8"}],
        ]


async def test_calls_of_an_agent_with_a_loop_of_its_own_say_why_their_segments_began(
    invoke: Invoke, tmp_path: Path
) -> None:
    parting = token_pb2.Parting(
        message=2, field="content", expected="On\u202e", found="Off", api="chat", client_agent="a1"
    )
    origin = token_pb2.SegmentOrigin(kind=token_pb2.SEGMENT_KIND_DRIFT, parent_id="9", parting=parting)
    outcome = outcome_of(span("prompt", 1), span("model", 3), origin=origin)
    outcome.segments[0].origin.CopyFrom(origin)
    outcome.capture.CopyFrom(outcome_pb2.CaptureReport(continued=4, parted=1, longest_share=0.75))
    rollout = pb.Rollout(uid="u" * 20, state=pb.ROLLOUT_STATE_FINISHED, outcome=outcome)
    (tmp_path / "plain").write_bytes(msgspec.json.encode(message_to_json(rollout, pb.ROLLOUT_VIEW_FULL)))
    for path in (saved(rollout, tmp_path), tmp_path / "plain"):
        lines = (await invoke(path)).stdout.splitlines()
        assert (
            "calls of the agent: 4 continued, 1 parted; 75% of the trained tokens are in the longest segment" in lines
        )
        title = next(
            at for at, line in enumerate(lines) if line.startswith("segment 0 (drift of segment 9, new prompt)")
        )
        assert lines[title + 1] == "a chat call of a1 parted at message 2 (content): 'On\\u202e', now 'Off'"
        assert not any(line.startswith("!") for line in lines), "a call parted, which is no drift of tokens"
        told = json.loads((await invoke(path, "--json")).stdout)
        assert told["segments"][0]["parting"] == lines[title + 1]
        assert (told["capture"]["continued"], told["capture"]["longest_share"]) == (4, 0.75)
    parting.field = "history"
    assert (
        parting_text(parting)
        == "a chat call of a1 had only 2 messages, where the conversation went on with 'On\\u202e'"
    )


def test_colour_tells_an_authors_mask_from_what_trains() -> None:
    outcome = outcome_of(span("prompt", 1), span("model", 1, first=5), span("author", 1, first=7, turn=2))
    file = io.StringIO()
    print_transcript(
        Console(file=file, force_terminal=True, width=80, color_system="standard"),
        transcript_of(pb.Rollout(outcome=outcome)),
        ViewOptions(None),
    )
    assert "\x1b[1;32mM      1│ 5" in file.getvalue()
    assert "\x1b[31mA      2│ 7" in file.getvalue()


async def test_one_segment_or_one_turn(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(DRIFT)
    path = saved(unreadable(rollout), tmp_path)
    one = (await invoke(path, "--segment", "1")).stdout
    assert list(drawn(one)) == written(rollout)[1:]
    turn = json.loads((await invoke(path, "--turn", "2", "--json")).stdout)
    assert {run["turn"] for segment in turn["segments"] for run in segment["runs"]} == {2}
    assert [segment["id"] for segment in turn["segments"]] == ["1"]
    for wrong, named in ((("--segment", "7"), "there are 0, 1"), (("--turn", "9"), "there are turns 1-2")):
        told = await invoke(path, *wrong)
        assert (told.exit_code, told.stdout) == (1, "")
        assert named in told.stderr


async def test_logprobs_stand_beside_the_tokens_of_the_model(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(SCRIPTS["plain"])
    told = (await invoke(saved(unreadable(rollout), tmp_path), "--logprobs", "--turn", "1")).stdout
    (span,) = [s for s in rollout.outcome.segments[0].spans if s.turn == 1 and s.author == token_pb2.AUTHOR_MODEL]
    shown = re.findall(r"^M +\d+│ +(-?[\d.]+)  (\d+)$", told, re.MULTILINE)
    expected = [(f"{value:.4f}", str(token)) for value, token in zip(span.logprobs.values, span.token_ids, strict=True)]
    assert shown == expected


async def test_answers_without_logprobs_say_unknown(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(Script((ScriptedReply(content="8", omit=frozenset({"logprobs"})),)))
    lines = (await invoke(saved(rollout, tmp_path), "--logprobs", *TOY)).stdout.splitlines()
    modelled = [line for line in lines if line.startswith("M ") and "│" in line]
    assert modelled
    assert all("unknown" in line for line in modelled)


async def test_a_rollout_without_tokens_shows_its_messages(played: Played, invoke: Invoke, tmp_path: Path) -> None:
    rollout = await played.play(SCENARIOS["trainer_500"].script)
    told = await invoke(saved(rollout, tmp_path))
    assert told.exit_code == 0
    assert "failed in turn 1 (trainer_server, HTTP 500)" in told.stdout
    assert '"content": "Go."' in told.stdout or '"content":"Go."' in told.stdout


async def test_a_process_of_its_own_writes_no_colour_into_a_pipe(played: Played, tmp_path: Path) -> None:
    """Also in a locale that supports only ASCII."""
    rollout = await played.play(SCRIPTS["unicode"])
    told = await command(
        "inspect",
        str(saved(rollout, tmp_path)),
        *TOY,
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING="ascii", PYTHONUTF8="0"),
    )
    assert (told.code, told.err) == (0, "")
    assert told.out.isascii()
    assert "\x1b" not in told.out
    assert "\\u043e\\u0442\\u0432\\u0435\\u0442" in told.out
