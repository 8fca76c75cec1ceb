"""Run random rollouts with random chat templates and print the verdicts on the renderer, by trait.

Exits with status 1 if the renderer returned incorrect ids without reporting it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context

from tests.hostile.templates.reduce import kinds, signature
from tests.hostile.templates.run import PATHS, SILENT, Boundary, Difference, Played, Verdict, cases, play_numbered

_SHOWN = 12


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.templates", description=__doc__)
    parser.add_argument(
        "--boundaries", type=int, default=20000, help="minimum number of turn boundaries (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--only", type=int, help="run and print only this template of the seed")
    parser.add_argument(
        "--classes", type=int, default=_SHOWN, help="number of kinds of differences to reduce and print"
    )
    options = parser.parse_args()
    if options.only is not None:
        found = play_numbered(options.seed, options.only)
        _print(next(cases(options.seed, options.only, 1)).template.text)
    else:
        found = _many(options.seed, options.boundaries, options.jobs)
    _print(table(found.boundaries))
    for difference in kinds(found.differences, options.classes):
        _print(f"\n== {signature(difference)}\n{shown(difference)}")
    silent = len(found.differences)
    _print(f"{len(found.boundaries)} boundaries, {silent} silent differences (seed {options.seed})")
    return 1 if silent else 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _many(seed: int, boundaries: int, jobs: int) -> Played:
    """Run templates in order, until there are enough boundaries."""
    found, numbers = Played(), count()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way = deque(pool.submit(play_numbered, seed, next(numbers)) for _ in range(2 * jobs))
        while len(found.boundaries) < boundaries:
            found.add(under_way.popleft().result())
            under_way.append(pool.submit(play_numbered, seed, next(numbers)))
        pool.shutdown(cancel_futures=True)
    return found


def table(boundaries: Sequence[Boundary]) -> str:
    """Format the verdicts, by trait and in total."""
    rows: dict[tuple[str, str], list[Boundary]] = defaultdict(list)
    for boundary in boundaries:
        rows["all", ""].append(boundary)
        for trait in boundary.traits:
            rows[trait].append(boundary)
    heads = (
        "trait",
        "boundaries",
        *(f"exact {path}" for path in PATHS),
        "declined",
        "refused",
        "undecid.",
        "claimed",
        "silent",
    )
    lines = ["{:32}{:>11}{:>14}{:>15}{:>10}{:>9}{:>10}{:>9}{:>8}".format(*heads)]
    for (name, word), of_it in sorted(rows.items()):
        per = {path: Counter(dict(each.verdicts)[path] for each in of_it) for path in PATHS}
        both = sum(per.values(), Counter[Verdict]())
        possible = {
            path: sum(per[path][v] for v in (Verdict.RIGHT, Verdict.DECLINED, Verdict.DIFFERENT)) for path in PATHS
        }
        shares = [f"{per[path][Verdict.RIGHT]}/{possible[path]}" for path in PATHS]
        others = (both[v] for v in (Verdict.DECLINED, Verdict.REFUSED, Verdict.UNDECIDABLE, Verdict.CLAIMED))
        silent = sum(both[verdict] for verdict in SILENT)
        row = f"{name}={word}" if word else name
        lines.append(
            "{:32}{:>11}{:>14}{:>15}{:>10}{:>9}{:>10}{:>9}{:>8}".format(row, len(of_it), *shares, *others, silent)
        )
    return "\n".join(lines)


def shown(difference: Difference) -> str:
    """Format a difference with everything needed to reproduce it."""
    template, conversation = difference.case.template, difference.case.conversation
    turns = [
        f"  turn {number}: {json.dumps(turn.answer, ensure_ascii=False)}\n"
        f"    ending={turn.ending} free={turn.free} kept={turn.kept:.2f}\n"
        + "".join(f"    {json.dumps(message, ensure_ascii=False)}\n" for message in turn.environment)
        for number, turn in enumerate(conversation.turns, 1)
    ]
    return (
        f"  tools={conversation.tools} prompt:\n"
        + "".join(f"    {json.dumps(message, ensure_ascii=False)}\n" for message in conversation.prompt)
        + "".join(turns)
        + f"  at turn {difference.turn} by {difference.path}: {difference.verdict.value}\n"
        + f"    expected {difference.expected!r}\n    got      {difference.got!r}\n  template: {template.text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
