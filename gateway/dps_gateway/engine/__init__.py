"""What the gateway knows about the engines: SGLang's rules and paths, and the token counts in answers."""
