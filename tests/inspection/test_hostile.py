"""Text from models and trainers cannot control a terminal, nor imitate the command's output."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rich.console import Console
from rollout_server.edge.tokens.token_text import split_token_texts
from rollout_server.inspection.escape import visible
from rollout_server.inspection.terminal import ViewOptions, lines, print_transcript
from rollout_server.inspection.text import as_json
from rollout_server.inspection.transcript import transcript_of
from rollout_server.testing.script import Script, ScriptedReply

from tests.inspection.conftest import TOY, Invoke, Played, saved
from tests.support.random_rollouts import outcome_of, rollouts, span

EVIL = "\x1b[31mred\x1b]0;title\x07\r\x9b2J\u202egnp.exe\u2028\ue000 ⏎ ⟨U+001B⟩\nM      0│ forged\n"
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from([EVIL, "\n", "\ufffd", ""])


def harmless(text: str) -> bool:
    return all(unicodedata.category(c) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"} for c in text)


def words_of(vocabulary: Mapping[int, str]) -> Callable[[Sequence[int]], str]:
    return lambda ids: "".join(vocabulary.get(token, "") for token in ids)


@given(st.text())
@example(EVIL)
@example("\ud800")
def test_a_visible_text_is_harmless_and_of_one_line(text: str) -> None:
    shown = visible(text)
    assert harmless(shown)
    assert len(shown.splitlines()) <= 1
    assert visible(shown) == shown
    kept = iter(shown)
    assert all(c in kept for c in text if harmless(c) and (c == " " or unicodedata.category(c) != "Zs"))


@settings(max_examples=40)
@given(rollouts(), st.dictionaries(st.sampled_from((0, 1, 2, 3, 2**31 - 1)), anything), st.booleans())
def test_every_line_is_harmless_and_has_its_authors_letter(
    rollout: pb.Rollout, vocabulary: dict[int, str], logprobs: bool
) -> None:
    rollout.spec.rollout_id = rollout.outcome.failure.message = EVIL
    rollout.outcome.warnings.add(code=EVIL, message=EVIL, turn=1)
    shown = list(lines(transcript_of(rollout), ViewOptions(words_of(vocabulary), logprobs)))
    assert all(harmless(str(line)) for line in shown)
    for line in shown:
        assert re.match(r"[MPECAS?!] [ \d]{6}│ "
            if line.letter
            else r"rollout |failed|warning|M model|segment |calls |a chat |turn |no tok|\{|$",
                        str(line))  # fmt: skip


@given(rollouts(), st.dictionaries(st.sampled_from((0, 1, 2, 3, 2**31 - 1)), anything))
@settings(max_examples=40)
def test_pieces_are_all_tokens_in_order_and_all_of_the_text(rollout: pb.Rollout, vocabulary: dict[int, str]) -> None:
    decode = words_of(vocabulary)
    for stretch in transcript_of(rollout).segments:
        cuts = {run.start for run in stretch.runs}
        found = split_token_texts(stretch.ids, decode, cuts)
        assert [token for piece in found for token in stretch.ids[piece.start : piece.stop]] == list(stretch.ids)
        assert not any(piece.start < cut < piece.stop for piece in found for cut in cuts)
        assert "".join(piece.text or "" for piece in found) == decode(stretch.ids)


@given(rollouts(), st.dictionaries(st.sampled_from((0, 1, 2, 3, 2**31 - 1)), anything))
@settings(max_examples=30)
def test_the_json_holds_the_texts_as_they_are_and_no_control_character(
    rollout: pb.Rollout, vocabulary: dict[int, str]
) -> None:
    told = json.dumps(as_json(transcript_of(rollout), words_of(vocabulary)))
    assert told.isascii()
    assert told.isprintable()


def test_a_terminal_wraps_no_line_so_none_is_forged() -> None:
    """Padded to the width of the terminal, a text could continue where another author's line seems to begin."""
    forged = "a" * 30 + "P      0│ forged" + "宽" * 40
    transcript = transcript_of(pb.Rollout(outcome=outcome_of(span("prompt", 1), span("model", 1, first=11))))
    for width in (12, 40, 41):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=width, color_system="truecolor")
        print_transcript(console, transcript, ViewOptions(words_of({10: "x", 11: forged})))
        plain = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())
        assert "\x1b" not in plain
        after = plain[plain.index("turn 1") :].splitlines()
        assert [line[0] for line in after[2:]] == ["M"] * len(after[2:])
        assert "".join(line.split("│ ", 1)[1] for line in after[2:]) == forged


def test_a_broken_tokenizer_shows_ids() -> None:
    def broken(ids: Sequence[int]) -> str:
        raise OverflowError(EVIL)

    outcome = outcome_of(span("prompt", 1), span("model", 2, first=70))
    shown = [str(line) for line in lines(transcript_of(pb.Rollout(outcome=outcome)), ViewOptions(broken))]
    assert any("⟨70 71⟩" in line or "⟨70⟩⟨71⟩" in line for line in shown)


def test_a_message_that_is_no_json_is_shown_all_the_same() -> None:
    outcome = outcome_pb2.Outcome(stop=outcome_pb2.Stop(reason="stop"))
    outcome.messages.add(json="{" + EVIL)
    shown = [str(line) for line in lines(transcript_of(pb.Rollout(outcome=outcome)), ViewOptions(None))]
    assert "forged" in shown[-1]
    assert all(harmless(line) for line in shown)


async def test_escape_sequences_of_a_model_do_not_reach_the_terminal(
    played: Played, invoke: Invoke, tmp_path: Path
) -> None:
    rollout = await played.play(Script((ScriptedReply(content=EVIL),)))
    for extra in ((), ("--logprobs",), ("--json",)):
        told = await invoke(saved(rollout, tmp_path), *TOY, *extra)
        assert told.exit_code == 0, told.stderr
        assert all(harmless(line) for line in told.stdout.split("\n"))
    told = await invoke(saved(rollout, tmp_path), *TOY)
    assert "␛[31mred␛]0;title␇␍⟨U+009B⟩2J⟨U+202E⟩gnp.exe⟨U+2028⟩⟨U+E000⟩ ⏎ ⟨U+001B⟩⏎" in told.stdout
    assert "\nM      0│ forged" not in told.stdout
