"""Sessions with MCP servers: programs that speak over their standard input and output, and streamable HTTP."""
