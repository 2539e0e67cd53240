"""Small GPT-2 and Llama models with random weights, their data, and all that must agree between two runs as one vector of bytes."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def build(kind: str, dropout: float = 0.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """GPT-2 is made of Conv1D layers and ties its head to the embedding; Llama is made of Linears, and is not tied here."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=2,
                            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2)  # fmt: skip
        return GPT2LMHeadModel(config).to(dtype)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=32, attention_dropout=dropout)  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def data(count: int = 200, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Sequences of counting numbers with some noise: there is something to learn, and no two are the same."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    noise = torch.randint(0, 3, (count, length), generator=generator)
    ids = (start + torch.arange(length) + noise) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in ids]


def converted(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if getattr(m, "_ampplug", None) is not None]


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Weights, their FP8 copies, scales, amaxes, histories, moments, remainders and step counts."""
    state = converted(model)[0]._ampplug
    parts = [p.detach() for p in model.parameters()] + [state.bank.scale, state.bank.amax]
    parts += [] if state.book is None else [state.book.scale, state.book.history, state.book.position]
    parts += [w.w8 for w in state.bank.weights] + [w.w8t for w in state.bank.weights]
    parts += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return torch.cat([p.contiguous().reshape(-1).view(torch.uint8) for p in parts])


def check_fp8_copies(model: torch.nn.Module) -> None:
    """The FP8 copies that training reads are those of the weights as they are: within a step of E4M3, which has three mantissa bits."""
    for layer in converted(model):
        w = layer._ampplug.weight
        assert w.fresh and w.param is layer.weight
        copy, weight = w.own_w8.float() * w.scale_inv, layer.weight.detach().float()
        assert ((copy - weight).abs() <= weight.abs() / 16 + w.scale_inv * 2.0**-9).all()
