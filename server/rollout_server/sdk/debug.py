"""Debug files: one for each rollout, a JSON object a line."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from urllib.parse import quote

_log = logging.getLogger(__name__)
_NAME_LENGTH = 200
_LINE_LENGTH = 1024 * 1024


def debug_file(directory: str, rollout_id: str) -> Path:
    """`DIRECTORY/ROLLOUT_ID.jsonl`. An id cannot lead out of the directory: what is no part of a file's name is escaped."""
    name = quote(rollout_id, safe=" ", errors="surrogatepass")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _NAME_LENGTH:
        name = f"{name[:100]}-{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return Path(directory) / f"{name}.jsonl"


def write_line(path: Path, line: str) -> None:
    """Appends a line at once: what came before a crash is what such a file is for. What goes wrong is logged."""
    if len(line) > _LINE_LENGTH:
        _log.warning("an event of %d characters is not written to %s", len(line), path.name)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{line}\n")
    except OSError as error:
        _log.warning("%s cannot be written: %s", path.name, error)
