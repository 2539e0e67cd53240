"""8-bit moments over flat partitions, without an engine: they belong to the parameters, wherever ZeRO cuts."""

import copy

import pytest
import torch

pytest.importorskip("deepspeed")

from ampplug.config import Config
from ampplug.distributed.replicas import Replicas
from ampplug.entry import become_low_bit
from ampplug.integrations.deepspeed.moments import decode, encode_again
from ampplug.integrations.deepspeed.partitioned import become_partitioned
from ampplug.integrations.deepspeed.pieces import Part, cut_all
from ampplug.storage import WeightBank

SHAPES = [(48, 128), (7, 200), (300,), (5, 3, 40), (130,), (), (2, 256), (129, 1)]
ADAM = dict(lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
SIZES = [torch.Size(s).numel() for s in SHAPES]
TOTAL = sum(SIZES)


def gradients(t: int) -> torch.Tensor:
    g = torch.randn(TOTAL, generator=torch.Generator().manual_seed(t))
    return g * 10 ** torch.linspace(-6, 1, TOTAL)


def layout(begin: int, end: int):
    parts, at = [], 0
    for i, (shape, size) in enumerate(zip(SHAPES, SIZES)):
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            parts.append(Part(first - begin, first - at, last - first, torch.Size(shape), i))
        at += size
    return cut_all(parts)


def partition(values: torch.Tensor, begin: int, end: int, padding: int = 0):
    """One rank: (partition, its optimizer)."""
    p = torch.nn.Parameter(torch.cat([values[begin:end], torch.zeros(padding)]))
    optimizer = torch.optim.AdamW([p], **ADAM)
    become_partitioned(optimizer, [(p, layout(begin, end))], 3, False)
    return p, optimizer


def moments(optimizer, p, length: int) -> torch.Tensor:
    """exp_avg, exp_avg_sq [2, length]"""
    state = optimizer.state_dict()["state"][0]
    return torch.stack([state["exp_avg"][:length], state["exp_avg_sq"][:length]])


def whole(values: torch.Tensor):
    """The parameters themselves, under ampplug's optimizer."""
    ps = [torch.nn.Parameter(v.view(s).clone()) for v, s in zip(values.split(SIZES), SHAPES)]
    optimizer = torch.optim.AdamW(ps, **ADAM)
    become_low_bit(optimizer, WeightBank([], torch.device("cpu")), None, Replicas(False), {}, torch.device("cpu"), Config(seed=3))
    return ps, optimizer


@pytest.mark.parametrize("cuts", [(), (6144 + 700,), (128, 6144, 6145, 7000, 9000), (6200, 6250, 6260, TOTAL - 1)])
def test_the_partition_does_not_matter(cuts):
    """Weights and moments are those of the parameters stepped one by one, bit for bit, but for the groups of 128 that a cut goes through."""
    values = torch.randn(TOTAL)
    edges = [0, *cuts, TOTAL]
    ranks = [partition(values, a, b, padding=5) for a, b in zip(edges, edges[1:])]
    ps, reference = whole(values)
    for t in range(4):
        g = gradients(t)
        for (p, optimizer), a, b in zip(ranks, edges, edges[1:]):
            p.grad = torch.cat([g[a:b], torch.zeros(5)])
            optimizer.step()
        for p, part in zip(ps, g.split(SIZES)):
            p.grad = part.view(p.shape)
        reference.step()
    got = torch.cat([p.detach()[:-5] for p, _ in ranks])
    wanted = torch.cat([p.detach().flatten() for p in ps])
    got_moments = torch.cat([moments(o, p, p.numel() - 5) for p, o in ranks], 1)
    records = reference._low_bit.records.values()
    wanted_moments = torch.cat([torch.stack([x.flatten() for x in decode(r.ratio, r.v, r.top, r.limit)]) for r in records], 1)
    same, at = torch.ones(TOTAL, dtype=torch.bool), 0
    for shape, size in zip(SHAPES, SIZES):
        row = shape[-1] if len(shape) > 1 and shape[-1] % 128 else max(size, 1)
        for c in cuts:
            inside = c - at
            if 0 < inside < size and inside % row % 128:
                group = inside - inside % row % 128
                same[at + group : at + min(group + 128, inside - inside % row + row, size)] = False
        at += size
    assert (~same).sum() <= 128 * len(cuts)
    assert torch.equal(got[same], wanted[same]) and torch.equal(got_moments[:, same], wanted_moments[:, same])
    assert torch.allclose(got, wanted, atol=0.5) and all(not p.detach()[-5:].any() for p, _ in ranks)


def test_codes_come_back():
    """Of fp32 moments and the exponents of groups: over all codes, and groups whose largest element was rounded down to the next octave."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randint(0, 256, (64, 256), dtype=torch.uint8, generator=generator)
    top = torch.randint(85, 250, (128, 1), dtype=torch.uint8, generator=generator)
    ratio = torch.randint(0, 256, (64, 256), dtype=torch.uint8, generator=generator)
    ratio[v == 0] &= 0x80  # where v is 0, m is
    for limit in (torch.tensor([1.3]), torch.tensor([8.18])):
        exp_avg, exp_avg_sq = decode(ratio, v, top, limit)
        again = encode_again(exp_avg, exp_avg_sq, top, limit)
        assert torch.equal(again[0], ratio) and torch.equal(again[1], v)


def test_state_dict():
    """torch's AdamW takes it, and goes on as close as 8 bits allow; another of the same partition takes it to the same codes."""
    values = torch.randn(TOTAL)
    p, optimizer = partition(values, 100, 9000)
    for t in range(3):
        p.grad = gradients(t)[100:9000]
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    q = torch.nn.Parameter(p.detach().clone())
    again = torch.optim.AdamW([q], **ADAM)
    become_partitioned(again, [(q, layout(100, 9000))], 11, False)
    again.load_state_dict(saved)
    exact = torch.nn.Parameter(p.detach().clone())
    plain = torch.optim.AdamW([exact], **ADAM)
    plain.load_state_dict(saved)
    start = p.detach().clone()
    for o in (optimizer, again, plain):
        o.param_groups[0]["params"][0].grad = gradients(9)[100:9000].clone()
        o.step()
    assert torch.equal(p, q) and all(torch.equal(a, b) for a, b in zip(optimizer._low_bit.arenas, again._low_bit.arenas))
    assert (exact - p).norm() < 0.02 * (exact - start).norm()
    with pytest.raises(ValueError, match="partition 0 has moments in torch.uint8"):
        again.load_state_dict({**saved, "state": {0: {k: v.to(torch.uint8) for k, v in saved["state"][0].items()}}})
