"""What a lane is given: one specialist's queue bound, batch bounds and fixed KV quota.

A plain value that a gateway may build and send: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from coterie.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    name: str
    num_blocks: int
    max_context: int
    block_size: int = 16
    # sequences that may wait; one more is refused
    max_queue: int = 256
    # sequences computed together
    max_sequences: int = 64
    # tokens computed in one step: bounds how long a prefill chunk delays running streams
    max_step_tokens: int = 512
    # sessions whose blocks are kept longest
    kv_cache_slots: int = 16
    prefix_cache: bool = True
    # share of the engine's tokens, relative to the other lanes
    weight: float = 1.0

    def __post_init__(self) -> None:
        for key in ("num_blocks", "max_context", "block_size", "max_sequences", "max_step_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"lane {self.name}: {key} must be at least 1", param=key)
        if self.max_queue < 1 or self.kv_cache_slots < 0 or not self.weight > 0:
            raise ConfigError(f"lane {self.name}: max_queue, kv_cache_slots or weight is too small")
        if self.max_step_tokens < self.max_sequences:
            raise ConfigError(
                f"lane {self.name}: max_step_tokens ({self.max_step_tokens}) must be at least "
                f"max_sequences ({self.max_sequences}), or running streams would stall",
                param="max_step_tokens",
            )

    @property
    def capacity_tokens(self) -> int:
        """The longest prompt plus output that one sequence can have here."""
        return min(self.max_context, self.num_blocks * self.block_size)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.capacity_tokens // self.block_size)


def places(max_queue: int, *, is_expected: bool, is_new: bool) -> int:
    """How many may wait for such a request to find room. Who was told to come (`is_expected`) finds
    a quarter more, a tenant of which nobody is here (`is_new`) another quarter, which none of
    those can fill."""
    extra = max(1, max_queue // 4)
    return max_queue + (2 * extra if is_new else extra if is_expected else 0)
