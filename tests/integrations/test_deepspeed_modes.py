"""Under the real DeepSpeed: further modes of the engine, checkpoints from elsewhere, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("deepspeed")

from engines import ADAM, NO_COPY, agree, batch, check_w8, configuration, deepspeed_engine, everything, loss_of, make_model, spawn, train

import ampplug

BF16, FP32 = torch.bfloat16, torch.float32


def build(model: nn.Module, settings: dict, optimizer=None):
    """An engine; with AdamW of the configuration if no optimizer is given."""
    if optimizer is None:
        settings = {**settings, "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}}
    return deepspeed_engine(model, settings, optimizer)


def check_like_plain_torch(engine, plain, exact, rank: int, world: int, dtype: torch.dtype, tolerance: float = 0.12) -> None:
    """Four steps of the engine and of plain torch on the global batch move the weights alike."""
    for p in plain.parameters():
        p.data = p.data.to(dtype).float()
    first = [p.detach().clone() for p in plain.parameters()]
    for t in range(4):
        train(engine, [t], rank, dtype, 1)
        exact.zero_grad()
        for r in range(world):
            (loss_of(plain, batch(t, r, 0).to(dtype).float()) / world).backward()
        exact.step()
        assert agree(everything(engine)), t
        check_w8(engine)
    pairs = [(p.detach().float() - start, q.detach() - start) for p, q, start in zip(engine.module.parameters(), plain.parameters(), first)]
    vectors = [torch.cat(column) for column in zip(*(pair for pair in pairs if pair[0].dim() == 1))]  # alone, some have little but noise
    for moved, wanted in [*(pair for pair in pairs if pair[0].dim() == 2), vectors]:
        error = ((moved - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        assert error < tolerance, error


# ---------------------------------------------------------------- modes


def check_zero_options(rank: int, world: int, folder: str) -> None:
    """How gradients are bucketed, laid out and accumulated does not matter."""
    for stage, level, dtype, more in (
        (1, "O1", BF16, {"data_types": {"grad_accum_dtype": "fp32"}}),  # another wrapper: BF16_Optimizer
        (1, "O2", BF16, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (1, "O2", BF16, NO_COPY),
        (2, "O2", BF16, NO_COPY),
        (2, "O2", FP32, {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5000, "round_robin_gradients": True}}),
        (1, "O2", FP32, {"zero_optimization": {"stage": 1, "contiguous_gradients": False, "reduce_scatter": False, "parameter_alignment": True}}),
    ):
        plain = make_model()
        engine = build(make_model(), configuration(stage, level, dtype, 1, **more))
        check_like_plain_torch(engine, plain, torch.optim.AdamW(plain.parameters(), **ADAM), rank, world, dtype)
        engine.save_checkpoint(f"{folder}/options{stage}{level}{len(str(more))}", tag="t")
        train(engine, range(4, 6), rank, dtype, 1)
        again = build(make_model(1), configuration(stage, level, dtype, 1, **more))
        again.load_checkpoint(f"{folder}/options{stage}{level}{len(str(more))}", tag="t")
        train(again, range(4, 6), rank, dtype, 1)
        assert torch.equal(everything(engine, own=True), everything(again, own=True)), (stage, level, more)


def check_groups_and_frozen(rank: int, world: int, folder: str) -> None:
    """Groups with settings of their own; a frozen layer stays, and its W8 with it. No padding of 128 fits these groups."""

    def groups(model):
        model[2].requires_grad_(False)
        matrices = [model[0].weight, model[4].weight]
        rest = [model[0].bias, model[3].weight, model[3].bias, model[4].bias]
        return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "lr": 2.0, "weight_decay": 0.0, "betas": (0.8, 0.99)}]

    for stage in (0, 1, 2):
        for level, dtype in (("O1", FP32), ("O2", FP32), ("O2", BF16)):
            model, plain = make_model(), make_model()
            engine = build(model, configuration(stage, level, dtype, 1), torch.optim.AdamW(groups(model), **ADAM))
            frozen = engine.module[2].weight.detach().clone()
            check_like_plain_torch(engine, plain, torch.optim.AdamW(groups(plain), **ADAM), rank, world, dtype)
            assert torch.equal(engine.module[2].weight, frozen)


def check_usual_adam(rank: int, world: int, folder: str) -> None:
    """With the usual eps the second moment decides: it, too, is kept well over a flat partition of all kinds of parameters."""
    for stage, level in ((0, "O2"), (2, "O2"), (2, "O1")):
        model, plain = make_model(), make_model()
        engine = build(model, configuration(stage, level, FP32, 1), torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01))
        check_like_plain_torch(engine, plain, torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=0.01), rank, world, FP32, 0.3)
        if level == "O2":
            parameters = sum(p.numel() for g in engine.basic_optimizer.param_groups for p in g["params"])
            records = engine.basic_optimizer._low_bit.records.values()
            assert sum(t.numel() for r in records for t in (r.ratio, r.v, r.top)) < 2.05 * parameters


def check_any_optimizer(rank: int, world: int, folder: str) -> None:
    """O1 keeps what it is given; O2 takes Adam and AdamW, and names what it does not take."""
    for stage in (0, 2):
        model, plain = make_model(), make_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = build(model, configuration(stage, "O1", FP32, 1, zero_allow_untested_optimizer=True), sgd)
        check_like_plain_torch(engine, plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), rank, world, FP32)
        with pytest.raises(ValueError, match="torch.optim.sgd.SGD; opt_level 'O2' takes Adam and AdamW"):
            model = make_model()
            build(model, configuration(stage, "O2", FP32, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="amsgrad"):
            model = make_model()
            build(model, configuration(stage, "O2", FP32, 1), torch.optim.AdamW(model.parameters(), amsgrad=True))


def check_activation_checkpointing(rank: int, world: int, folder: str) -> None:
    """Recomputed layers compute what they did, with the scales of the first pass: the same bits as without."""
    import deepspeed
    from torch.utils.checkpoint import checkpoint

    def with_torch(part, x):
        return checkpoint(part, x, use_reentrant=False)

    class Model(nn.Module):
        def __init__(self, run):
            super().__init__()
            self.first, self.last, self.run = make_model()[:3], make_model()[3:], run

        def forward(self, x):
            return self.last(self.run(self.first, x))

    for stage, level in ((0, "O2"), (2, "O1"), (2, "O2")):
        results = []
        for run in (lambda part, x: part(x), with_torch, deepspeed.checkpointing.checkpoint):
            engine = build(Model(run), configuration(stage, level, FP32, 1))
            for t in range(3):
                engine.backward(loss_of(engine, batch(t, rank, 0).requires_grad_()))
                engine.step()
            results.append(torch.cat([p.detach().float().flatten() for p in engine.module.parameters()]))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), (stage, level)


def check_skipped_step(rank: int, world: int, folder: str) -> None:
    """A loss that is not finite on the last rank, of inputs that are: no rank steps, nothing changes, the scales neither."""
    for stage, level in ((0, "O1"), (0, "O2"), (1, "O1"), (1, "O2"), (2, "O1"), (2, "O2")):
        engine = build(make_model(), configuration(stage, level, BF16, 1, bf16={"enabled": True, "check_grad_overflow": True}))
        train(engine, range(2), rank, BF16, 1)
        before = everything(engine, own=True)
        engine.backward(loss_of(engine, 50 * batch(2, rank, 0).to(BF16)) * (float("nan") if rank == world - 1 else 1.0))
        engine.step()
        assert torch.equal(everything(engine, own=True), before), (stage, level)
        train(engine, range(3, 5), rank, BF16, 1)
        after = everything(engine, own=True)
        assert not torch.equal(after, before) and all(torch.isfinite(p).all() for p in engine.module.parameters())
        assert agree(everything(engine))


# ---------------------------------------------------------------- checkpoints from elsewhere


def exact_weights(engine) -> list[torch.Tensor]:
    """The fp32 masters of stage 0, wherever they are; the model's own weights under ZeRO."""
    if hasattr(engine.optimizer, "fp32_groups"):  # DeepSpeed's wrapper of bf16
        return [p.detach().clone() for g in engine.optimizer.fp32_groups for p in g]
    exact = ampplug.fp32_state_dict(engine.module)
    return [exact[name].float().clone() for name, _ in engine.module.named_parameters()]


def check_with_and_without(rank: int, world: int, folder: str) -> None:
    """A checkpoint of plain DeepSpeed starts a run with ampplug at the very weights and moments, and goes back to plain DeepSpeed, moments too."""
    for stage in (0, 1, 2):
        for dtype in (FP32, BF16):
            where = f"{folder}/plain{stage}{dtype}"
            plain = build(make_model(), configuration(stage, None, dtype, 1))
            train(plain, range(3), rank, dtype, 1)
            plain.save_checkpoint(where, tag="t")
            values = [p.detach().float().clone() for p in plain.module.parameters()]
            masters = [p.detach().clone() for g in getattr(plain.optimizer, "fp32_groups", [values]) for p in g]  # of the wrapper of bf16
            train(plain, range(3, 5), rank, dtype, 1)
            wanted = [p.detach().float() for p in plain.module.parameters()]
            for level in ("O1", "O2"):
                engine = build(make_model(1), configuration(stage, level, dtype, 1))
                engine.load_checkpoint(where, tag="t")
                loaded = [p.detach().float() for p in engine.module.parameters()]
                assert all((p - q.bfloat16().float()).abs().max() <= 2**-8 * q.abs().max() for p, q in zip(loaded, values))
                if stage == 0 and level == "O2":
                    exact = ampplug.fp32_state_dict(engine.module)
                    assert all(torch.equal(exact[name], q) for (name, _), q in zip(engine.module.named_parameters(), masters))
                engine.module(batch(0, 0, 0).to(dtype))
                check_w8(engine)
                train(engine, range(3, 5), rank, dtype, 1)
                for p, q, start in zip(engine.module.parameters(), wanted, values):
                    assert (p.detach().float() - q).norm() < 0.12 * (q - start).norm(), (stage, dtype, level)
                engine.save_checkpoint(where, tag=level)
                values_now = exact_weights(engine)
                train(engine, range(5, 7), rank, dtype, 1)
                for to in (None, "O1"):
                    back = build(make_model(1), configuration(stage, to, dtype, 1))
                    back.load_checkpoint(where, tag=level)
                    assert all(torch.equal(p, q) for p, q in zip(exact_weights(back), values_now)), (stage, dtype, level, to)
                    train(back, range(5, 7), rank, dtype, 1)
                    p, q, start = (torch.cat([t.flatten() for t in ts]) for ts in (exact_weights(back), exact_weights(engine), values_now))
                    assert (p - q).norm() < 0.12 * (q - start).norm(), (stage, dtype, level, to)


def check_weights_alone(rank: int, world: int, folder: str) -> None:
    """Without the optimizer's states: the weights of the checkpoint, and nothing left of the ones before."""
    for stage, level, dtype, more in ((0, "O2", BF16, {}), (0, "O2", FP32, {}), (2, "O2", BF16, NO_COPY), (2, "O2", FP32, {}), (1, "O1", BF16, {})):
        engine = build(make_model(), configuration(stage, level, dtype, 1, **more))
        train(engine, range(3), rank, dtype, 1)
        where = f"{folder}/alone{stage}{level}{dtype}"
        engine.save_checkpoint(where, tag="t")
        for given in ({"load_optimizer_states": False}, {"load_module_only": True}):
            other = build(make_model(1), configuration(stage, level, dtype, 1, **more))
            train(other, range(2), rank, dtype, 1)
            other.load_checkpoint(where, tag="t", **given)
            assert all(torch.equal(p, q) for p, q in zip(other.module.parameters(), engine.module.parameters()))
            other.module(batch(0, 0, 0).to(dtype))  # where nothing was pushed, the forward pass notices
            check_w8(other)
            if "bf16" in more:
                assert all(not r.master.low.any() for r in other.basic_optimizer._low_bit.records.values())
            assert torch.equal(other.module[0]._ampplug.book.scale, engine.module[0]._ampplug.book.scale)
            train(other, range(3, 5), rank, dtype, 1)
            check_w8(other)
            assert agree(everything(other))


def check_consolidated(rank: int, world: int, folder: str) -> None:
    """zero_to_fp32 gives the fp32 masters, whose bf16 the model holds, in every cell under ZeRO."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for i, (stage, level, dtype, more) in enumerate((
        (1, "O1", BF16, {}), (1, "O2", BF16, {}), (2, "O2", BF16, {}), (2, "O2", FP32, {}), (1, "O2", BF16, NO_COPY),
        (2, "O2", BF16, NO_COPY), (3, "O1", BF16, {}), (3, "O2", BF16, {}), (3, "O2", BF16, NO_COPY),
    )):  # fmt: skip
        engine = build(make_model(), configuration(stage, level, dtype, 1, **more))
        train(engine, range(3), rank, dtype, 1)
        engine.save_checkpoint(f"{folder}/consolidated{i}", tag="t")
        state = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/consolidated{i}", tag="t")
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
            for name, p in parameters.items():
                assert state[name].dtype == FP32 and (state[name].to(dtype) - p).abs().max() <= 2**-8 * p.abs().max(), (stage, level, more)
                assert torch.equal(state[name].to(dtype), p) or more is NO_COPY  # halves are rounded otherwise
                assert torch.equal(state[name], p.float()) == (dtype == FP32), (stage, level, more)


# ---------------------------------------------------------------- the key, and what is refused


def check_switched_off(rank: int, world: int, folder: str) -> None:
    """Absent or disabled: DeepSpeed as it was, the same bits. O0: the same, with a plan."""
    results = []
    for block in ({}, {"ampplug": {"enabled": False}}, {"ampplug": {"enabled": True, "opt_level": "O0"}}):
        engine = build(make_model(), {**configuration(1, None, BF16, 1), **block})
        train(engine, range(2), rank, BF16, 1)
        assert type(engine.module[0]) is nn.Linear and type(engine.basic_optimizer) is torch.optim.AdamW
        results.append(torch.cat([p.detach().flatten() for p in engine.module.parameters()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def check_refused(rank: int, world: int, folder: str) -> None:
    """By name, with model and optimizer as they were."""
    import deepspeed

    for more, message in (
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}, "elastic"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch autocast"),
        ({"checkpoint": {"load_universal": True}}, "universal"),
        ({"ampplug": {"enabled": True, "opt_level": "O3"}}, "'O3' is not available"),
        ({"ampplug": {"enabled": True, "level": "O1"}}, "unknown key 'level'"),
        ({"ampplug": None, "amplug": {"enabled": True}}, "did you mean"),
    ):
        settings = {k: v for k, v in {**configuration(1, "O1", FP32, 1), **more}.items() if v is not None}
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=message):
            build(model, settings, optimizer)
        assert type(model[0]) is nn.Linear and type(optimizer) is torch.optim.AdamW and optimizer.param_groups[0]["params"][0] is model[0].weight
    pipeline = deepspeed.PipelineModule(layers=list(make_model()), num_stages=1)
    with pytest.raises(ValueError, match="PipelineEngine"):
        build(pipeline, configuration(0, "O1", FP32, 1))
    with pytest.warns(UserWarning, match="no optimizer"):
        model = make_model()
        deepspeed.initialize(model=model, config=configuration(0, "O1", FP32, 1))
    assert type(model[0]) is nn.Linear


def check_log_line(rank: int, world: int, folder: str) -> None:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as said:
        build(make_model(), configuration(2, "O2", BF16, 1))
    lines = [line for line in said.getvalue().splitlines() if "ampplug" in line]
    wanted = "ampplug is active: opt_level O2, ZeRO stage 2, 3 weights with 8,192 of 8,480 parameters in FP8, recipe delayed"
    assert lines == [wanted] * (rank == 0)




def in_two_processes(rank: int, world: int, folder: str) -> None:
    for check in (check_zero_options, check_groups_and_frozen, check_usual_adam, check_any_optimizer, check_activation_checkpointing, check_skipped_step,
                  check_with_and_without, check_weights_alone, check_consolidated, check_switched_off, check_log_line):  # fmt: skip
        check(rank, world, folder)


def check_import_forgotten() -> None:
    """Nothing reads the block, nothing is said, and DeepSpeed trains as ever."""
    import contextlib
    import io
    import sys

    assert "ampplug.integrations.deepspeed" not in sys.modules
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = build(make_model(), configuration(1, "O2", BF16, 1))
        train(engine, range(1), 0, BF16, 1)
    assert type(engine.module[0]) is nn.Linear and type(engine.basic_optimizer) is torch.optim.AdamW and "ampplug" not in said.getvalue()


def in_one_process(rank: int, world: int, folder: str) -> None:
    check_refused(rank, world, folder)


in_one_process.without = check_import_forgotten


@pytest.mark.parametrize("check, world", [(in_two_processes, 2), (in_one_process, 1)])
def test_modes(check, world):
    """One spawn for all of the checks above. expect: no error."""
    spawn(check, world)
