"""Development tools: the generators of every generated file in the repository. Not part of any image or wheel."""
