"""The feed-forward block of Llama and its kin, `down(silu(gate(x)) * up(x))`, with everything between its three FP8 layers in FP8.

A module is such a block if its own forward computes that, which is found by trying it out (`find_blocks`), not by its name. It keeps its parameters,
children and type (by a subclass made for it); where its children are not plain FP8 layers any more, or have hooks, its own forward runs.

Launches of a step with delayed scaling: cast, two GEMMs, SwiGLU with cast, GEMM; cast, two GEMMs, SwiGLU backward with casts, four GEMMs and a sum.
"""

from __future__ import annotations

import weakref
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampplug import formats
from ampplug.kernels.swiglu import Fp8, Target, partial_amaxes, swiglu, swiglu_backward
from ampplug.nn.gemm import scaled_mm
from ampplug.nn.linear import Call, Linear, cast_input, quantize_for, record_and_dtype, settle_device
from ampplug.scaling import ScaleBook


class Names(NamedTuple):
    """Of a block's children."""

    gate: str
    up: str
    down: str


# ---------------------------------------------------------------- finding blocks


@torch.no_grad()
def find_blocks(model: nn.Module, converted: set[int]) -> dict[str, Names]:
    """Name of a module -> its children's roles, for the modules of `model` that compute `down(silu(gate(x)) * up(x))`.

    converted: ids of the Linears that become FP8 layers; all three must. A module with three fitting Linears and no other parameters or buffers is
    tried out with two rows of input, in evaluation and in training. One whose forward computes anything else, draws random numbers (dropout) or
    fails is none. Models on the meta device cannot be tried: none is found.
    """
    found = {}
    for name, module in model.named_modules():
        linears = [(n, m) for n, m in module.named_children() if isinstance(m, nn.Linear)]
        if len(linears) != 3 or any(id(m) not in converted or m.bias is not None or m.weight.is_meta for _, m in linears):
            continue
        if len(list(module.parameters())) != 3 or any(True for _ in module.buffers()) or any(_has_hooks(m) for _, m in linears):
            continue
        widths = {tuple(sorted(m.weight.shape)) for _, m in linears}
        # two take the block's input, one gives its output; rows of FP8 in between have no padding
        inputs = [m.in_features for _, m in linears]
        width = max(set(inputs), key=inputs.count)
        if len(widths) != 1 or linears[0][1].weight.numel() // width % 16:
            continue
        weight = linears[0][1].weight
        x = torch.sin(torch.arange(2 * width, device=weight.device).float()).view(2, -1).to(weight.dtype)
        y = _try(module, x)
        if y is None:
            continue
        for roles in permutations(linears):
            gate, up, down = (m for _, m in roles)
            if gate.weight.shape == up.weight.shape == down.weight.t().shape and _is_swiglu(x, y, gate, up, down):
                found[name] = Names(*(n for n, _ in roles))
                break
    return found


def _has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)


def _try(module: nn.Module, x: Tensor) -> Tensor | None:
    """The module's output for x, if it is the same in evaluation and in training and needs no random numbers."""
    modes = [(m, m.training) for m in module.modules()]
    outputs = []
    cuda = x.device.type == "cuda"
    with torch.random.fork_rng([x.device] if cuda else []):
        try:
            for training in (False, True):
                before = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if cuda else torch.empty(0)
                module.train(training)
                outputs.append(type(module).forward(module, x))
                after = torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if cuda else torch.empty(0)
                if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
                    return None
        except Exception:  # it wants other arguments
            return None
        finally:
            for m, mode in modes:
                m.training = mode
    first, second = outputs
    return first if isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second) else None


def _is_swiglu(x: Tensor, y: Tensor, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> bool:
    """Whether y is SwiGLU of x by these three, within the rounding of their dtype."""
    linear = nn.functional.linear
    wanted = linear(nn.functional.silu(linear(x, gate.weight)) * linear(x, up.weight), down.weight)
    tolerance = 1e-4 if x.dtype == torch.float32 else 3e-2
    return y.shape == wanted.shape and bool((y - wanted).float().norm() <= tolerance * wanted.float().norm())


# ---------------------------------------------------------------- the block


class Block(NamedTuple):
    """One forward call of a block: those of its layers."""

    gate: Call
    up: Call
    down: Call


class _Fp8SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, block: Block) -> Tensor:
        need_gate, need_up, need_down = ctx.needs_input_grad[1:4]
        matrix = x.reshape(-1, x.shape[-1])
        x8, x8t, x_inv = cast_input(matrix, block.gate, need_gate or need_up)
        if block.up.training and block.up.state.book is not None:
            block.up.state.book.follow(block.up.state.x_slot)
        a, b = (scaled_mm(x8, c.operand.forward, x_inv, c.operand.scale_inv, c.out_dtype, fast=True) for c in (block.gate, block.up))
        h8, h8t, h_inv = _hidden(a, b, block.down, need_down)
        assert h8 is not None
        y = scaled_mm(h8, block.down.operand.forward, h_inv, block.down.operand.scale_inv, block.down.out_dtype, fast=True)
        if y.shape[1] != block.down.n:
            y = y[:, : block.down.n].clone(memory_format=torch.contiguous_format)
        if x.dim() != 2:
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], block.down.n))
        ctx.save_for_backward(x8t, x_inv, a, b, h8t, h_inv, gate, up, down)  # weights so that autograd notices if they are changed
        ctx.block, ctx.x_dtype = block, x.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x8t, x_inv, a, b, h8t, h_inv, gate, up, down = ctx.saved_tensors
        block = ctx.block
        need_x, need_gate, need_up, need_down, _ = ctx.needs_input_grad
        before = need_x or need_gate or need_up
        matrix = dy.reshape(-1, dy.shape[-1])
        block.gate.state.bank.shared = None
        dy8, dy8t, dy_inv = quantize_for(matrix, block.down, block.down.state.dy_slot, formats.E5M2, before, need_down)
        dx = d_gate = d_up = d_down = None
        if need_down:
            d_down = _cut(scaled_mm(dy8t, h8t, dy_inv, h_inv, down.dtype, fast=False), down)
        if before:
            dh = scaled_mm(dy8, block.down.operand.backward, dy_inv, block.down.operand.scale_inv, a.dtype, fast=False)
            da, db = _gradients(dh, a, b, block, need_x, need_gate or need_up)
            if need_gate:
                d_gate = _cut(scaled_mm(da[1], x8t, da[2], x_inv, gate.dtype, fast=False), gate)  # type: ignore[arg-type]
            if need_up:
                d_up = _cut(scaled_mm(db[1], x8t, db[2], x_inv, up.dtype, fast=False), up)  # type: ignore[arg-type]
            if need_x:
                parts = [
                    scaled_mm(d[0], c.operand.backward, d[2], c.operand.scale_inv, ctx.x_dtype, fast=False)  # type: ignore[arg-type]
                    for d, c in ((da, block.gate), (db, block.up))
                ]
                k = gate.shape[1]
                dx = parts[0].add_(parts[1])[:, :k].reshape(*dy.shape[:-1], k)
        return dx, d_gate, d_up, d_down, None


def _cut(gradient: Tensor, weight: Tensor) -> Tensor:
    """Without the padding."""
    return gradient if gradient.shape == weight.shape else gradient[: weight.shape[0], : weight.shape[1]].contiguous()


def target(book: ScaleBook | None, slot: int, partials: Tensor | None, delayed: bool, record: bool) -> Target:
    """Of a slot; without a book, or not in training, the partial maxima decide alone."""
    if book is None or not delayed:
        return Target(partials=partials)
    return Target(book.scale_views[slot], partials, book.amax_views[slot] if record else None, book.scratch_views[slot])


def unknown(book: ScaleBook | None, slots: tuple[int, ...], delayed: bool) -> bool:
    """Whether partial maxima are needed: for a slot that the host knows no scale of."""
    return book is None or not delayed or not all(book.known[s] for s in slots)


def _hidden(a: Tensor, b: Tensor, down: Call, transpose: bool) -> Fp8:
    """What the last layer reads, cast for its input slot."""
    state = down.state
    return hidden(a, b, state.book, state.x_slot, state.bank.power_of_two, transpose, down.training, down.record)


def hidden(a: Tensor, b: Tensor, book: ScaleBook | None, slot: int, power_of_two: bool, transpose: bool, delayed: bool, record: bool) -> Fp8:
    """SwiGLU of a and b [M, K], cast for a slot; as `nn.linear.quantize`."""
    partials = partial_amaxes(a, b)[0] if unknown(book, (slot,), delayed) else None
    return swiglu(a, b, target(book, slot, partials, delayed, record), transpose, power_of_two)


def _gradients(dh: Tensor, a: Tensor, b: Tensor, block: Block, rows: bool, transpose: bool) -> tuple[Fp8, Fp8]:
    """Output gradients of the first two layers, cast for their slots."""
    state, call = block.gate.state, block.gate
    slots = state.dy_slot, block.up.state.dy_slot
    return gradients(dh, a, b, state.book, slots, state.bank.power_of_two, rows, transpose, call.training, call.record)


def gradients(
    dh: Tensor, a: Tensor, b: Tensor, book: ScaleBook | None, slots: tuple[int, int], power_of_two: bool,
    rows: bool, transpose: bool, delayed: bool, record: bool,
) -> tuple[Fp8, Fp8]:  # fmt: skip
    """Gradients of a and b [M, K], cast for two slots."""
    partials: tuple[Tensor | None, ...] = partial_amaxes(a, b, dh) if unknown(book, slots, delayed) else (None, None)
    first, second = (target(book, slot, p, delayed, record) for slot, p in zip(slots, partials, strict=True))
    return swiglu_backward(dh, a, b, (first, second), rows, transpose, power_of_two)


class _SwiGLU:
    """Mixed into the block's own class."""

    _ampplug_swiglu: Names

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in self._ampplug_swiglu]
        if args or kwargs or not fusable(x, layers):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_compiling():
            from ampplug.nn.compiled import traced_swiglu

            return traced_swiglu(x, *layers)
        return fp8_swiglu(x, *layers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied by way of the class it was made from."""
        return _remake, (type(self).__mro__[2],), self.__dict__


def fusable(x: Any, layers: list[nn.Module]) -> bool:
    """Whether the block can run as one: three FP8 layers of ampplug's without bias or hooks, of one book, and an input for them."""
    if not isinstance(x, Tensor) or x.is_nested or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.numel() == 0:
        return False
    for layer in layers:
        if type(layer) is not Linear or layer.bias is not None or _has_hooks(layer):
            return False
        if layer.training != layers[0].training or layer._ampplug.book is not layers[0]._ampplug.book:  # type: ignore[union-attr]
            return False
    return x.shape[-1] == layers[0].in_features and not torch._C._are_functorch_transforms_active()


def fp8_swiglu(x: Tensor, gate: Linear, up: Linear, down: Linear) -> Tensor:
    """x [..., K] -> [..., K]. Output dtype as the layers one by one would have it."""
    record, out_dtype = record_and_dtype(x, gate.training)
    calls = []
    for layer in (gate, up, down):
        state, weight = layer._ampplug, layer.weight
        settle_device(state, x.device)
        calls.append(Call(state, state.operand(weight, gate.training), out_dtype, gate.training, record, weight.shape[0], weakref.ref(x)))
    return _Fp8SwiGLU.apply(x, gate.weight, up.weight, down.weight, Block(*calls))


_classes: dict[type, type] = {}


def swiglu_class(base: type) -> type:
    """The subclass of `base` whose forward runs as one."""
    if base not in _classes:
        _classes[base] = type(base.__name__, (_SwiGLU, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    return _classes[base]


def _remake(base: type) -> nn.Module:
    return swiglu_class(base).__new__(swiglu_class(base))  # type: ignore[call-overload]


def fuse(module: nn.Module, names: Names) -> None:
    """Make a block run as one, in place."""
    module._ampplug_swiglu = names  # type: ignore[assignment]
    module.__class__ = swiglu_class(type(module))


def unfuse(module: nn.Module) -> None:
    """Inverse of `fuse`; any other module is left alone."""
    if isinstance(module, _SwiGLU):
        module.__class__ = type(module).__mro__[2]
        del module._ampplug_swiglu
