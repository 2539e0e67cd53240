from types import SimpleNamespace


class FP8GlobalStateManager:
    quantization_state = SimpleNamespace(fp8_enabled=False, fp8_recipe=None, skip_fp8_weight_update_tensor=None, capturing=False)

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def get_fp8_recipe(cls):
        return cls.quantization_state.fp8_recipe

    @classmethod
    def fp8_graph_capturing(cls):
        return cls.quantization_state.capturing


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None):
        self.now = enabled, recipe

    def __enter__(self):
        state = FP8GlobalStateManager.quantization_state
        self.before = state.fp8_enabled, state.fp8_recipe
        state.fp8_enabled, state.fp8_recipe = self.now

    def __exit__(self, *_):
        state = FP8GlobalStateManager.quantization_state
        state.fp8_enabled, state.fp8_recipe = self.before
