"""The goodput of deployments, by search: what `baton bench goodput` does with servers. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.figures import RunFigures, summarize, unloaded_latencies
from bench.goodput import Probe, RateSearch
from bench.planning.cluster import Cluster
from bench.planning.deployment import Pools, WorkerModel
from bench.slo import Objectives, Unloaded, attainment
from bench.workload import Load, Plan, RequestSpec, plan_run
from common.bench_config import BenchSearchOptions, BenchTokenOptions
from common.wire import Role


@dataclass(frozen=True, slots=True)
class PoolsGoodput:
    """What a search found for one deployment.

    hit:      the highest rate, in requests/s, that attained what is wanted; 0: none did
    miss:     the lowest one that did not; None: all did
    figures:  at the highest hit, as the rest; None without one
    prefill_busy, decode_busy:  share of the time in which a worker of the pool was in a step, on average
    num_preempted:  sequences that had to make room for others
    """

    pools: Pools
    hit: float
    miss: float | None
    probes: tuple[Probe, ...]
    figures: RunFigures | None
    prefill_busy: float
    decode_busy: float
    num_preempted: int

    @property
    def per_worker(self) -> float:
        return self.hit / self.pools.num_workers


_Outcome = tuple[RunFigures | None, float, float, int]
"""figures, prefill_busy, decode_busy and num_preempted of a probe"""


class Planner:
    """Plans pools for one kind of requests.

    specs: of which every probe has `per_worker` for each worker
    """

    def __init__(
        self, model: WorkerModel, specs: Sequence[RequestSpec], per_worker: int, tokens: BenchTokenOptions
    ) -> None:
        self._model = model
        self._specs = specs
        self._per_worker = per_worker
        self._tokens = tokens

    def measure_unloaded(self, num: int) -> Unloaded:
        """Of requests that have one worker of each kind to themselves."""
        plan = self._plan(num, Load("concurrency", 1))
        return unloaded_latencies(Cluster(Pools(1, 1), self._model, self._tokens.seed).run(plan))

    def search(
        self, pools: Pools, objectives: Objectives, options: BenchSearchOptions, start_rate: float
    ) -> PoolsGoodput:
        search = RateSearch(
            start_rate, wanted=options.attainment, tolerance=options.tolerance, max_probes=options.max_probes
        )
        plan = self._plan(self._per_worker * pools.num_workers, Load("rate", 1.0))
        outcomes: dict[float, _Outcome] = {0.0: (None, 0.0, 0.0, 0)}
        while (rate := search.next_rate()) is not None:
            outcomes[rate], attained = self._probe(pools, at_rate(plan, rate), objectives)
            search.record(rate, attained)
        return PoolsGoodput(pools, search.hit, search.miss, tuple(search.probes), *outcomes[search.hit])

    def _probe(self, pools: Pools, plan: Plan, objectives: Objectives) -> tuple[_Outcome, float]:
        """With the attainment."""
        cluster = Cluster(pools, self._model, self._tokens.seed)
        requests = cluster.run(plan)
        busy = cluster.busy_share(Role.PREFILL), cluster.busy_share(Role.DECODE)
        num_preempted = int(cluster.counters(Role.DECODE)["preemptions"])
        return (summarize(requests, objectives), *busy, num_preempted), attainment(requests, objectives)

    def _plan(self, num: int, load: Load) -> Plan:
        specs = extend(self._specs, num)
        return plan_run(specs, load, seed=self._tokens.seed, vocab_size=self._tokens.vocab_size, salt=0)


def extend(specs: Sequence[RequestSpec], num: int) -> list[RequestSpec]:
    """So many: again from the first where they do not suffice, with tokens that are equal among themselves only."""
    num_ids = 1 + max((hash_id for spec in specs for hash_id in spec.hash_ids), default=0)
    extended: list[RequestSpec] = []
    for index in range(num):
        spec, shift = specs[index % len(specs)], index // len(specs) * num_ids
        extended.append(replace(spec, index=index, hash_ids=tuple(hash_id + shift for hash_id in spec.hash_ids)))
    return extended


def at_rate(plan: Plan, rate: float) -> Plan:
    """plan: at one request/s."""
    requests = (replace(request, send_at_s=(request.send_at_s or 0.0) / rate) for request in plan.requests)
    return replace(plan, load=Load("rate", rate), requests=tuple(requests))


def splits(num_workers: int) -> list[Pools]:
    """All ways to divide them over two pools."""
    return [Pools(num_prefill, num_workers - num_prefill) for num_prefill in range(1, num_workers)]


def parse_pools(text: str) -> Pools:
    """`2:4`."""
    num_prefill, num_decode = map(int, text.split(":"))
    return Pools(num_prefill, num_decode)
