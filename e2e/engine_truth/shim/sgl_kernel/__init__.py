"""Stand-in for the CUDA wheel `sglang-kernel` on a machine without a GPU: _cpu_ops.py carries the CPU ops the
speculative path needs; every other name resolves to an object that raises when called."""

import importlib.machinery, os, sys, types

__version__ = "0.4.10"


class _missing:
    def __init__(self, name):
        self._name = name

    def __call__(self, *a, **k):
        raise NotImplementedError(f"sgl_kernel op {self._name} is CUDA only")

    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return _missing(f"{self._name}.{n}")


def _getattr_for(prefix):
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{prefix}.{name}")

    return __getattr__


class _Finder:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        m = types.ModuleType(spec.name)
        m.__path__ = []
        m.__getattr__ = _getattr_for(spec.name)
        return m

    def exec_module(self, module):
        pass


from sgl_kernel._cpu_ops import *  # noqa
import sgl_kernel.speculative  # noqa

__getattr__ = _getattr_for("sgl_kernel")
sys.meta_path.append(_Finder())
