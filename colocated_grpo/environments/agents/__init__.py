"""Programs that hold conversations with the policy through OpenAI's chat API, as episodes."""
