"""The settings of a lane: one specialist's queue limit, batch limits and fixed KV quota."""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.core.errors import ConfigError

# tokens of a KV block
BLOCK_SIZE = 16
STEP_TOKENS = 512
GPU_STEP_TOKENS, GPU_MIXED_TOKENS = 8192, 2048


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """A specialist inside an engine. `context` and `num_blocks` are 0 until the worker has read the
    model and divided the engine's KV bytes; the tokens of a step may be 0 until then."""

    name: str
    # most tokens of prompt plus output; 0 = what the model was trained for
    context: int = 0
    # the lane's own KV blocks; 0 = a share of the engine's KV bytes, by weight
    num_blocks: int = 0
    block_size: int = BLOCK_SIZE
    # sequences that may wait; further ones are refused
    max_queue: int = 256
    # sequences computed together
    max_sequences: int = 64
    # tokens computed in one step; 0 = what suits the device
    max_step_tokens: int = 512
    # prompt tokens of a step in which sequences decode: limits how long a prompt delays them; 0 =
    # only max_step_tokens limits them
    max_mixed_tokens: int = 0
    # sessions whose blocks are kept longest
    kv_cache_slots: int = 16
    prefix_cache: bool = True
    # this lane's share of the engine's KV bytes and tokens
    weight: float = 1.0

    def __post_init__(self) -> None:
        for key in ("block_size", "max_sequences"):
            if getattr(self, key) < 1:
                raise ConfigError(f"lane {self.name}: {key} must be at least 1", param=key)
        if min(self.context, self.num_blocks, self.kv_cache_slots) < 0:
            raise ConfigError(f"lane {self.name}: a context, num_blocks or kv_cache_slots below 0")
        if min(self.max_step_tokens, self.max_mixed_tokens) < 0:
            raise ConfigError(f"lane {self.name}: max_step_tokens or max_mixed_tokens below 0")
        if self.max_queue < 1 or not self.weight > 0:
            raise ConfigError(f"lane {self.name}: max_queue or weight is too small")
        if 0 < self.max_step_tokens < self.max_sequences:
            raise ConfigError(
                f"lane {self.name}: max_step_tokens ({self.max_step_tokens}) must be at least "
                f"max_sequences ({self.max_sequences}), or running streams would stall",
                param="max_step_tokens",
            )

    def require_quota(self) -> None:
        """For an engine, where these values must be set."""
        for key in ("context", "num_blocks", "max_step_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"lane {self.name}: {key} must be at least 1", param=key)

    def for_device(self, kind: str, copies_experts: bool = False) -> LaneConfig:
        """With the tokens of a step that suit this kind of device, unless they are given. A GPU
        computes long prompts faster in large steps. `copies_experts`: every step with a prompt
        does, which takes longer than to compute it, so that fewer steps delay others less."""
        tokens, mixed = self.max_step_tokens, self.max_mixed_tokens
        if kind == "cuda":
            beside = 0 if copies_experts else GPU_MIXED_TOKENS
            tokens, mixed = tokens or GPU_STEP_TOKENS, mixed or beside
        tokens = tokens or max(STEP_TOKENS, self.max_sequences)
        return replace(self, max_step_tokens=tokens, max_mixed_tokens=mixed)

    @property
    def capacity_tokens(self) -> int:
        """The longest prompt plus output that one sequence can have here."""
        return min(self.context, self.num_blocks * self.block_size)

    @property
    def table_width(self) -> int:
        """Number of blocks of the longest sequence."""
        return -(-self.capacity_tokens // self.block_size)


def queue_capacity(max_queue: int, *, is_expected: bool, is_new: bool) -> int:
    """How many may wait for such a request to find room. Who was told to come (`is_expected`) finds
    a quarter more, a tenant of which nobody is here (`is_new`) another quarter, which none of
    those can fill."""
    extra = max(1, max_queue // 4)
    return max_queue + (2 * extra if is_new else extra if is_expected else 0)
