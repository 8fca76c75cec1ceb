"""`make docs`: generate the tables of settings in docs/ from the settings classes. Markers in the pages enclose the tables.

python deploy/settings_tables.py            # write the tables
python deploy/settings_tables.py --check    # fail if a table is out of date
"""

# ruff: noqa: T201 - a command-line program prints.

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from rollout_server.settings import Settings, names_of
from rollout_server.settings.standalone_gateway import GatewayOptions, name_of

DOCS = Path(__file__).resolve().parents[1] / "docs"


def server() -> Iterator[str]:
    """Yield the tables of the settings of `rollout serve`, one per group."""
    for group in Settings.__bases__:
        yield from ("", (group.__doc__ or "").strip(), "", "| setting | default | meaning |", "|---|---|---|")
        yield from (_row(names_of(name)[0], Settings.model_fields[name]) for name in _own(group))


def gateway() -> Iterator[str]:
    """Yield the table of the settings of `rollout gateway`."""
    yield from ("", "| setting | default | meaning |", "|---|---|---|")
    yield from (_row(name_of(name), field) for name, field in GatewayOptions.model_fields.items())


def references() -> Iterator[str]:
    """Yield the table of setting names in the reference implementations."""
    yield from ("", "| name in the references | name here | default here |", "|---|---|---|")
    for name, field in Settings.model_fields.items():
        first, *others = names_of(name)
        yield from (f"| `{other}` | `{first}` | {_default(field)} |" for other in others)


TABLES = {
    "deployment.md": {"server settings": server, "gateway settings": gateway},
    "migrating.md": {"names of settings": references},
}


def fresh(page: str, text: str) -> str:
    """Return the text of a page with up-to-date tables. Raises ValueError if the page lacks the markers of a table."""
    for mark, rows in TABLES[page].items():
        begin, end = f"<!-- {mark}: written by `make docs` -->\n", f"<!-- end of {mark} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{page} lacks the markers of {mark}: add {begin.strip()} and {end.strip()}")
        text = before + begin + "\n".join(rows()).lstrip("\n") + "\n" + end + after
    return text


def _own(group: type[BaseSettings]) -> Iterator[str]:
    return (name for name in Settings.model_fields if name in group.__annotations__)


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_default(field)} | {_escaped(field.description or '')} |"


def _default(field: FieldInfo) -> str:
    default: Any = field.default
    if isinstance(default, SecretStr):
        default = default.get_secret_value()
    if default is None or default in ("", (), {}):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return f"`{','.join(default)}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Write or check all tables. Returns the exit code."""
    stale = []
    for page in TABLES:
        path = DOCS / page
        text = path.read_text()
        written = fresh(page, text)
        if written != text:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(written)
    if stale and "--check" in arguments:
        print(f"not fresh: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
