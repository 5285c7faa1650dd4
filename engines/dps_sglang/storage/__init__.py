"""A page store in a directory that many engines share.

Pages are verified, and their total size is limited. The package imports neither torch nor SGLang.
"""
