"""`--strategy auto`: asks the planner, with what is measured and known when experts are opened."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from coterie.experts.measure import Place, ensure, profile_name
from coterie.experts.opening import needs_of, sizes_of
from coterie.experts.planner import Case, Choice, Division, Subject, choose
from coterie.experts.workload import assumed, from_heatmap

if TYPE_CHECKING:
    from coterie.core.dispatch import DispatchSettings
    from coterie.experts.dispatch.base import Costs
    from coterie.experts.opening import Site
    from coterie.experts.store import Store

_log = logging.getLogger(__name__)


def chooser(store: Store, settings: DispatchSettings, site: Site) -> str:
    """The strategy's name. Measures the machine when it never was (a few seconds)."""
    return choice(store, settings, site).strategy


def choice(store: Store, settings: DispatchSettings, site: Site) -> Choice:
    place = _place(site)
    machine = ensure(store, place, say=_log.info)
    known = site.heatmap
    if known is not None and known.total() > 0:
        load = from_heatmap(known, "drawn from the recorded heatmap")
    else:
        load = assumed(store.geometry)
    case = Case(Subject(store.geometry, sizes_of(store)), machine, profile_name(store, place), load)
    best = choose(case, [Division(settings, needs_of(set(), site))])
    _log.info("strategy %s", best.reason)
    return best


def measured_costs(store: Store, site: Site, *, host_holds: bool) -> Costs:
    """What strategies weigh a move against, as measured on this machine."""
    place = _place(site)
    return ensure(store, place).profiles[profile_name(store, place)].costs(host_holds)


def _place(site: Site) -> Place:
    return Place(str(site.device), torch.get_num_threads())
