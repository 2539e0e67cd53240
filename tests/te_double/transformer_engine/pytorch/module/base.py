import torch
from torch import nn

from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

casts = []  # shapes of weights that modules cast themselves


class Quantizer:
    dtype = "E4M3"

    def quantize(self, tensor, into=None):
        casts.append(tuple(tensor.shape))
        scale = 448.0 / tensor.detach().abs().amax().float().clamp(min=1e-12)
        codes = (tensor.detach().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        if into is None:
            return Float8Tensor(shape=tensor.shape, dtype=torch.bfloat16, data=codes, fp8_scale_inv=(1 / scale).reshape(1), fp8_dtype=self.dtype,
                                data_transpose=codes.t().contiguous(), quantizer=self, device=tensor.device)  # fmt: skip
        into._data.copy_(codes)
        into._transpose.copy_(codes.t())
        into._scale_inv.copy_((1 / scale).reshape(1))
        return into


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fp8):
        ctx.fp8 = fp8
        ctx.save_for_backward(x, weight)
        return (x.float() @ (weight.float() if fp8 is None else fp8.rowwise()).t()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        w = weight.float() if ctx.fp8 is None else ctx.fp8.columnwise().t()
        return (g.float() @ w).to(x.dtype), (g.float().flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype), None


class TransformerEngineBaseModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_meta, self.quantizers, self._fp8_workspaces = {}, {"scaling_fwd": []}, {}
        self.tp_size, self.fsdp_group, self.is_fsdp2, self.primary_weights_in_fp8, self.fuse_wgrad_accumulation = 1, None, False, False, False

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state): ...

    def init_fp8_metadata(self, num_gemms=1):
        recipe, old = FP8GlobalStateManager.get_fp8_recipe(), self.fp8_meta.get("recipe")
        if recipe is not old:
            self.quantizers["scaling_fwd"] = [Quantizer() for _ in range(num_gemms)]
            if old is not None and type(recipe) is not type(old):
                self._fp8_workspaces.clear()
            self.fp8_meta["recipe"] = recipe

    def _get_weight_quantizers(self):
        return self.quantizers["scaling_fwd"]

    def multiply(self, x, name, i, is_first_microbatch, num_gemms):
        weight = getattr(self, name)
        for p in self.parameters():
            if not torch.is_autocast_enabled("cuda") and p.dtype != x.dtype:
                raise TypeError("Data types for parameters must match when outside of autocasted region.")
        if not FP8GlobalStateManager.is_fp8_enabled():
            return _Multiply.apply(x, weight, None)
        assert x.shape[:-1].numel() % 8 == 0 and x.shape[-1] % 16 == 0, "assert_dim_for_fp8_exec"
        self.init_fp8_metadata(num_gemms)
        skip = FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor if FP8GlobalStateManager.fp8_graph_capturing() else None
        if skip is not None:
            is_first_microbatch = False
        key = None if is_first_microbatch is None else ("weight" if num_gemms == 1 else name)
        workspace = self._fp8_workspaces.get(key)
        if workspace is None:
            workspace = self._get_weight_quantizers()[i].quantize(weight)
            if key is not None:
                self._fp8_workspaces[key] = workspace
        elif is_first_microbatch or skip is not None:
            self._get_weight_quantizers()[i].quantize(weight, workspace)
        return _Multiply.apply(x, weight, workspace)


class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cpu"):
        super().__init__()
        self.weight_names, self.use_bias = ["weight"], bias
        self.weight = nn.Parameter(torch.randn(out_features, in_features, dtype=params_dtype, device=device) / in_features**0.5)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device)) if bias else torch.Tensor()

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        y = self.multiply(inp, self.weight_names[0], 0, is_first_microbatch, 1)
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, **settings):
        super().__init__(in_features, out_features, **settings)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=self.weight.dtype, device=self.weight.device))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        return super().forward(nn.functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight), is_first_microbatch)


class LayerNormMLP(TransformerEngineBaseModule):
    def __init__(self, hidden_size, ffn_hidden_size, bias=True, params_dtype=None, device="cpu"):
        super().__init__()
        self.layer_norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.fc1_weight = nn.Parameter(torch.randn(ffn_hidden_size, hidden_size, dtype=params_dtype, device=device) / hidden_size**0.5)
        self.fc2_weight = nn.Parameter(torch.randn(hidden_size, ffn_hidden_size, dtype=params_dtype, device=device) / ffn_hidden_size**0.5)

    def forward(self, inp, is_first_microbatch=None):
        x = nn.functional.layer_norm(inp, inp.shape[-1:], self.layer_norm_weight)
        x = nn.functional.gelu(self.multiply(x, "fc1_weight", 0, is_first_microbatch, 2))
        return self.multiply(x, "fc2_weight", 1, is_first_microbatch, 2)
