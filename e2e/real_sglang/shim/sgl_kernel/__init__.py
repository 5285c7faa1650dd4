"""Replaces the CUDA wheel of SGLang's kernels on a machine without a GPU.

`cpu_operators` and `speculative` implement what speculation needs on a CPU. Every other name in every submodule is
an object that raises NotImplementedError when it is called: SGLang imports many kernels but does not call them on the
CPU.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class Missing:
    """A kernel that is not available."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{self.name} needs a GPU")

    def __getattr__(self, name: str) -> "Missing":
        return missing(self.name, name)


def missing(module: str, name: str) -> Missing:
    """A placeholder for a name in a module. Raises AttributeError for dunder names, which Python looks up itself."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{module}.{name}")


class Stub(ModuleType):
    """A submodule in which every name is a missing kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Missing:
        return missing(self.__name__, name)


class Stubs(MetaPathFinder, Loader):
    """Provides a stub for every submodule that has no file in this package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("sgl_kernel.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has no code."""


from .cpu_operators import *  # noqa: E402, F403  # SGLang imports these names from here

sys.meta_path.append(Stubs())


def __getattr__(name: str) -> Missing:  # PEP 562
    return missing("sgl_kernel", name)
