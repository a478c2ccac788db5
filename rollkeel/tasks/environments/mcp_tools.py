"""Tools of a server of the Model Context Protocol, over its standard input and output. Needs the extra `mcp`.

The server is a program of yours: it runs beside rollkeel, outside of the sandbox, one for each episode that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.tasks.environment import ToolLost

DEADLINE_S = 30.0


class Server:
    """A running server. Close it."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises `BadInput` without the library, and for a command that is no server."""
        try:
            from anyio.from_thread import start_blocking_portal
            from mcp import Client, StdioServerParameters
        except ImportError:
            raise BadInput("tools of MCP servers need the extra mcp: pip install 'rollkeel[mcp]'") from None
        where = StdioServerParameters(command=command[0], args=list(command[1:]))
        with ExitStack() as stack:
            try:
                self._portal = stack.enter_context(start_blocking_portal())
                client = Client(where, read_timeout_seconds=DEADLINE_S)
                self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
                self._listed = self._portal.call(self._client.list_tools).tools
            except Exception as error:  # of the library, of the operating system, of the program
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                raise BadInput(f"MCP server {command[0]!r}: {type(error).__name__}: {error}"[:300]) from None
            self._stack = stack.pop_all()

    def tools(self) -> list[ServerTool]:
        return [ServerTool(self, tool.name, tool.description or "", tool.input_schema) for tool in self._listed]

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Whether it went well, and what the model reads. Raises `ToolLost`."""
        from mcp import MCPError

        try:
            result = self._portal.call(self._client.call_tool, name, arguments)
        except MCPError as error:
            if error.code in (-32000, -32001):  # connection closed, request timeout
                raise ToolLost(f"MCP server: {error}") from None
            return False, str(error)
        except Exception as error:
            raise ToolLost(f"MCP server: {type(error).__name__}: {error}") from None
        return not result.is_error, "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)

    def close(self) -> None:
        self._stack.close()


class ServerTool:
    """One of a server's tools, as `rollkeel.tasks.environments.tools.Function`."""

    def __init__(self, server: Server, name: str, about: str, parameters: dict[str, Any]) -> None:
        self._server, self.name = server, name
        self._about, self._parameters = about, parameters

    def schema(self) -> dict[str, Any]:
        about = {"name": self.name, "description": self._about, "parameters": self._parameters}
        return {"type": "function", "function": about}

    def call(self, arguments: Any) -> str:
        from rollkeel.tasks.environments.tools import Refused

        if not isinstance(arguments, dict):
            raise Refused(f"{self.name}: expected an object of arguments")
        good, text = self._server.call(self.name, arguments)
        if not good:
            raise Refused(f"{self.name}: {text}")
        return text
