"""What a module's forward computes, as an expression: proved, not tried out.

A forward is called once with stand-ins: an input that notes what is done to it, and a module that hands out its children, parameters and float
attributes as further stand-ins, and nothing else. One call speaks for all calls because the code is looked at first: no branches, loops, closures,
try blocks or nested functions; no name but those of what the stand-in module hands out, of the few methods and functions known here, and of
torch itself. So nothing that the expression does not show (modes, randomness, shapes, counters) can be read or written, whatever the call.
"""

from __future__ import annotations

import dis
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import nn

Tree = tuple  # ("input",), ("parameter", name), ("attribute", name), or (operation, operand, ...): operands are trees or constants


class Opaque(Exception):
    """The forward does what cannot be followed."""


# What straight-line code consists of, Python 3.10 to 3.14. In-place operators share BINARY_OP with others: values refuse them.
_OPCODES = {
    "RESUME", "NOP", "CACHE", "EXTENDED_ARG", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_CONST", "LOAD_SMALL_INT", "PUSH_NULL", "KW_NAMES",
    "PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_METHOD", "BINARY_OP", "BINARY_MULTIPLY", "BINARY_ADD", "BINARY_POWER",
    "RETURN_VALUE",
}  # fmt: skip
_LOCALS = ("LOAD_FAST", "STORE_FAST")  # and their variants
_SILU, _RSQRT = nn.functional.silu, torch.rsqrt  # as they are now: one that was replaced since is not the same function
_GLOBALS = (torch, nn, nn.functional, _SILU, _RSQRT)
_NAMES = {"torch", "nn", "functional", "silu", "rsqrt", "float32"}
_NOT_PLAIN = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_METHODS = {"to", "float", "type_as", "pow", "square", "mean", "rsqrt", "dtype"}


class Value:
    """A tensor that is not there. `tape` holds one entry for every operation of a forward."""

    __slots__ = ("tree", "tape")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tree: Tree, tape: list):
        self.tree, self.tape = tree, tape

    def _make(self, operation: str, *operands: Any) -> Value:
        self.tape.append(operation)
        trees = [v.tree if isinstance(v, Value) else v for v in operands]
        if operation in ("mul", "add"):
            trees.sort(key=repr)  # both commute, bit for bit
        return Value((operation, *trees), self.tape)

    def __mul__(self, other: Any) -> Value:
        return self._make("mul", self, other)

    def __add__(self, other: Any) -> Value:
        return self._make("add", self, other)

    def __pow__(self, other: Any) -> Value:
        return self._make("pow", self, other)

    __rmul__, __radd__ = __mul__, __add__

    def _refuse(self, *_: Any) -> Any:
        raise Opaque

    __imul__ = __iadd__ = __ipow__ = __rpow__ = __bool__ = __eq__ = __ne__ = __iter__ = _refuse  # type: ignore[assignment]

    # what a forward may ask a tensor for; an attribute that is not here raises AttributeError, which ends the proof
    def to(self, dtype: Any) -> Value:
        return self._make("to", self, dtype)

    def float(self) -> Value:
        return self.to(torch.float32)

    def type_as(self, other: Value) -> Value:
        return self.to(other.dtype)

    def pow(self, exponent: Any) -> Value:
        return self ** exponent

    def square(self) -> Value:
        return self ** 2

    def mean(self, dim: Any, keepdim: bool = False) -> Value:
        return self._make("mean", self, dim, keepdim)

    def rsqrt(self) -> Value:
        return self._make("rsqrt", self)

    @property
    def dtype(self) -> Value:
        return Value(("dtype", self.tree), self.tape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        names = set(kwargs or ())
        if len(args) == 1 and isinstance(args[0], cls):
            if function is _SILU and names <= {"inplace"}:  # in place or not: the expression shows whether its argument has another use
                return args[0]._make("silu", args[0])
            if function is _RSQRT and not names:
                return args[0].rsqrt()
        raise Opaque


class _Child:
    """A child in a forward: it can be called with one value, and that is all."""

    __slots__ = ("_call",)
    _call: Any

    def __init__(self, call: Any):
        object.__setattr__(self, "_call", call)

    def __call__(self, value: Any) -> Value:
        if type(value) is not Value:
            raise Opaque
        return self._call(value)

    def __setattr__(self, *_: Any) -> None:
        raise Opaque


class _Module:
    """A module in its own forward."""

    __slots__ = ("_parts",)

    def __init__(self, parts: dict[str, Any]):
        object.__setattr__(self, "_parts", parts)

    def __getattr__(self, name: str) -> Any:
        return self._parts[name]

    def __setattr__(self, *_: Any) -> None:
        raise Opaque


def own_forward(cls: type) -> FunctionType | None:
    """The forward of a module class that is called and reads attributes in torch's own way, if it takes one argument; else None."""
    same = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")
    if any(getattr(cls, name) is not getattr(nn.Module, name) for name in same) or cls.__getattribute__ is not object.__getattribute__:
        return None
    forward = inspect.getattr_static(cls, "forward")
    if type(forward) is not FunctionType:
        return None
    code = forward.__code__
    one = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount) == (2, 0, 0) and not forward.__defaults__
    tries = getattr(code, "co_exceptiontable", None)  # Python 3.10 has opcodes for it
    return None if not one or code.co_flags & _NOT_PLAIN or code.co_freevars or code.co_cellvars or tries else forward


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is to run around this module's forward or backward; hooks for all modules apart."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def evaluate(module: nn.Module, linears: tuple[type, ...] = (nn.Linear,)) -> tuple[Tree, int] | None:
    """(what its forward computes, number of operations in it), or None where that cannot be said.

    Children of exactly one of the classes `linears` become ("linear", name, operand); any other child is followed in the same way. Weights may be
    of any device and dtype: nothing is computed. Hooks are not looked at.
    """
    tape: list = []
    try:
        value = _follow(module, Value(("input",), tape), tape, linears)
    except Exception:  # of whatever kind: the stand-ins are not what the forward wants
        return None
    return value.tree, len(tape)


def _follow(module: nn.Module, value: Value, tape: list, linears: tuple[type, ...]) -> Value:
    cls = type(module)
    forward = own_forward(cls)
    if forward is None or "forward" in module.__dict__ or nn.functional.silu is not _SILU or torch.rsqrt is not _RSQRT:
        raise Opaque
    if cls is nn.SiLU:  # its forward reads a flag that changes nothing; see __torch_function__
        if forward is not _SILU_FORWARD:
            raise Opaque
        return value._make("silu", value)
    parts: dict[str, Any] = {}
    for instruction in dis.get_instructions(forward):
        opcode, name = instruction.opname, instruction.argval
        if opcode == "LOAD_GLOBAL":
            if not any(forward.__globals__.get(name) is known for known in _GLOBALS):
                raise Opaque
        elif opcode in ("LOAD_ATTR", "LOAD_METHOD"):
            part = _part(module, name, tape, linears)
            if part is not None:
                parts[name] = part
            elif name not in _NAMES and name not in _METHODS:
                raise Opaque
        elif opcode not in _OPCODES and not opcode.startswith(_LOCALS):
            raise Opaque
    found = forward(_Module(parts), value)
    if type(found) is not Value:
        raise Opaque
    return found


def _part(module: nn.Module, name: str, tape: list, linears: tuple[type, ...]) -> Any:
    """A child, parameter or float attribute of a module as a stand-in; None for anything else, and for what the class may have replaced."""
    if hasattr(type(module), name):
        return None
    own = module.__dict__.get(name)
    if type(own) is float:
        return Value(("attribute", name), tape)
    if own is None and isinstance(module._parameters.get(name), nn.Parameter):
        return Value(("parameter", name), tape)
    if own is None and isinstance(module._modules.get(name), nn.Module):
        return _Child(_caller(module._modules[name], name, tape, linears))
    return None


def _caller(child: Any, name: str, tape: list, linears: tuple[type, ...]) -> Any:
    if type(child) in linears:
        return lambda value: value._make("linear", name, value)
    return lambda value: _follow(child, value, tape, linears)


_SILU_FORWARD = nn.SiLU.forward
