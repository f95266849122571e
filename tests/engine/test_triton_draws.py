"""The whole device path of an engine with the real kernels of draws, in Triton's interpreter: its
answers are those of the host."""

from __future__ import annotations

import pytest

from coterie.core.events import Delta
from tests.helpers.kernels.triton_interpreter import interpreted

pytest.importorskip("triton")

# the interpreter is slow, and slower on a busy machine
pytestmark = pytest.mark.timeout(300)


@pytest.mark.full
def test_answers_are_those_of_the_host() -> None:
    assert interpreted(__file__, ["answers"]) == {"answers": 0.0}


def measure(cases: list[str]) -> dict[str, float]:
    """Whether the answers differ."""
    import torch

    from coterie.engine.device_steps import DeviceSteps
    from coterie.engine.runner import TritonDraws
    from coterie.engine.sampler import ModelOutput, Sampler
    from coterie.engine.upload import UploadRing
    from coterie.models.build.cuda_graph import DecodeGraphs
    from tests.helpers.models import toy_model as toy

    edited = [
        toy.make_assignment("greedy", [1, 2, 3], max_tokens=3),
        toy.make_assignment(
            "counted",
            [4],
            max_tokens=3,
            repetition_penalty=1.5,
            frequency_penalty=1.0,
            temperature=1.0,
        ),
        toy.make_assignment("biased", [4, 5], max_tokens=3, logit_bias=((9, 2.0), (3, -5.0)), n=2),
    ]
    scored = [
        toy.make_assignment("best", [1, 2, 3], max_tokens=3, logprobs=1),
        toy.make_assignment("cut", [4, 5], max_tokens=3, top_p=0.8, temperature=1.0, logprobs=1),
    ]
    found: list[list[object]] = []
    for on_device in (False, True):
        model = toy.ToyModel()
        engine = toy.make_engine(model=model, run_ahead=on_device)
        if on_device:
            lane, cpu = engine._lanes[0], torch.device("cpu")
            runner, tables = lane.runner, lane.scheduler.space.tables
            runner._uploads = UploadRing(cpu)
            runner._sampler = Sampler(engine._grammars.work, TritonDraws(dependent=False))
            runner.counts_on_device = True
            graphs = DecodeGraphs(toy.padded_forward(model), 4096, cpu)
            draws, output = TritonDraws(dependent=False, rows=8), ModelOutput(cpu, toy.VOCAB)
            steps = DeviceSteps(graphs, runner._kv, lane.config, tables, draws, output)
            runner._steps = steps
        found.append([])
        for requests in (edited, scored):
            for request in requests:
                engine.add(request)
            for event in toy.drain(engine):
                if isinstance(event, Delta):
                    scores = [round(one.logprob, 4) for one in event.logprobs or ()]
                    place = event.request_id, event.choice
                    found[-1].append((*place, event.token_ids, scores))
        if on_device:
            kinds = [kind for step in steps._steps.values() for kind in step.draws]
            assert any(kind.width for kind in kinds) and any(kind.top >= 0 for kind in kinds)
    return {"answers": float(found[0] != found[1])}
