"""What the compiler makes of a converted model: the operators in its graphs, and nothing beside them; graphs that are captured or exported."""

from __future__ import annotations

import copy
import gc
import io
from collections import Counter

import pytest
import torch
from test_torch_compile import Block, _fresh_compiler, make  # noqa: F401
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import ampplug

pytestmark = pytest.mark.filterwarnings("ignore:ampplug")


def graphs(function, x: torch.Tensor) -> list[Counter]:
    """Operators of the forward and the backward graph, as inductor is given them: after its partitioner, which drops repetitions."""
    from functorch.compile import make_boxed_func

    found = []

    def keep(module, _):
        found.append(Counter(str(n.target).removesuffix(".default") for n in module.graph.nodes if n.op == "call_function"))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch.compile(function, backend=backend, fullgraph=True)(x).sum().backward()
    assert len(found) == 2
    return found


def decoder_layer():
    """(one layer of a Llama as a function of its input, the layer, an input)."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    positions = LlamaRotaryEmbedding(config)(x, torch.arange(16)[None])

    def run(x):
        y = layer(x, position_embeddings=positions)
        return y[0] if isinstance(y, tuple) else y

    return run, layer, x


VIEWS = ("aten.view", "aten._unsafe_view", "aten.alias", "aten.t", "<built-in function getitem>", "aten.mm")


def test_a_llama_layer_with_swiglu_as_one():
    """As below, with one cast less forward and two less backward, the activation's; of all else nothing that BF16 does not have."""
    run, layer, x = decoder_layer()
    plain = graphs(run, x)
    torch._dynamo.reset()
    ampplug.initialize(layer, torch.optim.AdamW(layer.parameters()), select="all")
    forward, backward = graphs(run, x)
    own = [{k: v for k, v in g.items() if k.startswith("ampplug")} for g in (forward, backward)]
    assert own[0] == {"ampplug.cast": 3, "ampplug.weight_matmul": 7, "ampplug.swiglu": 1}
    assert own[1] == {"ampplug.cast": 5, "ampplug.weight_matmul": 7, "ampplug.matmul": 7, "ampplug.swiglu_backward": 1}
    for before, after in zip(plain, (forward, backward), strict=True):
        more = {k: v - before[k] for k, v in after.items() if not k.startswith("ampplug") and k not in VIEWS and v > before[k]}
        assert not more, more


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_llama_layer_has_no_needless_node(recipe: str):
    """Seven Linears, four distinct inputs: four casts and seven GEMMs forward, seven casts and fourteen GEMMs backward. All else is BF16's own."""
    run, layer, x = decoder_layer()
    plain = graphs(run, x)
    torch._dynamo.reset()
    ampplug.initialize(layer, torch.optim.AdamW(layer.parameters()), select="all", recipe=recipe, fuse=False)
    converted = graphs(run, x)
    assert plain[0]["aten.mm"] == 7 and plain[1]["aten.mm"] == 14
    forward, backward = ({k: v for k, v in g.items() if k.startswith("ampplug")} for g in converted)
    assert forward == {"ampplug.cast": 4, "ampplug.weight_matmul": 7}
    assert backward == {"ampplug.cast": 7, "ampplug.weight_matmul": 7, "ampplug.matmul": 7}
    for before, after in zip(plain, converted, strict=True):
        rest = ({k: v for k, v in g.items() if k not in VIEWS and not k.startswith("ampplug")} for g in (before, after))
        assert next(rest) == next(rest)


def test_recomputation_shares_casts():
    """Activation checkpointing: the backward graph casts each distinct input once more, not each layer's."""
    run, layer, x = decoder_layer()
    ampplug.initialize(layer, torch.optim.AdamW(layer.parameters()), select="all", fuse=False)
    forward, backward = graphs(lambda x: checkpoint(run, x, use_reentrant=False), x)
    assert forward["ampplug.cast"] == 4 and backward["ampplug.cast"] == 4 + 7


def test_different_inputs_of_one_slot_are_cast_apart():
    """The compiler merges what is the same, not what shares a scale."""

    class Apart(Block):
        def forward(self, x):
            h = self.norm(x)
            return self.gate(h) * self.up(h * 2)

    torch.manual_seed(0)
    model, _ = ampplug.initialize(Apart(), None, "O1", select="all")
    model.up._ampplug.join(model.gate._ampplug.x_slot)
    assert graphs(model, torch.randn(5, 40, requires_grad=True))[0]["ampplug.cast"] == 2


def test_modes_shapes_and_rates_need_no_new_graph():
    """Training and evaluation, with and without gradients and autocast, other batch sizes, other learning rates. expect: eager's numbers."""
    model, optimizer = make(layers=1)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")

    def visit(rows: int):
        x = torch.randn(rows, 7, 40)
        torch._dynamo.mark_dynamic(x, 0)
        for training, grad, autocast in ((True, True, True), (True, False, False), (False, False, False)):
            model.train(training)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                assert torch.equal(forward(x), model(x)), (rows, training, grad, autocast)
        model.train()
        optimizer.param_groups[0]["lr"] = 1e-2 / rows
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    visit(3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (5, 8, 32, 2):
            visit(rows)


def test_keys_keep_their_address():
    """Graphs captured by `mode="reduce-overhead"` copy what has no static address, and a copy of a key finds nothing. Only the input is copied."""
    from torch._inductor import compile_fx

    model, _ = make(layers=1)
    copied = []

    def inner(module, inputs, **settings):
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        copied.append([tuple(n.meta["val"].shape) for i, n in enumerate(places) if i not in settings["static_input_idxs"]])
        return module.forward

    model.eval()
    with torch.no_grad():
        torch.compile(model, backend=lambda module, inputs: compile_fx.compile_fx(module, inputs, inner_compile=inner))(torch.randn(3, 7, 40))
    assert copied == [[(3, 7, 40)]]


def test_exported_programs_work_beside_the_living_model_only():
    """Anything else is an error that says what to do, and what it says works."""
    model, optimizer = make(layers=1)
    x = torch.randn(3, 40)
    model(x).sum().backward()
    optimizer.step()
    model.eval()
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for gone in (False, True):
        with pytest.raises(RuntimeError, match=r"the model is gone, or .* give torch.export the unconverted model, filled by load_state_dict"):
            (program.module() if gone else loaded)(x)
        if not gone:
            plain = nn.Sequential(Block(), nn.Linear(40, 17)).eval()
            plain.load_state_dict(ampplug.fp32_state_dict(model))
            wanted = copy.deepcopy(model)(x)
            del model, optimizer
            gc.collect()
    y = torch.export.export(plain, (x,)).module()(x)
    assert (y - wanted).norm() < 0.1 * wanted.norm()
