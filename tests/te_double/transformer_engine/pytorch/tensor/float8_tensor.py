import torch


class Float8Tensor(torch.Tensor):
    def __new__(cls, shape, dtype, *, data, fp8_scale_inv, fp8_dtype, data_transpose=None, quantizer=None, requires_grad=False, device=None):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, requires_grad=requires_grad, device=device)
        self._data, self._transpose, self._scale_inv = data, data_transpose, fp8_scale_inv
        self._transpose_invalid, self._quantizer = data_transpose is None, quantizer
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} on an FP8 weight")

    def rowwise(self):
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv

    def columnwise(self):
        return self._transpose.view(torch.float8_e4m3fn).float() * self._scale_inv
