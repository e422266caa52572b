"""The check of public types judges what users build on, and finds what is wrong there."""

import pytest

from tools.public_types import faults_of, is_public

HOMES = {"Thing": "torchdelta.things"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torchdelta.Thing", True),
        ("torchdelta.things.Thing.size_bytes", True),
        ("torchdelta.things.ThingMaker", False),
        ("torchdelta.other.Thing", False),
        ("torchdelta.integrations.lightning.Callback.__init__", True),
        ("torchdelta.integrations.lightning._Helper", False),
    ],
)
def test_the_public_interface_is_what_is_exported(name, expected):
    """Exported names with their members, and the integrations without what is private there."""
    assert is_public(name, HOMES) == expected


def test_an_unknown_and_an_ambiguous_type_are_faults():
    """A line for each, with the reason; internal symbols are not judged."""

    def symbol(name, *, known=True, ambiguous=False):
        diagnostics = [] if known and not ambiguous else [{"message": "no annotation\n  more"}]
        return {"name": name, "isTypeKnown": known, "isTypeAmbiguous": ambiguous, "diagnostics": diagnostics}

    symbols = [
        symbol("torchdelta.things.Thing.a", known=False),
        symbol("torchdelta.things.Thing.b", ambiguous=True),
        symbol("torchdelta.things.Thing.c"),
        symbol("torchdelta.other.d", known=False),
    ]
    faults = faults_of({"typeCompleteness": {"symbols": symbols}}, HOMES)
    assert faults == ["torchdelta.things.Thing.a: no annotation", "torchdelta.things.Thing.b: no annotation"]
