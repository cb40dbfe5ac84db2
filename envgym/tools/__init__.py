"""Tools the policy may call: typed Python functions and those of MCP servers."""

from .box import ToolBox
from .mcp_server import McpServer, McpSession
from .tool import Tool, load_tool

__all__ = ["McpServer", "McpSession", "Tool", "ToolBox", "load_tool"]
