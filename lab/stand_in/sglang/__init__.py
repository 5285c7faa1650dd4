"""Not SGLang: the name by which the operator starts engines, in the image of the emulated one."""
