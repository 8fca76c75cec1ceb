"""`rollout tools serve`: offers tools to other programs, as ToolService over gRPC and as an MCP server."""
