"""Tools: functions that a model may call.

A tool's parameters are its function's annotations. The model sees them as JSON Schema in the form that OpenAI's function tools
use. Arguments are validated strictly: neither "5" nor true is a number.
"""

from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.tool.function import FunctionTool, tool
from rollout_server.tool.mcp import mcp
from rollout_server.tool.result import Image, result_text

__all__ = ["FunctionTool", "Image", "ToolPolicy", "mcp", "result_text", "tool"]
