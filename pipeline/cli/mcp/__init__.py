"""`saccade mcp`: a Model Context Protocol server. Assistants use the cameras of a running Saccade through it."""
