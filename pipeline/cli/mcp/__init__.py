"""`saccade mcp`: a Model Context Protocol server that lets assistants use the cameras of a running Saccade."""
