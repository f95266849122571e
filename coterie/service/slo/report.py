"""What every specialist delivers, for /v1/slo, headers and metrics. Each by itself: there is no
figure over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coterie.core.ensemble import SloSettings
from coterie.obs.metrics import MetricRegistry
from coterie.service.breaker.control import EnsembleControl
from coterie.service.breaker.spike import STEPS
from coterie.service.slo.board import DeliveredService, LatencyQuantiles
from coterie.service.slo.correctness import CorrectnessRate
from coterie.service.slo.evidence import CUT_QUANTILE

if TYPE_CHECKING:
    from coterie.service.fleet import ServedSpecialist

# age at which the text of a header is made again
HEADER_S = 1.0
# metrics whose labels come and go
RENEWED_METRICS = (
    "coterie_slo_seconds",
    "coterie_slo_kept",
    "coterie_correctness",
    "coterie_ended_share",
    "coterie_breaker_state",
)


class SloReporter:
    def __init__(self, control: EnsembleControl, served: Mapping[str, ServedSpecialist]) -> None:
        self._control, self._served = control, served
        # by specialist: when the header's text was made, and the text
        self._headers: dict[str, tuple[float, str]] = {}

    def report(self) -> list[dict[str, Any]]:
        """What every specialist delivers and how it stands."""
        return [self.of(name) for name in self._control.watches]

    def of(self, name: str) -> dict[str, Any]:
        control, served = self._control, self._served[name]
        now, watch = control.now, control.watches[name]
        delivered = served.series.slo.delivered(now)
        rate = watch.breaker.window.rate(now)
        promise = watch.settings.slo
        return {
            "specialist": name,
            "breaker": watch.state(now),
            "held": watch.is_held,
            "changed_at": watch.breaker.changed_at or None,
            "spike": STEPS[watch.spike.level],
            "load": round(watch.spike.load, 3),
            "running": served.replicas.running(),
            "waiting": served.replicas.queued(),
            "ejected": sorted(watch.replicas.ejected(now)),
            "draining": watch.is_draining,
            "drained": sorted(control.drained.intersection(watch.settings.replicas)),
            **asdict(delivered),
            "correctness": asdict(rate)
            | {
                "state": "known" if rate.is_known else "unknown",
                "floor": promise.correctness or None,
            },
            "ended": {
                "newest": watch.breaker.ended.newest.rate,
                "usual": watch.breaker.ended.usual.rate().rate,
                "judged": watch.breaker.ended.newest.judged,
                "limit": watch.breaker.lengths.quantile(CUT_QUANTILE),
            },
            "promised": {
                "ttft_p95_s": promise.ttft_p95_s or None,
                "itl_p95_s": promise.itl_p95_s or None,
                "correctness": promise.correctness or None,
            },
            "kept": _kept(promise, delivered, rate),
            "fallback": watch.settings.fallback or control.base,
            "window_s": watch.breaker.settings.window_s,
        }

    def header(self, name: str) -> str:
        """The figures that a caller of this specialist can act on, at most a second old."""
        now = self._control.now
        made_at, text = self._headers.get(name, (0.0, ""))
        watch = self._control.watches.get(name)
        if now - made_at >= HEADER_S and watch is not None:
            delivered = self._served[name].series.slo.delivered(now)
            text = slo_text(delivered, watch.breaker.window.rate(now))
            self._headers[name] = now, text
        return text

    def measure(self, registry: MetricRegistry) -> None:
        """Update the gauges."""
        registry.forget(RENEWED_METRICS)
        for item in self.report():
            name, correctness = item["specialist"], item["correctness"]
            for kind in ("ttft", "itl"):
                for share in ("p50", "p95", "p99"):
                    if item[kind]["count"]:
                        value = item[kind][f"{share}_s"]
                        registry.value("coterie_slo_seconds", name, kind, share).set(value)
            value = item["admission_to_first_token_p95_s"]
            if value is not None:
                registry.value("coterie_slo_seconds", name, "admission", "p95").set(value)
            for bound in ("rate", "low", "high", "floor"):
                if correctness[bound] is not None:
                    value = correctness[bound]
                    registry.value("coterie_correctness", name, bound).set(value)
            for which in ("newest", "usual"):
                if item["ended"][which] is not None:
                    registry.value("coterie_ended_share", name, which).set(item["ended"][which])
            for promised, is_kept in item["kept"].items():
                if is_kept is not None:
                    registry.value("coterie_slo_kept", name, promised).set(float(is_kept))
            registry.value("coterie_correctness_judged", name).set(correctness["judged"])
            registry.value("coterie_breaker_state", name, item["breaker"]).set(1)
            registry.value("coterie_spike_level", name).set(STEPS.index(item["spike"]))
            registry.value("coterie_preempted_share", name).set(item["preempted_share"] or 0.0)


def slo_text(delivered: DeliveredService, rate: CorrectnessRate) -> str:
    """`ttft_p50=0.1;...;correctness=0.97[0.93,0.99];preempted=0`, seconds and shares. What was not
    measured yet is left out."""
    figures: dict[str, float | None] = {
        f"{name}_{share}": values[f"{share}_s"]
        for name, values in (("ttft", asdict(delivered.ttft)), ("itl", asdict(delivered.itl)))
        for share in ("p50", "p95", "p99")
    }
    figures["admission_p95"] = delivered.admission_to_first_token_p95_s
    parts = [f"{name}={value:.3g}" for name, value in figures.items() if value is not None]
    shown = "unknown"
    if rate.rate is not None:
        shown = f"{rate.rate:.3f}[{rate.low:.3f},{rate.high:.3f}]"
    parts.append(f"correctness={shown}")
    if delivered.preempted_share is not None:
        parts.append(f"preempted={delivered.preempted_share:.3g}")
    return ";".join(parts)


def _kept(
    promise: SloSettings, delivered: DeliveredService, rate: CorrectnessRate
) -> dict[str, bool | None]:
    """Whether each promise is kept; None = nothing is promised, or too little is known."""

    def within(promised_s: float, values: LatencyQuantiles) -> bool | None:
        return values.p95_s <= promised_s if promised_s and values.p95_s is not None else None

    known = promise.correctness > 0 and rate.rate is not None
    return {
        "ttft_p95_s": within(promise.ttft_p95_s, delivered.ttft),
        "itl_p95_s": within(promise.itl_p95_s, delivered.itl),
        "correctness": (rate.rate or 0.0) >= promise.correctness if known else None,
    }
