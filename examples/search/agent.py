"""Agent that searches a small corpus with SQLite's full-text index. The facts are invented, so no model has learned them."""

import re
import sqlite3
from pathlib import Path

from rollout_server import Agent, Limits, Run, ToolError, tool

CORPUS = Path(__file__).parent / "corpus"


class Search(Agent):
    """Answers questions about the invented island of Karn from search results."""

    name = "search"
    limits = Limits(turns=8, seconds=120)

    def __init__(self, corpus: Path = CORPUS) -> None:
        self._index = indexed(corpus)
        self.tools = (tool(self.search), tool(self.read))

    def search(self, query: str, results: int = 3) -> list[dict[str, str]]:
        """Search the corpus for words.

        Args:
            query: words to look for.
            results: how many pages to return, 1 to 10.
        """
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        if not words:
            raise ToolError("the query has no words")
        found = self._index.execute(
            "SELECT title, snippet(pages, 1, '', '', ' ... ', 24) FROM pages WHERE pages MATCH ? ORDER BY rank LIMIT ?",
            (words, min(max(results, 1), 10)),
        )
        return [{"title": title, "excerpt": excerpt} for title, excerpt in found]

    def read(self, title: str) -> str:
        """Read the whole page with a title that a search returned."""
        row = self._index.execute("SELECT text FROM pages WHERE title = ?", (title,)).fetchone()
        if row is None:
            raise ToolError(f"there is no page {title!r}; search returns titles")
        return str(row[0])

    async def reward(self, run: Run) -> float:
        """Return 1.0 if the last message contains the ground truth, else 0.0."""
        answer = " ".join(str(run.messages[-1].get("content")).split())
        return float(str(run.metadata.get("ground_truth")).casefold() in answer.casefold())


def indexed(corpus: Path) -> sqlite3.Connection:
    """Return a full-text index of a directory of Markdown files. The first line of each file is its title."""
    # Synchronous tools run in threads. After this function the index is only read, and SQLite serializes the queries.
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE pages USING fts5 (title, text, tokenize = 'porter unicode61')")
    for path in sorted(corpus.glob("*.md")):
        title, _, text = path.read_text().partition("\n")
        index.execute("INSERT INTO pages VALUES (?, ?)", (title.lstrip("# "), text.strip()))
    return index
