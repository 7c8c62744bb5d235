"""APIs that other programs' clients already speak: Moondream's and OpenAI's, answered by the engine of this server."""
