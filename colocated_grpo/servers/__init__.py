"""The engines of all ranks behind one HTTP server: OpenAI's routes, vLLM's token routes, and /generate."""
