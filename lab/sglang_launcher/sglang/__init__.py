"""Not SGLang: lets the operator start the emulated server with the command line that starts SGLang."""
