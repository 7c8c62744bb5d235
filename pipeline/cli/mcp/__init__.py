"""`saccade mcp`: the Model Context Protocol, so that assistants can use the cameras of a running Saccade."""
