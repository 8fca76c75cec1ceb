"""Agents of servers that are killed: one with its own tools only, and one whose tools are a program's."""

from __future__ import annotations

import os
import sys

from rollout_server.tool import mcp

from tests.support import rogue_program
from tests.support.toolset_stand import Caught

MARK = "TOOLSET_MARK"
plain = Caught("plain")
programs = Caught("programs", mcp([sys.executable, "-SI", rogue_program.__file__, os.environ.get(MARK, "mark")]))
