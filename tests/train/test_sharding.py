from __future__ import annotations

import torch

from dflash.train.sharding import full_state, load_full_state


def trained(*, fused: bool | None) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_how_updates_are_computed_does_not_come_from_a_checkpoint() -> None:
    for before, now in ((None, True), (True, None)):
        weights, state = full_state(*trained(fused=before))
        model, optimizer = trained(fused=now)
        load_full_state(model, optimizer, weights, state)
        assert [group["fused"] for group in optimizer.param_groups] == [now]
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert {float(one["step"]) for one in optimizer.state.values()} == {2.0}
