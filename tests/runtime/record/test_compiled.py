"""What is learned of compiled regions, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import UNLIMITED, running
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session


def region() -> Any:
    """Return a function that stands for compiled code."""
    return lambda x: x * 2


def room_made_for(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of room that is made from now on."""
    noted: list[int] = []
    make = session.room.make

    def noting(size_bytes: int, why: str) -> None:
        noted.append(size_bytes)
        make(size_bytes, why)

    monkeypatch.setattr(session.room, "make", noting)
    return noted


def call(session: Session, function: Any, x: torch.Tensor) -> None:
    """Call a region as the patched door does."""
    session.compiled.call(lambda function, x: function(x), (x,), (function, x), {})


def test_room_is_made_for_what_a_region_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of a function with the same shapes finds at least the room of its outputs."""
    x = torch.ones(1 << 16)
    with running() as (_, session):
        noted, function = room_made_for(session, monkeypatch), region()
        call(session, function, x)
        call(session, function, x)
    assert noted[0] == 0
    assert noted[2] >= x.nbytes


def test_a_region_at_the_address_of_a_dead_one_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a function ends with it, although another one may get its id."""
    x = torch.ones(1 << 16)
    with running() as (_, session):
        noted, ids, num_calls = room_made_for(session, monkeypatch), set[int](), 0
        while len(ids) == num_calls:
            function = region()
            ids.add(id(function))
            call(session, function, x)
            num_calls += 1
            del function
            assert num_calls < 1000
    assert noted == [0] * len(noted)


def test_a_replay_does_not_need_what_a_compiled_region_overwrote() -> None:
    """A replay reads a result that is alive; the region overwrites what that was made from; the result dies later."""

    def step(*, is_inside: bool) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        state = torch.ones(64, 64)
        with running(UNLIMITED, decisions="recompute") if is_inside else torch.enable_grad() as scope:
            middle = state * 3
            y = weight * middle.sin()
            if is_inside:
                _, session = scope
                session.compiled.call(lambda _function, x: x.add_(1), (state,), (len, state), {})
            else:
                state.add_(1)
            del middle
            y.sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(step(is_inside=False), step(is_inside=True))


@pytest.mark.parametrize("how", ["the step", "a function that steps"])
def test_a_compiled_optimizer_step_is_warned_of(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Hooks of the library break its graph, so it runs eagerly: once that is said, and never of another step."""
    warn_once.cache_clear()
    parameter = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> None:
        optimizer.step()

    compiled = torch.compile(optimizer.step if how == "the step" else step, backend="eager")
    with running():
        (parameter * 2).sum().backward()
        optimizer.step()
        assert "torch.compile does not compile an optimizer's step" not in caplog.text
        for _ in range(2):
            (parameter * 2).sum().backward()
            compiled()
    assert caplog.text.count("torch.compile does not compile an optimizer's step") == 1
