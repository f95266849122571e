from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InferRequest(_message.Message):
    __slots__ = ("prompt", "template", "body", "temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "force_experts", "exclude_experts", "max_experts", "context_size", "user_id", "priority", "timeout_ms", "model", "seed", "stop", "response_format", "grammar", "regex", "session_id", "explain", "typical_p", "num_beams", "length_penalty", "intent")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FORCE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    MAX_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_SIZE_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    INTENT_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    template: str
    body: str
    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    force_experts: _containers.RepeatedScalarFieldContainer[str]
    exclude_experts: _containers.RepeatedScalarFieldContainer[str]
    max_experts: int
    context_size: int
    user_id: str
    priority: int
    timeout_ms: int
    model: str
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    response_format: _struct_pb2.Struct
    grammar: Grammar
    regex: str
    session_id: str
    explain: bool
    typical_p: float
    num_beams: int
    length_penalty: float
    intent: str
    def __init__(self, prompt: _Optional[str] = ..., template: _Optional[str] = ..., body: _Optional[str] = ..., temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., force_experts: _Optional[_Iterable[str]] = ..., exclude_experts: _Optional[_Iterable[str]] = ..., max_experts: _Optional[int] = ..., context_size: _Optional[int] = ..., user_id: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., response_format: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., regex: _Optional[str] = ..., session_id: _Optional[str] = ..., explain: _Optional[bool] = ..., typical_p: _Optional[float] = ..., num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., intent: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("type", "text")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    type: str
    text: str
    def __init__(self, type: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class InferEvent(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: InferStarted
    delta: InferDelta
    finished: InferenceResult
    def __init__(self, started: _Optional[_Union[InferStarted, _Mapping]] = ..., delta: _Optional[_Union[InferDelta, _Mapping]] = ..., finished: _Optional[_Union[InferenceResult, _Mapping]] = ...) -> None: ...

class InferStarted(_message.Message):
    __slots__ = ("job_id", "model", "experts_used", "confidence", "task_type", "degraded", "plan")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_USED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    model: str
    experts_used: _containers.RepeatedScalarFieldContainer[str]
    confidence: float
    task_type: str
    degraded: _containers.RepeatedScalarFieldContainer[str]
    plan: ExpertPlan
    def __init__(self, job_id: _Optional[str] = ..., model: _Optional[str] = ..., experts_used: _Optional[_Iterable[str]] = ..., confidence: _Optional[float] = ..., task_type: _Optional[str] = ..., degraded: _Optional[_Iterable[str]] = ..., plan: _Optional[_Union[ExpertPlan, _Mapping]] = ...) -> None: ...

class InferDelta(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class InferenceResult(_message.Message):
    __slots__ = ("job_id", "text", "tokens_generated", "experts_used", "latency_ms", "finish_reason", "model", "task_type", "confidence", "degraded", "validation", "metrics", "plan", "seed", "telemetry")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_USED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    text: str
    tokens_generated: int
    experts_used: _containers.RepeatedScalarFieldContainer[str]
    latency_ms: float
    finish_reason: str
    model: str
    task_type: str
    confidence: float
    degraded: _containers.RepeatedScalarFieldContainer[str]
    validation: ValidationResult
    metrics: InferenceMetrics
    plan: ExpertPlan
    seed: int
    telemetry: _struct_pb2.Struct
    def __init__(self, job_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens_generated: _Optional[int] = ..., experts_used: _Optional[_Iterable[str]] = ..., latency_ms: _Optional[float] = ..., finish_reason: _Optional[str] = ..., model: _Optional[str] = ..., task_type: _Optional[str] = ..., confidence: _Optional[float] = ..., degraded: _Optional[_Iterable[str]] = ..., validation: _Optional[_Union[ValidationResult, _Mapping]] = ..., metrics: _Optional[_Union[InferenceMetrics, _Mapping]] = ..., plan: _Optional[_Union[ExpertPlan, _Mapping]] = ..., seed: _Optional[int] = ..., telemetry: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ValidationResult(_message.Message):
    __slots__ = ("valid", "validator", "error", "duration_ms")
    VALID_FIELD_NUMBER: _ClassVar[int]
    VALIDATOR_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    validator: str
    error: str
    duration_ms: float
    def __init__(self, valid: _Optional[bool] = ..., validator: _Optional[str] = ..., error: _Optional[str] = ..., duration_ms: _Optional[float] = ...) -> None: ...

class InferenceMetrics(_message.Message):
    __slots__ = ("job_id", "submitted_at", "router_latency_ms", "expert_load_latency_ms", "inference_latency_ms", "total_latency_ms", "experts_used", "num_experts", "vram_peak_mb", "input_tokens", "output_tokens", "tokens_per_second", "success", "error", "validation_passed", "finish_reason", "task_type", "specialist", "cached_tokens", "queue_ms", "first_token_ms", "routed_at", "first_token_at", "finished_at", "seed", "user_id")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOAD_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    VRAM_PEAK_MB_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_PASSED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    SPECIALIST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_AT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    submitted_at: float
    router_latency_ms: float
    expert_load_latency_ms: float
    inference_latency_ms: float
    total_latency_ms: float
    experts_used: _containers.RepeatedScalarFieldContainer[str]
    num_experts: int
    vram_peak_mb: float
    input_tokens: int
    output_tokens: int
    tokens_per_second: float
    success: bool
    error: str
    validation_passed: bool
    finish_reason: str
    task_type: str
    specialist: str
    cached_tokens: int
    queue_ms: float
    first_token_ms: float
    routed_at: float
    first_token_at: float
    finished_at: float
    seed: int
    user_id: str
    def __init__(self, job_id: _Optional[str] = ..., submitted_at: _Optional[float] = ..., router_latency_ms: _Optional[float] = ..., expert_load_latency_ms: _Optional[float] = ..., inference_latency_ms: _Optional[float] = ..., total_latency_ms: _Optional[float] = ..., experts_used: _Optional[_Iterable[str]] = ..., num_experts: _Optional[int] = ..., vram_peak_mb: _Optional[float] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., success: _Optional[bool] = ..., error: _Optional[str] = ..., validation_passed: _Optional[bool] = ..., finish_reason: _Optional[str] = ..., task_type: _Optional[str] = ..., specialist: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., first_token_ms: _Optional[float] = ..., routed_at: _Optional[float] = ..., first_token_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., seed: _Optional[int] = ..., user_id: _Optional[str] = ...) -> None: ...

class ExpertPlan(_message.Message):
    __slots__ = ("experts", "composition_order", "generation_params", "prompt_modified", "confidence", "reasons", "reasoning_trace")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    COMPOSITION_ORDER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_MODIFIED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TRACE_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedCompositeFieldContainer[AdapterChoice]
    composition_order: _containers.RepeatedScalarFieldContainer[str]
    generation_params: GenerationParams
    prompt_modified: str
    confidence: float
    reasons: _containers.RepeatedScalarFieldContainer[str]
    reasoning_trace: RouteTrace
    def __init__(self, experts: _Optional[_Iterable[_Union[AdapterChoice, _Mapping]]] = ..., composition_order: _Optional[_Iterable[str]] = ..., generation_params: _Optional[_Union[GenerationParams, _Mapping]] = ..., prompt_modified: _Optional[str] = ..., confidence: _Optional[float] = ..., reasons: _Optional[_Iterable[str]] = ..., reasoning_trace: _Optional[_Union[RouteTrace, _Mapping]] = ...) -> None: ...

class AdapterChoice(_message.Message):
    __slots__ = ("name", "digest", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class GenerationParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RouteTrace(_message.Message):
    __slots__ = ("task_type", "language", "features", "candidates", "threshold", "degraded", "timings_ms", "router_version")
    class FeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _struct_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Value, _Mapping]] = ...) -> None: ...
    class TimingsMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TASK_TYPE_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_MS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    task_type: str
    language: str
    features: _containers.MessageMap[str, _struct_pb2.Value]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    threshold: float
    degraded: _containers.RepeatedScalarFieldContainer[str]
    timings_ms: _containers.ScalarMap[str, float]
    router_version: str
    def __init__(self, task_type: _Optional[str] = ..., language: _Optional[str] = ..., features: _Optional[_Mapping[str, _struct_pb2.Value]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., threshold: _Optional[float] = ..., degraded: _Optional[_Iterable[str]] = ..., timings_ms: _Optional[_Mapping[str, float]] = ..., router_version: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("name", "digest", "similarity", "success", "memory", "score", "probability", "chosen", "why", "part")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIMILARITY_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    similarity: float
    success: float
    memory: float
    score: float
    probability: float
    chosen: bool
    why: str
    part: float
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., similarity: _Optional[float] = ..., success: _Optional[float] = ..., memory: _Optional[float] = ..., score: _Optional[float] = ..., probability: _Optional[float] = ..., chosen: _Optional[bool] = ..., why: _Optional[str] = ..., part: _Optional[float] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class JobSubmission(_message.Message):
    __slots__ = ("job_id", "status", "submitted_at", "estimated_wait_ms")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    status: str
    submitted_at: str
    estimated_wait_ms: float
    def __init__(self, job_id: _Optional[str] = ..., status: _Optional[str] = ..., submitted_at: _Optional[str] = ..., estimated_wait_ms: _Optional[float] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "status", "submitted_at", "started_at", "finished_at", "user_id", "text", "result", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    status: str
    submitted_at: str
    started_at: str
    finished_at: str
    user_id: str
    text: str
    result: InferenceResult
    error: JobFault
    def __init__(self, job_id: _Optional[str] = ..., status: _Optional[str] = ..., submitted_at: _Optional[str] = ..., started_at: _Optional[str] = ..., finished_at: _Optional[str] = ..., user_id: _Optional[str] = ..., text: _Optional[str] = ..., result: _Optional[_Union[InferenceResult, _Mapping]] = ..., error: _Optional[_Union[JobFault, _Mapping]] = ...) -> None: ...

class JobFault(_message.Message):
    __slots__ = ("message", "type", "param", "code")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    message: str
    type: str
    param: str
    code: str
    def __init__(self, message: _Optional[str] = ..., type: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class CancelledJob(_message.Message):
    __slots__ = ("job", "deleted")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    job: Job
    deleted: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., deleted: _Optional[bool] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("status", "user_id", "limit", "after")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    status: str
    user_id: str
    limit: int
    after: str
    def __init__(self, status: _Optional[str] = ..., user_id: _Optional[str] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class JobList(_message.Message):
    __slots__ = ("data", "has_more", "next")
    DATA_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    data: _containers.RepeatedCompositeFieldContainer[Job]
    has_more: bool
    next: str
    def __init__(self, data: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., has_more: _Optional[bool] = ..., next: _Optional[str] = ...) -> None: ...

class FeedbackRequest(_message.Message):
    __slots__ = ("job_id", "verdict", "comment")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COMMENT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verdict: str
    comment: str
    def __init__(self, job_id: _Optional[str] = ..., verdict: _Optional[str] = ..., comment: _Optional[str] = ...) -> None: ...

class FeedbackAnswer(_message.Message):
    __slots__ = ("job_id", "verdict")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    verdict: str
    def __init__(self, job_id: _Optional[str] = ..., verdict: _Optional[str] = ...) -> None: ...
