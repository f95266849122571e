"""The table of all routes: endpoint, request body, and the possible answers.

The endpoints read and check bodies themselves, because the size limit must apply while reading.
`openapi.py` makes the document from this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from coterie.api import answer_types as native_answers
from coterie.api import answer_types as vendor_answers
from coterie.api.admin.config import ConfigEndpoints
from coterie.api.admin.ensemble import (
    AuditQuery,
    CanaryBody,
    EnsembleEndpoints,
    ReasonBody,
    ThresholdsBody,
)
from coterie.api.admin.experts import (
    ExpertEndpoints,
    ExpertPatch,
    InstallBody,
    InstallQuery,
    LoadLoraBody,
    PromoteBody,
    UnloadLoraBody,
)
from coterie.api.anthropic.endpoints import AnthropicDialect
from coterie.api.anthropic.types import CountBody, MessagesBody
from coterie.api.batches.anthropic import MessageBatchEndpoints
from coterie.api.batches.files import FileEndpoints
from coterie.api.batches.openai import BatchEndpoints
from coterie.api.batches.types import (
    BatchBody,
    BatchList,
    BatchObject,
    BatchQuery,
    DeletedFile,
    DeletedMessageBatchObject,
    FileForm,
    FileList,
    FileObject,
    FileQuery,
    MessageBatchBody,
    MessageBatchList,
    MessageBatchObject,
    MessageBatchQuery,
)
from coterie.api.embeddings.endpoints import EmbeddingEndpoints
from coterie.api.embeddings.types import EmbeddingBody, RerankBody, ScoreBody
from coterie.api.llamacpp.endpoints import LlamaDialect
from coterie.api.llamacpp.types import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletion,
    LlamaCompletionBody,
    LlamaProps,
    RenderedTemplate,
)
from coterie.api.native.dashboard import DashboardEndpoints, EventsQuery
from coterie.api.native.feedback import FeedbackBody, FeedbackEndpoints, InferenceQuery
from coterie.api.native.infer import InferEndpoints
from coterie.api.native.infer_body import InferBody
from coterie.api.native.jobs import DeletedJob, JobEndpoints, JobList, JobParameters, JobView
from coterie.api.native.page_files import ChatPageEndpoints
from coterie.api.native.receipts import ReceiptEndpoints, ReceiptParameters
from coterie.api.native.server import (
    ModelQuery,
    NativeEndpoints,
)
from coterie.api.ollama import answers as ollama_answers
from coterie.api.ollama.endpoints import OllamaDialect
from coterie.api.ollama.types import (
    OllamaChatBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaOldEmbedBody,
    OllamaShowBody,
)
from coterie.api.openai.endpoints import OpenAIDialect
from coterie.api.openai.types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizerQuery,
)
from coterie.api.openapi import RouteReplies, RouteRow, document
from coterie.api.responses.endpoints import ResponsesDialect
from coterie.api.responses.types import (
    ItemQuery,
    ResponseBody,
    ResponseCountBody,
    RetrieveQuery,
)
from coterie.core.events import InferenceResult
from coterie.core.receipt import Receipt

# stands in for the services of endpoints that are only described, never called
_NOBODY: Any = None
_GET, _POST, _PROBE = ("GET",), ("POST",), ("GET", "HEAD")
_DELETE = ("DELETE",)
_PLAIN = "text/plain"

# error statuses, by kind of route
_LOOK = (401, 500, 503)
_FIND = (401, 404, 500, 503)
_COUNT = (400, 401, 403, 404, 413, 500, 503)
_INFER = (400, 401, 403, 404, 413, 429, 500, 503)
_OPENAI = (*_INFER, 504)
_ANTHROPIC = (400, 401, 403, 404, 413, 429, 500, 504, 529)
_LIST_EXPERTS = (401, 403, 500, 503)
_FIND_EXPERT = (400, *_LIST_EXPERTS, 404)
_CHANGE_EXPERTS = (*_FIND_EXPERT, 413)

_STEERING: Mapping[str, Any] = {
    "x-session-id": {"type": "string"},
    "x-deadline-ms": {"type": "number", "minimum": 1, "maximum": 86_400_000},
}
_EVENTS = {
    "started": native_answers.InferStarted,
    "delta": native_answers.InferDelta,
    "finished": InferenceResult,
}
_PREFER: Mapping[str, Any] = {"Prefer": {"type": "string", "examples": ["respond-async"]}}


@dataclass(frozen=True, slots=True)
class EndpointSet:
    """The endpoints of all routes."""

    openai: OpenAIDialect
    anthropic: AnthropicDialect
    native: NativeEndpoints
    experts: ExpertEndpoints
    config: ConfigEndpoints
    infer: InferEndpoints
    jobs: JobEndpoints
    feedback: FeedbackEndpoints
    receipts: ReceiptEndpoints
    ensemble: EnsembleEndpoints
    responses: ResponsesDialect
    embeddings: EmbeddingEndpoints
    ollama: OllamaDialect
    llama: LlamaDialect
    files: FileEndpoints
    batches: BatchEndpoints
    message_batches: MessageBatchEndpoints
    dashboard: DashboardEndpoints
    chat_page: ChatPageEndpoints


def routes(ends: EndpointSet) -> Sequence[RouteRow]:
    return (
        *_infer_routes(ends),
        *_job_routes(ends.jobs),
        *_vendor_routes(ends),
        *_response_routes(ends.responses),
        *_encoder_routes(ends.embeddings),
        *_ollama_routes(ends.ollama),
        *_llama_routes(ends.llama),
        *_file_routes(ends.files),
        *_batch_routes(ends.batches),
        *_message_batch_routes(ends.message_batches),
        *_native_routes(ends.native),
        *_expert_routes(ends.experts),
        *_ensemble_routes(ends.ensemble),
        *_config_routes(ends.config),
        *_dashboard_routes(ends.dashboard),
        *_chat_page_routes(ends.chat_page),
    )


def _infer_routes(ends: EndpointSet) -> Sequence[RouteRow]:
    answers, infer, feedback = native_answers, ends.infer, ends.feedback
    replies = RouteReplies(
        (InferenceResult,), _INFER, events=_EVENTS, also={202: answers.JobSubmission}
    )
    log = RouteReplies((answers.InferenceLog,), (400, 401, 500, 503))
    judged = RouteReplies((answers.FeedbackAnswer,), (400, 401, 404, 409, 413, 500, 503))
    headers = {**_PREFER, **_STEERING}
    return (
        RouteRow(_POST, "/v1/infer", infer.infer, "native", replies, InferBody, headers=headers),
        RouteRow(
            _GET, "/v1/inferences", feedback.list_inferences, "native", log, query=InferenceQuery
        ),
        RouteRow(_POST, "/v1/feedback", feedback.give_feedback, "native", judged, FeedbackBody),
        RouteRow(
            _GET, "/v1/receipts", ends.receipts.list_receipts, "native",
            RouteReplies((native_answers.ReceiptList,), (400, *_LIST_EXPERTS)),
            query=ReceiptParameters,
        ),
        RouteRow(
            _GET, "/v1/receipts/{receipt_id}", ends.receipts.get_receipt, "native",
            RouteReplies((Receipt,), _FIND),
        ),
    )  # fmt: skip


def _job_routes(jobs: JobEndpoints) -> Sequence[RouteRow]:
    one = "/v1/jobs/{job_id}"
    listed = RouteReplies((JobList,), (400, 401, 500, 503))
    shown = RouteReplies((JobView,), _FIND)
    ended = RouteReplies((DeletedJob,), _FIND)
    events = RouteReplies(refusals=_FIND, events=_EVENTS)
    return (
        RouteRow(_GET, "/v1/jobs", jobs.list_jobs, "jobs", listed, query=JobParameters),
        RouteRow(_GET, one, jobs.get_job, "jobs", shown),
        RouteRow(_DELETE, one, jobs.delete_job, "jobs", ended),
        RouteRow(_GET, one + "/events", jobs.job_events, "jobs", events),
    )


def _vendor_routes(ends: EndpointSet) -> Sequence[RouteRow]:
    openai, anthropic, native = ends.openai, ends.anthropic, ends.native
    answers = vendor_answers
    chat = RouteReplies((answers.ChatCompletion,), _OPENAI, events={})
    text = RouteReplies((answers.TextCompletion,), _OPENAI, events={})
    message = RouteReplies((answers.AnthropicMessage,), _ANTHROPIC, events={})
    count = RouteReplies((answers.TokenCount,), (400, 401, 404, 413, 500, 529))
    models = RouteReplies((answers.ModelList, answers.AnthropicModelList), (400, *_LOOK))
    model = RouteReplies((answers.OpenAIModel, answers.AnthropicModel), (400, 403, *_FIND))
    return (
        RouteRow(
            _POST, "/v1/chat/completions", openai.chat, "openai", chat, ChatBody, headers=_STEERING
        ),
        RouteRow(
            _POST, "/v1/completions", openai.completions, "openai", text, CompletionBody,
            headers=_STEERING,
        ),
        RouteRow(_GET, "/v1/models", native.models, "openai", models, query=ModelQuery),
        RouteRow(_GET, "/v1/models/{model:path}", native.model, "openai", model),
        RouteRow(
            _POST, "/v1/messages", anthropic.messages, "anthropic", message, MessagesBody,
            headers=_STEERING,
        ),
        RouteRow(
            _POST, "/v1/messages/count_tokens", anthropic.count_tokens, "anthropic", count,
            CountBody,
        ),
    )  # fmt: skip


def _response_routes(ends: ResponsesDialect) -> Sequence[RouteRow]:
    answers = vendor_answers
    one = "/v1/responses/{response_id}"
    created = RouteReplies((answers.ResponseObject,), _OPENAI, events={})
    shown = RouteReplies((answers.ResponseObject,), (400, *_FIND), events={})
    ended = RouteReplies((answers.ResponseObject,), (400, *_FIND))
    deleted = RouteReplies((answers.DeletedResponse,), _FIND)
    listed = RouteReplies((answers.ResponseItemList,), (400, 413, *_FIND))
    counted = RouteReplies((answers.ResponseTokenCount,), _COUNT)
    return (
        RouteRow(
            _POST, "/v1/responses", ends.create_response, "openai", created, ResponseBody,
            headers=_STEERING,
        ),
        RouteRow(
            _POST, "/v1/responses/input_tokens", ends.count_input_tokens, "openai", counted,
            ResponseCountBody,
        ),
        RouteRow(_GET, one, ends.get_response, "openai", shown, query=RetrieveQuery),
        RouteRow(_DELETE, one, ends.delete_response, "openai", deleted),
        RouteRow(_POST, one + "/cancel", ends.cancel_response, "openai", ended),
        RouteRow(
            _GET, one + "/input_items", ends.list_input_items, "openai", listed, query=ItemQuery
        ),
    )  # fmt: skip


def _encoder_routes(ends: EmbeddingEndpoints) -> Sequence[RouteRow]:
    answers = vendor_answers
    embedded = RouteReplies((answers.EmbeddingList,), _OPENAI)
    ranked = RouteReplies((answers.RerankAnswer,), _OPENAI)
    scored = RouteReplies((answers.ScoreList,), _OPENAI)
    deadline = {"x-deadline-ms": _STEERING["x-deadline-ms"]}
    rows = [
        RouteRow(_POST, "/v1/embeddings", ends.embeddings, "openai", embedded, EmbeddingBody),
        RouteRow(_POST, "/v1/rerank", ends.rerank, "openai", ranked, RerankBody),
        RouteRow(_POST, "/v1/score", ends.score, "openai", scored, ScoreBody),
    ]
    # the paths of Jina's, Cohere's and vLLM's clients
    others = [("/rerank", rows[1]), ("/v2/rerank", rows[1]), ("/score", rows[2])]
    rows += [replace(row, path=path, documented=False) for path, row in others]
    return tuple(replace(row, headers=deadline) for row in rows)


def _ollama_routes(ends: OllamaDialect) -> Sequence[RouteRow]:
    answers = ollama_answers
    chat = RouteReplies((answers.OllamaChatAnswer,), _OPENAI, lines=answers.OllamaChatAnswer)
    text = RouteReplies(
        (answers.OllamaGenerateAnswer,), _OPENAI, lines=answers.OllamaGenerateAnswer
    )
    listed = RouteReplies((answers.OllamaModelList,), _LOOK)
    shown = RouteReplies((answers.OllamaShownModel,), _INFER)
    version = RouteReplies((answers.OllamaVersion,), (401, 500))
    embedded = RouteReplies((answers.OllamaEmbedAnswer,), _OPENAI)
    old_embedded = RouteReplies((answers.OllamaOldEmbedAnswer,), _OPENAI)
    refused = RouteReplies(refusals=(400, 401, 500))
    return (
        RouteRow(
            _POST, "/api/chat", ends.ollama_chat, "ollama", chat, OllamaChatBody,
            headers=_STEERING,
        ),
        RouteRow(
            _POST, "/api/generate", ends.ollama_generate, "ollama", text, OllamaGenerateBody,
            headers=_STEERING,
        ),
        RouteRow(_PROBE, "/api/tags", ends.ollama_tags, "ollama", listed),
        RouteRow(_GET, "/api/ps", ends.ollama_ps, "ollama", listed),
        RouteRow(_POST, "/api/show", ends.ollama_show, "ollama", shown, OllamaShowBody),
        RouteRow(_PROBE, "/api/version", ends.ollama_version, "ollama", version),
        RouteRow(_POST, "/api/embed", ends.ollama_embed, "ollama", embedded, OllamaEmbedBody),
        RouteRow(
            _POST, "/api/embeddings", ends.ollama_embeddings, "ollama", old_embedded,
            OllamaOldEmbedBody, documented=False,
        ),
        RouteRow(_POST, "/api/push", ends.ollama_push, "ollama", refused, documented=False),
        RouteRow(
            _POST, "/api/create", ends.ollama_create, "ollama", refused, OllamaCreateBody,
            documented=False,
        ),
    )  # fmt: skip


def _llama_routes(ends: LlamaDialect) -> Sequence[RouteRow]:
    text = RouteReplies((LlamaCompletion,), _OPENAI, events={})
    props = RouteReplies((LlamaProps,), (400, 403, *_FIND))
    rendered = RouteReplies((RenderedTemplate,), _COUNT)
    return (
        RouteRow(
            _POST, "/completion", ends.llama_completion, "llama.cpp", text, LlamaCompletionBody,
            headers=_STEERING,
        ),
        RouteRow(
            _POST, "/infill", ends.llama_infill, "llama.cpp", text, InfillBody, headers=_STEERING
        ),
        RouteRow(_GET, "/props", ends.llama_props, "llama.cpp", props, query=TokenizerQuery),
        RouteRow(
            _POST, "/apply-template", ends.apply_template, "llama.cpp", rendered,
            ApplyTemplateBody,
        ),
    )  # fmt: skip


def _file_routes(ends: FileEndpoints) -> Sequence[RouteRow]:
    one = "/v1/files/{file_id}"
    uploaded = RouteReplies((FileObject,), (400, 401, 413, 415, 429, 500, 503))
    listed = RouteReplies((FileList,), (400, *_LOOK))
    shown = RouteReplies((FileObject,), _FIND)
    content = RouteReplies(refusals=_FIND, media_type="application/octet-stream")
    deleted = RouteReplies((DeletedFile,), _FIND)
    return (
        RouteRow(_POST, "/v1/files", ends.upload_file, "openai", uploaded, form=FileForm),
        RouteRow(_GET, "/v1/files", ends.list_files, "openai", listed, query=FileQuery),
        RouteRow(_GET, one, ends.get_file, "openai", shown),
        RouteRow(_DELETE, one, ends.delete_file, "openai", deleted),
        RouteRow(_GET, one + "/content", ends.file_content, "openai", content),
    )


def _batch_routes(ends: BatchEndpoints) -> Sequence[RouteRow]:
    one = "/v1/batches/{batch_id}"
    created = RouteReplies((BatchObject,), (400, 401, 404, 413, 429, 500, 503))
    listed = RouteReplies((BatchList,), (400, *_LOOK))
    shown = RouteReplies((BatchObject,), _FIND)
    ended = RouteReplies((BatchObject,), (409, *_FIND))
    return (
        RouteRow(_POST, "/v1/batches", ends.create_batch, "openai", created, BatchBody),
        RouteRow(_GET, "/v1/batches", ends.list_batches, "openai", listed, query=BatchQuery),
        RouteRow(_GET, one, ends.get_batch, "openai", shown),
        RouteRow(_POST, one + "/cancel", ends.cancel_batch, "openai", ended),
    )


def _message_batch_routes(ends: MessageBatchEndpoints) -> Sequence[RouteRow]:
    all_of_them = "/v1/messages/batches"
    one = all_of_them + "/{batch_id}"
    find = (401, 404, 500, 529)
    created = RouteReplies((MessageBatchObject,), (400, 401, 413, 429, 500, 529))
    listed = RouteReplies((MessageBatchList,), (400, 401, 500, 529))
    shown = RouteReplies((MessageBatchObject,), find)
    ended = RouteReplies((MessageBatchObject,), (409, *find))
    deleted = RouteReplies((DeletedMessageBatchObject,), (400, *find))
    results = RouteReplies(refusals=find, media_type="application/x-jsonl")
    return (
        RouteRow(
            _POST, all_of_them, ends.create_message_batch, "anthropic", created, MessageBatchBody
        ),
        RouteRow(
            _GET, all_of_them, ends.list_message_batches, "anthropic", listed,
            query=MessageBatchQuery,
        ),
        RouteRow(_GET, one, ends.get_message_batch, "anthropic", shown),
        RouteRow(_DELETE, one, ends.delete_message_batch, "anthropic", deleted),
        RouteRow(_POST, one + "/cancel", ends.cancel_message_batch, "anthropic", ended),
        RouteRow(_GET, one + "/results", ends.message_batch_results, "anthropic", results),
    )  # fmt: skip


def _native_routes(native: NativeEndpoints) -> Sequence[RouteRow]:
    answers = native_answers
    tokens = RouteReplies((answers.TokenizeAnswer,), _COUNT)
    text = RouteReplies((answers.DetokenizeAnswer,), _COUNT)
    facts = RouteReplies((answers.TokenizerFacts,), (400, 403, *_FIND))
    load = RouteReplies((answers.ServerLoad,), (401, 500))
    health = RouteReplies((answers.HealthAnswer,), also={503: answers.HealthAnswer})
    live = RouteReplies((answers.LivenessAnswer,), also={503: answers.LivenessAnswer})
    ready = RouteReplies((answers.ReadinessAnswer,), also={503: answers.ReadinessAnswer})
    ping = RouteReplies(also={503: None})
    metrics = RouteReplies(refusals=(401, 403, 500), media_type=_PLAIN)
    version = RouteReplies((answers.VersionAnswer,), (401, 500))
    return (
        RouteRow(_POST, "/tokenize", native.tokenize, "native", tokens, TokenizeBody),
        RouteRow(_POST, "/detokenize", native.detokenize, "native", text, DetokenizeBody),
        RouteRow(
            _GET, "/tokenizer_info", native.tokenizer_info, "native", facts, query=TokenizerQuery
        ),
        RouteRow(_GET, "/load", native.load, "native", load),
        RouteRow(_PROBE, "/health", native.health, "native", health),
        RouteRow(_PROBE, "/health/live", native.live, "native", live),
        RouteRow(_PROBE, "/health/ready", native.ready, "native", ready),
        RouteRow(("GET", "HEAD", "POST"), "/ping", native.ping, "native", ping),
        RouteRow(_GET, "/metrics", native.metrics, "native", metrics),
        RouteRow(_GET, "/version", native.version, "native", version),
    )


def _expert_routes(experts: ExpertEndpoints) -> Sequence[RouteRow]:
    answers = native_answers
    one, act = "/v1/experts/{name}", experts.act_on_expert
    listed = RouteReplies((answers.ExpertList,), _LIST_EXPERTS)
    shown = RouteReplies((answers.ShownExpert,), _FIND_EXPERT)
    acted = RouteReplies((answers.ChangedExpert,), (*_CHANGE_EXPERTS, 409))
    changed = RouteReplies((answers.Expert,), _CHANGE_EXPERTS)
    installed = RouteReplies((answers.Expert,), _CHANGE_EXPERTS, status=201)
    deleted = RouteReplies((answers.DeletedExpert,), (*_FIND_EXPERT, 409))
    vllm = RouteReplies(refusals=_CHANGE_EXPERTS, media_type=_PLAIN)
    load, unload = experts.load_lora_adapter, experts.unload_lora_adapter
    return (
        RouteRow(_GET, "/v1/experts", experts.list_experts, "experts", listed),
        RouteRow(
            _POST, "/v1/experts", experts.install_expert, "experts", installed, InstallBody,
            query=InstallQuery, takes_file=True,
        ),
        RouteRow(_POST, one + ":{action}", act, "experts", acted, PromoteBody, documented=False),
        RouteRow(_POST, one + "/{action}", act, "experts", acted, PromoteBody),
        RouteRow(_GET, one, experts.show_expert, "experts", shown),
        RouteRow(("PATCH",), one, experts.change_expert, "experts", changed, ExpertPatch),
        RouteRow(_DELETE, one, experts.delete_expert, "experts", deleted),
        RouteRow(_POST, "/v1/load_lora_adapter", load, "experts", vllm, LoadLoraBody),
        RouteRow(_POST, "/v1/unload_lora_adapter", unload, "experts", vllm, UnloadLoraBody),
    )  # fmt: skip


def _ensemble_routes(ends: EnsembleEndpoints) -> Sequence[RouteRow]:
    answers = native_answers
    slo = RouteReplies((answers.SloList,), (401, 500, 503))
    shown = RouteReplies((answers.EnsembleStatus,), _LIST_EXPERTS)
    acted = RouteReplies((answers.SpecialistStatus,), (*_CHANGE_EXPERTS, 409))
    drained = RouteReplies((answers.ReplicaStatus,), (*_CHANGE_EXPERTS, 409))
    intent = RouteReplies((answers.IntentStatus,), (*_CHANGE_EXPERTS, 409))
    canary = RouteReplies((answers.CanaryStatus,), (*_CHANGE_EXPERTS, 409))
    audit = RouteReplies((answers.AuditList,), (400, *_LIST_EXPERTS))
    one = "/v1/ensemble/intents/{intent}"
    return (
        RouteRow(_GET, "/v1/slo", ends.slo, "native", slo),
        RouteRow(_GET, "/v1/ensemble", ends.show_ensemble, "ensemble", shown),
        RouteRow(
            _POST, "/v1/ensemble/specialists/{name}/{action}", ends.act_on_specialist, "ensemble",
            acted, ReasonBody,
        ),
        RouteRow(
            _POST, "/v1/ensemble/replicas/{name}/{action}", ends.act_on_replica, "ensemble",
            drained, ReasonBody,
        ),
        RouteRow(("PATCH",), one, ends.set_thresholds, "ensemble", intent, ThresholdsBody),
        RouteRow(_DELETE, one, ends.clear_thresholds, "ensemble", intent),
        RouteRow(
            _POST, "/v1/ensemble/canaries", ends.start_canary, "ensemble", canary, CanaryBody
        ),
        RouteRow(
            _DELETE, "/v1/ensemble/canaries/{subject}", ends.stop_canary, "ensemble", canary
        ),
        RouteRow(_GET, "/v1/ensemble/audit", ends.audit, "ensemble", audit, query=AuditQuery),
    )  # fmt: skip


def _config_routes(config: ConfigEndpoints) -> Sequence[RouteRow]:
    shown = RouteReplies((native_answers.ConfigAnswer,), _LIST_EXPERTS)
    reloaded = RouteReplies((native_answers.ReloadAnswer,), (400, *_LIST_EXPERTS))
    return (
        RouteRow(_GET, "/v1/config", config.show_config, "config", shown),
        RouteRow(_POST, "/v1/config/reload", config.reload_config, "config", reloaded),
    )


def _dashboard_routes(ends: DashboardEndpoints) -> Sequence[RouteRow]:
    page = RouteReplies(refusals=(403, 421, 500), media_type="text/html")
    file = RouteReplies(refusals=(403, 404, 421, 500), media_type=_PLAIN)
    events = RouteReplies(refusals=(400, 401, 429, 500, 503), events={})
    return (
        RouteRow(_PROBE, "/dashboard", ends.dashboard, "native", page),
        RouteRow(
            _PROBE, "/dashboard/", ends.dashboard_folder, "native", page, documented=False
        ),
        RouteRow(
            _PROBE, "/dashboard/{file}", ends.dashboard_file, "native", file, documented=False
        ),
        RouteRow(
            _GET, "/v1/dashboard/events", ends.dashboard_events, "native", events,
            query=EventsQuery,
        ),
    )  # fmt: skip


def _chat_page_routes(ends: ChatPageEndpoints) -> Sequence[RouteRow]:
    root = RouteReplies((native_answers.AboutAnswer,), (401, 500), media_type="text/html")
    file = RouteReplies(refusals=(403, 404, 421, 500), media_type=_PLAIN)
    return (
        RouteRow(_PROBE, "/", ends.root, "native", root),
        RouteRow(_PROBE, "/chat/{file}", ends.chat_file, "native", file, documented=False),
    )


def add_routes(app: FastAPI, rows: Sequence[RouteRow]) -> None:
    for row in rows:
        for method in row.methods:
            app.add_api_route(
                row.path,
                row.endpoint,
                methods=[method],
                response_class=Response,
                include_in_schema=False,
            )


def described() -> Sequence[RouteRow]:
    """The rows without a server, for documentation; their endpoints cannot be called."""
    return routes(
        EndpointSet(
            OpenAIDialect(_NOBODY, 0),
            AnthropicDialect(_NOBODY, 0),
            NativeEndpoints(_NOBODY, 0, _NOBODY, _NOBODY),
            ExpertEndpoints(_NOBODY, _NOBODY, 0, 0),
            ConfigEndpoints(_NOBODY, _NOBODY),
            InferEndpoints(_NOBODY, _NOBODY, _NOBODY, 0),
            JobEndpoints(_NOBODY),
            FeedbackEndpoints(_NOBODY, 0),
            ReceiptEndpoints(_NOBODY),
            EnsembleEndpoints(_NOBODY, 0),
            ResponsesDialect(_NOBODY, _NOBODY, _NOBODY, 0),
            EmbeddingEndpoints(_NOBODY, 0),
            OllamaDialect(_NOBODY, 0),
            LlamaDialect(_NOBODY, 0),
            FileEndpoints(_NOBODY),
            BatchEndpoints(_NOBODY, 0),
            MessageBatchEndpoints(_NOBODY, 0),
            DashboardEndpoints(_NOBODY, _NOBODY, _NOBODY),
            ChatPageEndpoints(_NOBODY, _NOBODY),
        )
    )


def reference() -> dict[str, Any]:
    """The document without a server: only names and docstrings of the endpoints are read."""
    return document(described())
