"""Modules that run as something else while they stay what they are: a subclass is made of a module's class, and the module changes to it, in place.

What a module computes is proved (`nn/symbolic.py`) before it changes, and again where it is read from a pickle or copied.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from torch import nn

from ampplug.nn.symbolic import own_forward


class Fused:
    """Mixed into a module's own class, below a class that has `forward` and `_ampplug_find`."""

    _ampplug_base: type
    _ampplug_names: tuple  # of what its forward uses
    _ampplug_forward: Any  # the base's, which the proof is about
    _ampplug_argument: str

    def __init_subclass__(cls, **_: Any) -> None:
        """What the module's bases do with their subclasses (registries) is not meant for this one."""

    @staticmethod
    def _ampplug_find(module: nn.Module) -> tuple | None:
        """`_ampplug_names` of a module, or None where it computes something else."""
        raise NotImplementedError

    def _ampplug_input(self, args: tuple, kwargs: dict) -> Any:
        """The one argument of a call, by position or by its own name; None for any other call."""
        if len(args) == 1 and not kwargs:
            return args[0]
        return kwargs.get(self._ampplug_argument) if len(kwargs) == 1 and not args else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied as its base is, and by way of the base: the class itself cannot be found by name."""
        cls = type(self)
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        if cls not in classes.values():  # another's subclass of ours
            return reduced
        return _remake, (cls.__mro__[1], cls._ampplug_base, cls._ampplug_names, *reduced[1][1:]), *reduced[2:]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        # the code of its class and of its children may be another's here
        cls = type(self)
        self.__class__ = cls._ampplug_base
        if cls._ampplug_find(self) == cls._ampplug_names:  # type: ignore[arg-type]
            self.__class__ = cls


classes: dict[tuple[type, type, tuple], type] = {}


def can_be_fused(cls: type) -> bool:
    """Whether a subclass of a module class can take its place: it is copied, pickled and made in the ordinary way."""
    if type(cls) not in (type, ABCMeta) or any(hasattr(cls, name) for name in ("__deepcopy__", "__copy__", "__getnewargs_ex__")):
        return False
    return cls.__reduce__ is object.__reduce__ and cls.__reduce_ex__ is object.__reduce_ex__


def _class(kind: type[Fused], base: type, names: tuple) -> type:
    if (kind, base, names) not in classes:
        forward = own_forward(base)
        assert forward is not None
        own = {
            "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__, "_ampplug_names": names, "_ampplug_base": base,
            "_ampplug_forward": forward, "_ampplug_argument": forward.__code__.co_varnames[1],
        }  # fmt: skip
        classes[kind, base, names] = type(base)(base.__name__, (kind, base), own)
    return classes[kind, base, names]


def _remake(kind: type[Fused], base: type, names: tuple, *arguments: Any) -> nn.Module:
    cls = base if own_forward(base) is None else _class(kind, base, names)
    return cls.__new__(cls, *arguments)


def fuse(module: nn.Module, kind: type[Fused], names: tuple) -> None:
    """Make a module run as `kind` has it, in place."""
    module.__class__ = _class(kind, type(module), names)


def unfuse(module: nn.Module) -> None:
    """Inverse of `fuse`; any other module is left alone."""
    if isinstance(module, Fused):
        module.__class__ = module._ampplug_base
        module.__dict__.pop("_ampplug_producer", None)
