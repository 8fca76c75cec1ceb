"""Agents named on a command line, and errors for those that cannot be found or imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_server.authoring.agent_loader import all_agents, find_agents
from rollout_server.authoring.author_traceback import AuthorError

AGENT = "from rollout_server import Agent, tool, serve\n\n\nclass {0}(Agent):\n    name = '{0}'\n"


def names(*texts: str) -> list[str]:
    return [agent.name for agent in find_agents(texts)]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("", "A"),
        ("\n\nchosen = A()\n", "A"),
        ("\n\nclass B(A):\n    name = 'B'\n", "B"),
        ("\n\n_hidden = A()\n", "A"),
        ("\n\nclass B(A):\n    name = 'B'\n\n\nb = B()\n", "B"),
        ("\n\nif __name__ == '__main__':\n    serve(A())\n", "A"),
    ],
)
def test_the_only_agent_of_a_file_needs_no_name(here: Path, more: str, found: str) -> None:
    Path("one.py").write_text(AGENT.format("A") + more)
    assert names("one.py") == [found]


def test_an_imported_agent_is_not_the_files_own(here: Path) -> None:
    Path("base.py").write_text(AGENT.format("Base"))
    Path("mine.py").write_text("from base import Base\n\n\nclass Mine(Base):\n    name = 'mine'\n")
    assert names("mine.py") == ["mine"]


def test_objects_are_named_and_several_are_served(here: Path) -> None:
    Path("two.py").write_text(AGENT.format("A") + AGENT.format("B") + "\n\nmade = B()\n")
    assert names("two.py:A", "two:made") == ["A", "B"]
    assert [agent.name for agent in all_agents("two.py")] == ["B", "A"]
    with pytest.raises(AuthorError, match=r"two.py: contains 2 agents \(made, A\); name one, such as two.py:made"):
        names("two.py")
    with pytest.raises(AuthorError, match="more than one agent is called 'B'"):
        names("two.py:B", "two.py:made")


def test_a_file_of_a_package_imports_its_neighbours(here: Path) -> None:
    (here / "pack" / "deep").mkdir(parents=True)
    for folder in ("pack", "pack/deep"):
        (here / folder / "__init__.py").write_text("")
    (here / "pack" / "base.py").write_text(AGENT.format("Base"))
    inherits = "from ..base import Base\n\n\nclass Mine(Base):\n    name = 'mine'\n"
    (here / "pack" / "deep" / "agent.py").write_text(inherits)
    assert names("pack/deep/agent.py") == ["mine"]
    assert names("pack.base") == ["Base"]


def test_files_of_one_name_and_of_a_library_are_told_apart(here: Path) -> None:
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "agent.py").write_text(AGENT.format(folder))
    (here / "json.py").write_text(AGENT.format("J"))
    assert names("a/agent.py", "b/agent.py", "json.py") == ["a", "b", "J"]
    import json

    assert json.loads("1") == 1


WRONG = {
    "syntax": ("def f(:\n", "", "it.py:1: it.py cannot be imported: SyntaxError"),
    "raises": (
        "def f():\n    return 1 / 0\n\n\nf()\n",
        "",
        "it.py:2: it.py cannot be imported: ZeroDivisionError: division by zero",
    ),
    "exits": ("import sys\nsys.exit(3)\n", "", "it.py:2: it.py cannot be imported: SystemExit"),
    "missing_import": ("import nowhere_at_all\n", "", "it.py:1: it.py cannot be imported: ModuleNotFoundError"),
    "no_agent": ("x = 1\n", "", "it.py: contains no agent"),
    "no_object": (AGENT.format("A"), ":B", "it.py: it defines no B"),
    "another_object": ("x = 1\n", ":x", "'x' in it.py is not an Agent"),
    "nameless": (
        "from rollout_server import Agent\n\n\nclass A(Agent):\n    tools = ()\n",
        "",
        "it.py:4: agent class A: name",
    ),
    "wants_arguments": (AGENT.format("A") + "\n    def __init__(self, x):\n        pass\n", "", "it.py:4: "),
    "own_init": (
        AGENT.format("A") + "\n    def __init__(self):\n        self.x = {}['k']\n",
        "",
        "it.py:8: KeyError: 'k'",
    ),
    "bad_tool": (AGENT.format("A") + "\n\n@tool\ndef f(x): ...\n", "", "it.py:8: it.py cannot be imported: tool 'f'"),
    "serves": (AGENT.format("A") + "\n\nserve(A())\n", "", "it.py:8: importing the file calls serve()"),
    "no_reference": ("", ":", "'it.py:' is not MODULE, MODULE:OBJECT"),
}


@pytest.mark.parametrize(("source", "behind", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_told_by_file_and_line(here: Path, source: str, behind: str, said: str) -> None:
    Path("it.py").write_text(source)
    with pytest.raises(AuthorError) as caught:
        names(f"it.py{behind}")
    assert str(caught.value).startswith(said)


def test_what_is_not_there_is_told_apart_from_what_it_lacks(here: Path) -> None:
    with pytest.raises(AuthorError, match=r"there is no file gone\.py"):
        names("gone.py")
    with pytest.raises(AuthorError, match=r"there is no module gone; an agent is named as MODULE"):
        names("gone")
    with pytest.raises(AuthorError, match=r"there is no module gone\.deeper"):
        names("gone.deeper:A")
    Path("lacks.py").write_text("import gone\n")
    with pytest.raises(AuthorError, match=r"lacks.py:1: .*No module named 'gone'"):
        names("lacks")


LOOP = """from rollout_server.sdk import RolloutAgentLoop, serve_agent_loop


class Loop(RolloutAgentLoop):
    name = "loop"

    def get_tools(self, request):
        return []

    async def run(self, ctx):
        result = await ctx.chat(list(ctx.request.messages), temperature=0.25)
        return ctx.complete([*ctx.request.messages, result.message], reward=1.0)
"""


@pytest.mark.parametrize(
    ("more", "reference", "found"),
    [
        ("", "loop.py", ["loop"]),
        ("", "loop.py:Loop", ["loop"]),
        ("\n\nmade = Loop()\n", "loop.py", ["loop"]),
        ("\n\nmade = Loop()\nmade.name = 'mine'\n", "loop.py:made", ["mine"]),
        ("\n\nclass Other(Loop):\n    name = 'other'\n", "loop.py", ["other"]),
        ("\n\nclass Base(RolloutAgentLoop):\n    pass\n", "loop.py", ["loop"]),
        ("\n\nif __name__ == '__main__':\n    serve_agent_loop(Loop())\n", "loop.py", ["loop"]),
    ],
)
def test_a_loop_of_the_earlier_sdk_is_an_agent(here: Path, more: str, reference: str, found: list[str]) -> None:
    Path("loop.py").write_text(LOOP + more)
    assert names(reference) == found


def test_loops_and_agents_may_be_beside_each_other(here: Path) -> None:
    Path("both.py").write_text(LOOP + "\n\n" + AGENT.format("A"))
    assert sorted(agent.name for agent in all_agents("both.py")) == ["A", "loop"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("\n    get_tools = lambda self, request: None\n", "it.py:4: Loop.get_tools"),
        ("\n    def run(self, ctx):\n        return None\n", "it.py:4: Loop.run"),
        ("\n\nserve_agent_loop(Loop())\n", "it.py:15: importing the file calls serve_agent_loop()"),
    ],
)
def test_a_loop_that_cannot_be_served_is_told_by_file_and_line(here: Path, more: str, said: str) -> None:
    Path("it.py").write_text(LOOP + more)
    with pytest.raises(AuthorError) as caught:
        names("it.py")
    assert str(caught.value).startswith(said)
