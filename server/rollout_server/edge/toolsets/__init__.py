"""Sessions with programs that serve tools: MCP servers and ToolServices.

What they send is hostile input. It is bounded while it is read; the names and schemas of tools are checked by the runtime.
"""
