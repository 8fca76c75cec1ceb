"""The model endpoint of a rollout in the shapes of OpenAI's and Anthropic's APIs. It maps shapes; the server decides."""
