"""The proto has the fields of the OpenAPI document, and the code that is made from it is fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coterie.api.proto.coterie.v1 import inference_pb2 as pb
from coterie.api.routes import reference
from coterie.api.transport.grpc_calls import STATUSES
from coterie.core.errors import ERRORS
from scripts.generate_proto import ROOT, SOURCE, drifted

# message -> schema, and what only one of them needs
TWINS = {
    "InferRequest": ("InferBody", {"stream"}),
    "Grammar": ("GrammarItem", set()),
    "InferStarted": ("InferStarted", set()),
    "InferDelta": ("InferDelta", set()),
    "InferenceResult": ("InferenceResult", set()),
    "ValidationResult": ("ValidationResult", set()),
    "InferenceMetrics": ("InferenceMetrics", set()),
    "ExpertPlan": ("ExpertPlan", set()),
    "AdapterChoice": ("AdapterChoice", set()),
    "GenerationParams": ("GenerationParams", set()),
    "RouteTrace": ("RouteTrace", set()),
    "Candidate": ("Candidate", set()),
    "JobSubmission": ("JobSubmission", set()),
    "Job": ("JobView", set()),
    "JobFault": ("JobFault", set()),
    "JobList": ("JobList", {"object"}),
    "FeedbackRequest": ("FeedbackBody", set()),
    "FeedbackAnswer": ("FeedbackAnswer", set()),
}


def test_messages_have_the_fields_of_the_document() -> None:
    schemas = reference()["components"]["schemas"]
    for message, (schema, beside) in TWINS.items():
        fields = {field.name for field in pb.DESCRIPTOR.message_types_by_name[message].fields}
        assert fields == set(schemas[schema]["properties"]) - beside, message


def test_the_code_is_made_from_the_proto(tmp_path: Path) -> None:
    assert not drifted(), "run make docs"
    changed = tmp_path / SOURCE
    changed.parent.mkdir(parents=True)
    changed.write_text((ROOT / SOURCE).read_text().replace("string prompt = 1", "bytes prompt = 1"))
    assert len(drifted(tmp_path)) == 2


def test_every_error_of_callers_has_a_status() -> None:
    ours = {"worker_crashed", "weights_error", "config_error", "missing_dependency"}
    assert set(STATUSES) == set(ERRORS) - ours - {"internal_error"}


@pytest.mark.parametrize("module", ["grpc_reflection"])
def test_without_grpcio_a_way_out_is_told(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from coterie.cli.main import main\n"
        "sys.exit(main(['serve', '--grpc-port', '0', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "pip install 'coterie[grpc]'" in done.stderr
