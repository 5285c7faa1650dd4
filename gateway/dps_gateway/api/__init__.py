"""The HTTP faces of the gateway: OpenAI's, SGLang's, and the admin port."""
