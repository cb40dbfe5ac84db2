"""Tools the policy may call: typed Python functions and those of MCP servers, and environments made of them."""

from .box import ToolBox
from .env import ToolEnv, ToolEnvConfig
from .mcp_server import McpServer, McpSession
from .tool import Tool, load_tool

__all__ = ["McpServer", "McpSession", "Tool", "ToolBox", "ToolEnv", "ToolEnvConfig", "load_tool"]
