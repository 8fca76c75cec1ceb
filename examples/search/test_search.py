"""Tests of the search agent, and of its index with unusual queries."""

import pytest
from agent import Search
from rollout_server import ToolError
from rollout_server.local_stack import ScriptedModel


def test_a_question(serving, scripted_model: ScriptedModel) -> None:
    model = scripted_model.calls("search", query="lighthouse built").calls("read", title="The lighthouse of Karn")
    model.says("It was built by Oda Rennick.")
    rollout = serving(Search()).play("Who built it?", model, metadata={"ground_truth": "Oda Rennick"})
    assert "The lighthouse of Karn" in rollout.tool_results[0]
    assert "1847" in rollout.tool_results[1]
    assert rollout.reward == 1.0


def test_words_are_found_in_other_forms() -> None:
    assert Search().search("climbing", 1)[0]["title"] == "The Tooth"


@pytest.mark.parametrize(
    "query", ['ferry"', "NEAR(ferry", "title:x* ferry", "ferry AND OR", "'; DROP TABLE pages ferry"]
)
def test_a_query_is_words_and_nothing_else(query: str) -> None:
    assert "The ferry" in {page["title"] for page in Search().search(query, 10)}


def test_a_query_without_words() -> None:
    with pytest.raises(ToolError, match="no words"):
        Search().search('" "')


def test_no_such_page() -> None:
    with pytest.raises(ToolError, match="no page 'Atlantis'"):
        Search().read("Atlantis")
