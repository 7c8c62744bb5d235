"""The command `saccade mcp`: a Model Context Protocol server, which gives AI assistants access to the streams."""
