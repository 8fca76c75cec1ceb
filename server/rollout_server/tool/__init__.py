"""Tools: functions that a model may call.

A tool's parameters are its function's annotations. They are told to the model as JSON Schema in the plain shape that function
tools have, and arguments are checked strictly against them: "5" is no number, and neither is true.
"""

from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.tool.function import FunctionTool, tool
from rollout_server.tool.result import Image, result_text

__all__ = ["FunctionTool", "Image", "ToolPolicy", "result_text", "tool"]
