"""Recorded shapes of what agents and their libraries send, replayed: each completion is in one sample, as the model wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_client import samples

from tests.clients.responses import ids, parsed
from tests.clients.service import check_captured, serving_world, text
from tests.clients.shapes import FOLDER, filled, read
from tests.support.engine_model import EngineModel

RECORDED = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_a_recorded_session_is_captured_exactly(path: Path) -> None:
    recorded = read(path)
    calls: Sequence[Any] = recorded["calls"]
    model = EngineModel([call["wrote"] for call in calls], odd=True)
    given: dict[str, str] = {}
    async with serving_world(model) as world:
        uid, base, bearer = await world.start()
        for number, call in enumerate(calls):
            body, headers = filled(call["body"], given), filled(call["headers"], given)
            response = await world.http.post(f"{base}/{call['path']}", json=body, headers={**headers, **bearer})
            assert response.status_code == 200, response.text
            given |= {f"@{number}:{name}": value for name, value in ids(parsed(response.content)).items()}
        outcome = await world.finish(uid, base, bearer)
    masked = check_captured(samples(outcome), model.seen)
    assert sorted(text(model, each) for each in masked) == recorded["masked"]
    assert (
        sorted(len({span.turn for span in each.spans if span.trains}) for each in samples(outcome)) == recorded["turns"]
    )
