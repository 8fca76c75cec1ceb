"""Messages and metadata are cut out of a body verbatim."""

import json

from hypothesis import given
from hypothesis import strategies as st
from rollout_gateway.osmosis_http.body import Metadata

from tests.gateway.osmosis_http.bodies import locations, parse, spliced

blank = st.sampled_from(["", " ", "\n", "\t ", " \r\n "])
string = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=8).map(json.dumps),
    st.text(st.characters(codec="utf-8"), max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from([r'"\/\u0041\ud83d\ude00"', r'"\u00e9\b"', '"\x7f"']),
)
number = st.one_of(
    st.integers().map(str),
    st.sampled_from([str(2**64 + 1), str(-(2**63) - 1), "-0", "1E400", "1.50", "0.1e-7", "9" * 5000]),
)


def _object(pairs: list[tuple[str, str, str]]) -> str:
    return "{" + ",".join(f"{space}{key}{space}:{space}{value}{space}" for space, key, value in pairs) + "}"


def _list(items: list[tuple[str, str]]) -> str:
    return "[" + ",".join(f"{space}{item}{space}" for space, item in items) + "]"


# A few keys, so that some repeat.
key = st.one_of(st.sampled_from(['"a"', '"\\u0061"', '"metadata"']), string)
value = st.recursive(
    st.one_of(string, number, st.sampled_from(["null", "true", "false"])),
    lambda inner: st.one_of(
        st.lists(st.tuples(blank, inner), max_size=3).map(_list),
        st.lists(st.tuples(blank, key, inner), max_size=4).map(_object),
    ),
    max_leaves=8,
)
KNOWN = ("role", "content", "tool_calls", "tool_call_id", *Metadata.model_fields)
unknown_pairs = st.lists(
    st.tuples(blank, key, value).filter(lambda pair: json.loads(pair[1]) not in KNOWN),
    max_size=4,
)


@st.composite
def message(draw: st.DrawFn) -> str:
    before, after = draw(unknown_pairs), draw(unknown_pairs)
    role = (draw(blank), '"role"', draw(st.sampled_from(['"user"', '"assistant"', '"\\u0074ool"'])))
    content = draw(st.sampled_from([[], [("", '"content"', "null")], [(" ", '"content"', draw(string))]]))
    return _object([*before, role, *content, *after])


@given(messages=st.lists(message(), min_size=1, max_size=4), space=blank, metadata=unknown_pairs.map(_object))
def test_messages_and_metadata_travel_verbatim(messages: list[str], space: str, metadata: str) -> None:
    listed = "[" + ",".join(f"{space}{each}{space}" for each in messages) + "]"
    parsed = parse(spliced(listed, f', "metadata":{space}{metadata}{space}'))
    assert list(parsed.messages) == messages
    assert parsed.text("metadata") == metadata


@given(st.text(alphabet='{}[]",:\\u0123 NaInfty-e.rolmsg', max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    assert locations(text.encode())[0][0] == "body"
