"""Config: one object from keywords or dict, and errors that tell."""

import pytest

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
