"""Config: one object from keywords or dict, and errors that tell."""

import pytest
import torch

import ampplug
from ampplug import Config


def test_both_forms_are_the_same():
    assert Config.from_dict({"opt_level": "O1", "history": 4}) == Config(opt_level="O1", history=4)


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"opt_levle": "O2"}, ["opt_levle", "opt_level", "recipe"]),
        ({"opt_level": "02"}, ["opt_level", "'02'", "'O2'", "'O0'"]),
        ({"recipe": "delay"}, ["recipe", "'delay'", "did you mean 'delayed'", "'current'"]),
        ({"backend": "te2"}, ["backend", "'native'"]),
        ({"select": "al"}, ["select", "'al'", "'all'"]),
        ({"history": 0}, ["history", "0", "1"]),
        ({"seed": -1}, ["seed", "-1"]),
    ],
)
def test_errors_name_key_value_and_legal_values(settings, words):
    with pytest.raises(ValueError) as error:
        Config.from_dict(settings)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("settings", [{"history": 1.5}, {"margin": True}, {"power_of_two": 1}, {"select": 3}, {"select": []}])
def test_wrong_types(settings):
    with pytest.raises(TypeError, match=next(iter(settings))):
        Config.from_dict(settings)


def test_public_names_resolve():
    for name in ampplug.__all__:
        assert getattr(ampplug, name) is not None
    with pytest.raises(AttributeError):
        ampplug.nothing


def test_a_config_cannot_be_changed():
    config = Config()
    with pytest.raises(AttributeError):
        config.opt_level = "O1"
    assert config == Config.from_dict({}) and config.opt_level == "O2"


@pytest.mark.parametrize("settings", [None, 3, "O2", ["opt_level"]])
def test_only_a_dict_is_a_dict(settings):
    with pytest.raises(TypeError, match=type(settings).__name__):
        Config.from_dict(settings)


def test_it_goes_through_json():
    import json
    from dataclasses import asdict

    config = Config(opt_level="O1", select=["layers.*"], history=8)
    assert Config.from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("key,found,near", [("optlevel", "x", "opt_level"), ("marign", 1, "margin"), ("Recipe", "current", "recipe"), ("powerof2", True, "power_of_two")])
def test_unknown_keys_name_the_nearest(key, found, near):
    for call in (lambda: Config.from_dict({key: found}), lambda: ampplug.plan(torch.nn.Linear(2, 2), **{key: found})):
        with pytest.raises(ValueError) as error:
            call()
        assert f"{key!r} (did you mean {near!r}?)" in str(error.value) and "legal keys are opt_level, backend" in str(error.value)


def test_nothing_near_is_not_guessed():
    with pytest.raises(ValueError) as error:
        Config.from_dict({"zzz": 1})
    assert "did you mean" not in str(error.value) and "legal keys" in str(error.value)


@pytest.mark.parametrize("settings,words", [({"history": 2000}, ["2000", "1 to 1024"]), ({"margin": 17}, ["17", "-16 to 16"]), ({"seed": 2**32}, ["seed", str(2**32 - 1)])])
def test_ranges(settings, words):
    with pytest.raises(ValueError) as error:
        Config(**settings)
    assert all(w in str(error.value) for w in words)
