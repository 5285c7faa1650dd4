"""Development tools: the generators of every generated file in the repository. In no image and no wheel."""
