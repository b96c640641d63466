"""A server with OpenAI's interface: transformers' own, whose answers are drafted."""
