"""A deployment on the virtual clock, against what can be reckoned by hand."""

from statistics import mean

import pytest

from bench.measure import RequestFigures
from bench.planning.cluster import Cluster
from bench.planning.costs import HANDOFF_FEATURES, Fit
from bench.planning.deployment import Pools
from bench.workload import Load, RequestSpec
from common.engine.pacing import AIM
from common.wire import Role
from tests.unit.planning_rig import LINK_S, plan_of, step_costs, worker_model


def specs(num: int, num_input: int, num_output: int) -> list[RequestSpec]:
    return [RequestSpec(index, num_input, num_output) for index in range(num)]


def mean_ttft_s(requests: list[RequestFigures]) -> float:
    return mean(request.ttft_s for request in requests if request.ttft_s is not None)


def mean_tpot_s(requests: list[RequestFigures]) -> float:
    return mean(request.tpot_s for request in requests if request.tpot_s is not None)


def test_a_lone_request_waits_for_links_steps_and_the_handoff_only() -> None:
    """40 tokens, a millisecond each, in ten blocks."""
    model = worker_model(handoff=Fit(HANDOFF_FEATURES, (0.005, 0.0001), ()))
    (request,) = Cluster(Pools(1, 1), model, 0).run(plan_of(specs(1, 40, 4), Load("concurrency", 1)))
    assert request.ttft_s == pytest.approx(4 * LINK_S + 0.040)
    assert request.gaps_s() == pytest.approx([2 * LINK_S + 0.005 + 0.004 + 0.010, 0.010, 0.010])
    assert (request.num_input, request.num_output, request.failure) == (40, 4, "")
    assert request.e2e_s - (request.ttft_s or 0) == pytest.approx(sum(request.gaps_s()))


def test_a_request_of_one_token_never_reaches_decode() -> None:
    cluster = Cluster(Pools(1, 1), worker_model(), 0)
    (request,) = cluster.run(plan_of(specs(1, 40, 1), Load("concurrency", 1)))
    assert (request.num_output, request.tpot_s) == (1, None)
    assert cluster.busy_share(Role.PREFILL) > cluster.busy_share(Role.DECODE) == 0


def test_a_long_prompt_is_computed_in_chunks_and_a_little_later() -> None:
    """Each of four steps has a cost of its own, ten milliseconds."""
    model = worker_model(steps=step_costs(prompt=(0.01, 0.001, 0)), max_batch_prefill_tokens=50)
    (request,) = Cluster(Pools(1, 1), model, 0).run(plan_of(specs(1, 200, 1), Load("concurrency", 1)))
    assert request.ttft_s == pytest.approx(4 * LINK_S + 4 * 0.01 + 0.2)


def test_waiting_for_prefill_is_that_of_a_queue_with_poisson_arrivals_and_one_service_time() -> None:
    """M/D/1 at half load: half a service time on average. A step's budget is one prompt."""
    model = worker_model(max_batch_prefill_tokens=40)
    requests = Cluster(Pools(1, 1), model, 0).run(plan_of(specs(2000, 40, 1), Load("rate", 0.5 / 0.040)))
    waited_s = mean_ttft_s(requests) - 4 * LINK_S - 0.040
    assert waited_s == pytest.approx(0.020, rel=0.1)


def test_sequences_that_run_at_once_share_their_steps() -> None:
    """A step costs more with each sequence, so a closed loop of more has a longer time per token."""
    model = worker_model(steps=step_costs(prompt=(0.001, 0, 0), decode=(0.01, 0.001, 0, 0)))
    loads = Load("concurrency", 1), Load("concurrency", 4)
    tpots_s = [mean_tpot_s(Cluster(Pools(1, 1), model, 0).run(plan_of(specs(16, 4, 40), load))) for load in loads]
    assert tpots_s == pytest.approx([0.011, 0.014], rel=0.05)


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    model = worker_model(block_size=4)
    shared = [RequestSpec(index, 40, 2, block=8, hash_ids=(1, 2, 3, 4)) for index in range(2)]
    first, second = Cluster(Pools(1, 1), model, 0).run(plan_of(shared, Load("concurrency", 1)))
    assert (first.num_cached, second.num_cached) == (0, 32)
    assert second.ttft_s == pytest.approx(4 * LINK_S + 0.008)


def test_requests_of_one_prefix_go_to_the_worker_that_has_it() -> None:
    """Once its last prompt is not in its queue any more."""
    shared = [RequestSpec(i, 400, 2, block=80, hash_ids=(1, 2, 3, 4), recorded_at_s=float(i)) for i in range(8)]
    requests = Cluster(Pools(4, 1), worker_model(), 0).run(plan_of(shared, Load("trace", 1.0)))
    assert [request.num_cached for request in requests] == [0, *[320] * 7]


def test_nothing_is_owned_once_all_requests_have_ended() -> None:
    """Also after sequences were preempted: the cache holds four of them at most."""
    model = worker_model(num_blocks=60)
    cluster = Cluster(Pools(2, 1), model, 0)
    requests = cluster.run(plan_of(specs(40, 30, 30), Load("rate", 1000.0)))
    assert {request.num_output for request in requests} == {30}
    assert cluster.counters(Role.DECODE)["preemptions"] > 0
    assert [cluster.counters(role)["owned_blocks"] for role in (Role.PREFILL, Role.DECODE)] == [0, 0]


def test_runs_follow_each_other_with_what_the_caches_hold_by_then() -> None:
    cluster = Cluster(Pools(1, 1), worker_model(), 0)
    for num_cached in (0, 36):
        (request,) = cluster.run(plan_of(specs(1, 40, 2), Load("concurrency", 1)))
        assert request.num_cached == num_cached


def test_equal_seeds_give_equal_times() -> None:
    def run(seed: int) -> list[RequestFigures]:
        return Cluster(Pools(3, 3), worker_model(), seed).run(plan_of(specs(100, 64, 16), Load("rate", 40.0)))

    assert run(7) == run(7)
    assert run(7) != run(8)


def test_workers_of_one_host_slow_each_other_down_and_decode_steps_are_paced() -> None:
    """While the long prompt of the second request runs, steps take twice as long, and begin 30 ms after the last."""
    slow = step_costs(prompt=(0, 0.002, 0), decode=(0.02, 0, 0, 0))
    model = worker_model(shared_steps=slow, itl_target_s=0.03 / AIM)
    requests = [RequestSpec(0, 4, 40), RequestSpec(1, 300, 1, recorded_at_s=0.1)]
    stream, prompt = Cluster(Pools(1, 1), model, 0).run(plan_of(requests, Load("trace", 1.0)))
    gaps_s = stream.gaps_s()
    assert (gaps_s[2], gaps_s[-1]) == pytest.approx((0.010, 0.010))
    assert sum(gap_s == pytest.approx(0.030) for gap_s in gaps_s) > 5
    assert prompt.ttft_s is not None
    assert 0.3 < prompt.ttft_s < 0.6
