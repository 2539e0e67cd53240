"""The "ampplug" block of a DeepSpeed configuration, without an engine."""

import warnings

import pytest

pytest.importorskip("deepspeed")

from ampplug.integrations.deepspeed import checks
from ampplug.integrations.deepspeed.settings import read_settings


def test_what_is_legal():
    assert read_settings({"train_batch_size": 4}) is None
    assert read_settings({"ampplug": {"enabled": False}}) is None
    assert read_settings({"ampplug": {"enabled": True}}).opt_level == "O2"
    config = read_settings({"ampplug": {"enabled": True, "opt_level": "O1", "select": ["layers.*"], "margin": 0, "backend": "auto"}})
    assert (config.opt_level, config.select, config.margin) == ("O1", ["layers.*"], 0)


@pytest.mark.parametrize(
    "block, error, message",
    [
        ({"enabled": True, "opt_levle": "O1"}, ValueError, "'opt_levle'.*did you mean 'opt_level'"),
        ({"enabled": False, "opt_levle": "O1"}, ValueError, "'opt_levle'"),
        ({"enabled": "yes"}, TypeError, "enabled='yes' is a str"),
        ({"enabled": 1}, TypeError, "enabled=1 is a int"),
        ({"opt_level": "O1"}, ValueError, '"enabled" is missing'),
        ({"enabled": True, "opt_level": "O3"}, ValueError, "'O3' is not available"),
        ({"enabled": True, "backend": "te"}, ValueError, "backend='te' is not available under DeepSpeed.*'native'"),
        ({"enabled": True, "opt_level": "o1"}, ValueError, "did you mean 'O1'"),
        ({"enabled": True, "opt_level": 2}, ValueError, "opt_level=2"),
        ({"enabled": True, "opt_level": "auto"}, ValueError, "opt_level is 'auto', which nothing fills in"),
        ({"enabled": "auto"}, ValueError, "enabled is 'auto'"),
        ({"enabled": True, "margin": "2"}, TypeError, "ampplug: margin='2' is a str"),
        ({"enabled": True, "select": []}, TypeError, "select"),
        (True, TypeError, "is True, a bool"),
        ("O2", TypeError, "must be a block"),
    ],
)
def test_what_is_refused(block, error, message):
    with pytest.raises(error, match=message):
        read_settings({"ampplug": block})


@pytest.mark.parametrize("key", ["amplug", "Ampplug", "amp_plug", "ampplugin"])
def test_a_misspelt_block_is_an_error(key):
    with pytest.raises(ValueError, match=f"{key!r}, which nothing reads"):
        read_settings({key: {"enabled": True}})
    assert read_settings({"amp": {"enabled": True}, "autotuning": {}}) is None


def test_msamp_block():
    for level, mine, said in (("O1", "O1", "O1"), ("O2", "O2", "O2"), ("O3", "O2", "FP8 gradients")):
        with pytest.warns(UserWarning, match=said) as caught:
            assert read_settings({"msamp": {"enabled": True, "opt_level": level, "use_te": False}}).opt_level == mine
        assert len(caught) == 1 and f'"opt_level": "{mine}"}}' in str(caught[0].message)
    with pytest.warns(UserWarning, match="own FP8 layers"):
        assert read_settings({"msamp": {"enabled": True, "use_te": True}}).opt_level == "O1"  # MS-AMP's default
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_settings({"msamp": {"opt_level": "O2"}}) is None  # MS-AMP's default, too
    with pytest.raises(ValueError, match="unknown key 'level'"):
        read_settings({"msamp": {"enabled": True, "level": "O2"}})
    with pytest.raises(ValueError, match="opt_level='O0'"):
        read_settings({"msamp": {"enabled": True, "opt_level": "O0"}})
    with pytest.raises(TypeError, match="use_te=1"):
        read_settings({"msamp": {"enabled": True, "use_te": 1}})
    with pytest.raises(ValueError, match="both"):
        read_settings({"msamp": {"enabled": True}, "ampplug": {"enabled": True}})


class Engine:
    """A stand-in for DeepSpeed's."""

    def step(self, lr_kwargs=None): ...


def test_version_guard():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.check_version(checks.TESTED[0], Engine, {"step": ("lr_kwargs",)})
        checks.check_version(checks.TESTED[0] + "+local", Engine, {"step": ("lr_kwargs",)})
    with pytest.warns(UserWarning, match="0.99.0 was not tested.*pip install deepspeed=="):
        checks.check_version("0.99.0", Engine, {"step": ("lr_kwargs",)})
    with pytest.raises(RuntimeError, match="no Engine.stride.*pip install"):
        checks.check_version("0.99.0", Engine, {"stride": ()})
    with pytest.raises(RuntimeError, match=r"Engine.step takes \(lr_kwargs\), ampplug expects \(closure\)"):
        checks.check_version("0.99.0", Engine, {"step": ("closure",)})


def test_names_are_deepspeeds():
    """For those who come from `from msamp import deepspeed`."""
    import deepspeed as real

    from ampplug.integrations import deepspeed

    assert deepspeed.initialize is real.initialize and deepspeed.comm is real.comm
    with pytest.raises(AttributeError):
        _ = deepspeed.initialise
