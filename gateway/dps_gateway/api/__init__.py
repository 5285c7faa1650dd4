"""The gateway's HTTP interfaces: the OpenAI API, SGLang's API, and the admin API."""
