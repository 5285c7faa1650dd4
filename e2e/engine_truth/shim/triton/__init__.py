"""Import-only stand-in for triton (no kernel is ever launched on CPU)."""

import importlib.machinery, sys, types


class _Base:
    def __init_subclass__(cls, **k):
        super().__init_subclass__()


class _Mock(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        if n[0].isupper():
            v = type(n, (_Base,), {"__init__": lambda self, *a, **k: None})
        else:
            v = sys.modules.get(f"{self.__name__}.{n}") or _Mock(f"{self.__name__}.{n}")
        setattr(self, n, v)
        return v

    def __call__(self, *a, **k):
        if len(a) == 1 and callable(a[0]) and not k:
            return a[0]
        return lambda f: f

    def __bool__(self):
        return False


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Mock(spec.name)

    def exec_module(self, m):
        pass


sys.meta_path.insert(0, _Finder())
__version__ = "3.7.0"


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config:
    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **k):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def __getattr__(n):
    if n.startswith("__"):
        raise AttributeError(n)
    v = getattr(_Mock("triton"), n)
    globals()[n] = v
    return v


import triton.language as language


class _constexpr:
    def __init__(self, value=None):
        self.value = value


language.constexpr = _constexpr
