"""Names of what is on the device: by the module that made it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.runtime.programs import running
from torchdelta.runtime.state.observer import Observer
from torchdelta.runtime.survey.inventory import Inventory


def test_an_address_that_is_used_again_is_of_its_new_maker() -> None:
    """What an op outside of all modules makes is not called by the module that had this address before."""
    paths: Any = SimpleNamespace(current=lambda: "layer")
    with running() as (_, session):
        made = torch.ones(2**16)
        inventory = Inventory(session.ledger, paths, Observer())
        inventory.note_outputs(made, are_new=True)
        assert ("layer: aten.ones.default", made.nbytes) in inventory.take({}, 0)[1]
        paths.current = str
        inventory.note_outputs(made, are_new=False)  # written in place
        assert ("layer: aten.ones.default", made.nbytes) in inventory.take({}, 0)[1]
        inventory.note_outputs(made, are_new=True)
        assert ("aten.ones.default", made.nbytes) in inventory.take({}, 0)[1]
