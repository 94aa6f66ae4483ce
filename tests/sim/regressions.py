"""Plans that failed once, as small as they could be made, by what they show."""

from common.wire import Role
from gateway.life import LifePolicy
from tests.sim.draw import POISONED
from tests.sim.plan import Arrival, Break, Crash, Drain, FailRank, Partition, Plan, Storm, Stuff, WorkerPlan

BOTH = WorkerPlan(name="b0", role=Role.BOTH)

REGRESSIONS: dict[str, Plan] = {
    "a stale token beside one that ends a request, so that the stale one's own is no longer queued behind it": Plan(
        seed=4,
        gateways=("g0",),
        workers=(
            WorkerPlan(name="p0", role=Role.PREFILL, num_blocks=40),
            WorkerPlan(name="d1", role=Role.DECODE, num_blocks=40),
        ),
        arrivals=(Arrival(at_s=0.874, num_prompt=1, max_tokens=2), Arrival(at_s=0.578, num_prompt=1, max_tokens=3)),
        faults=(Stuff(at_s=0.143, service="d1", other="g0", for_s=4.0),),
        policy=LifePolicy(
            max_concurrent_requests=4,
            request_timeout_s=10.0,
            when_no_prefill="reject",
            no_worker_timeout_s=0.5,
            resume_timeout_s=3.0,
            max_attempts=1,
        ),
        lease_s=1.5,
        max_outbox=2,
        step_s=0.1,
    ),
    "a gateway that came back is joined, though a status of the one before was read after its connection broke": Plan(
        seed=1,
        gateways=("g0",),
        workers=(BOTH,),
        arrivals=(Arrival(at_s=0.787, num_prompt=1, max_tokens=1),),
        faults=(Crash(at_s=0.501, service="g0", back_s=0.0),),
    ),
    "all that waits goes to the first worker that comes, and does not fill its link": Plan(
        seed=63,
        gateways=("g0",),
        workers=(BOTH,),
        arrivals=tuple(Arrival(at_s=0.8, num_prompt=1, max_tokens=1, family=family) for family in range(3)),
        faults=(Partition(at_s=0.684, service="g0", other="b0", for_s=0.5, resets=True),),
        max_outbox=2,
    ),
    "a death that was known counts for nobody whom a late status sent to the dead worker": Plan(
        seed=27717,
        gateways=("g0", "g1"),
        workers=tuple(WorkerPlan(name=name, role=Role.BOTH, num_blocks=14) for name in ("b0", "b1")),
        arrivals=(
            Arrival(at_s=0.108, num_prompt=21, max_tokens=4, family=1, leaves_s=0.285),
            Arrival(at_s=0.116, num_prompt=24, max_tokens=1, gateway="g1"),
            Arrival(at_s=0.119, num_prompt=10, max_tokens=18, family=2, is_greedy=False),
            Arrival(at_s=0.108, num_prompt=21, max_tokens=4, family=1, is_poison=True),
        ),
        faults=(),
        policy=POISONED,
        pull_timeout_s=1.0,
        step_s=0.1,
        num_heads=2,
    ),
    "who does not know the address of a peer that it misses messages of says so when it knows it": Plan(
        seed=5,
        gateways=("g0",),
        workers=(
            WorkerPlan(name="p0", role=Role.PREFILL, num_blocks=40),
            WorkerPlan(name="d2", role=Role.DECODE, num_blocks=40, max_batch_tokens=64),
        ),
        arrivals=(
            Arrival(at_s=0.275, num_prompt=1, max_tokens=1, leaves_s=0.257),
            Arrival(at_s=0.118, num_prompt=19, max_tokens=2),
            Arrival(at_s=0.351, num_prompt=1, max_tokens=1, family=1),
        ),
        faults=(
            Drain(at_s=0.179, service="g0", back_s=0.027),
            Storm(at_s=0.309, service="g0", other="p0", for_s=2.0, loss=0.3, repeats=0.2, delay_s=0.5),
        ),
        lease_s=1.5,
        pull_timeout_s=1.0,
    ),
    "a pull whose source a poisonous request has killed does not count against the request that pulled": Plan(
        seed=4,
        gateways=("g0",),
        workers=(
            WorkerPlan(name="p0", role=Role.PREFILL, num_blocks=14),
            WorkerPlan(name="d1", role=Role.DECODE, num_blocks=14, max_batch_tokens=5),
        ),
        arrivals=(
            Arrival(at_s=0.377, num_prompt=10, max_tokens=9, family=2),
            Arrival(at_s=0.354, num_prompt=15, max_tokens=19, family=1),
            Arrival(at_s=0.388, num_prompt=14, max_tokens=3, family=1),
            Arrival(at_s=0.388, num_prompt=1, max_tokens=1, family=1, is_poison=True),
        ),
        faults=(),
        policy=POISONED,
    ),
    "what a prompt shares is not evicted for one that starts with it": Plan(
        seed=97925,
        gateways=("g0", "g1"),
        workers=(
            WorkerPlan(name="p0", role=Role.PREFILL, num_blocks=20, max_batch_tokens=64),
            WorkerPlan(name="d1", role=Role.DECODE, num_blocks=20, max_batch_tokens=64),
            WorkerPlan(name="d2", role=Role.DECODE, num_blocks=20, max_batch_tokens=64),
        ),
        arrivals=(
            Arrival(at_s=0.102, num_prompt=19, max_tokens=10, is_greedy=False),
            Arrival(at_s=0.118, num_prompt=30, max_tokens=20, is_greedy=False),
            Arrival(at_s=0.116, num_prompt=20, max_tokens=4, gateway="g1", family=2, is_greedy=False),
            Arrival(at_s=0.111, num_prompt=8, max_tokens=18, gateway="g1", family=1, pause_s=0.02),
            Arrival(at_s=0.106, num_prompt=29, max_tokens=18, family=1, leaves_s=0.223),
            Arrival(at_s=0.105, num_prompt=23, max_tokens=17, pause_s=0.02),
            Arrival(at_s=0.104, num_prompt=23, max_tokens=14, gateway="g1", family=2, is_greedy=False),
            Arrival(at_s=0.107, num_prompt=28, max_tokens=15, family=2),
        ),
        faults=(
            Break(at_s=0.353, service="p0", other="g0"),
            Break(at_s=0.49, on_event=17, service="g1", other="g0"),
            Drain(at_s=0.577, on_event=13, service="d1", back_s=0.0),
            Crash(at_s=1.019, service="d2", back_s=2.054),
            FailRank(at_s=0.295, service="d2", hangs_s=0.016),
            Storm(at_s=0.241, service="g0", other="d1", for_s=2.0, loss=0.05, delay_s=0.1),
        ),
        policy=LifePolicy(
            max_concurrent_requests=512,
            request_timeout_s=3.0,
            when_no_prefill="reject",
            no_worker_timeout_s=3.0,
            resume_timeout_s=0.5,
            max_attempts=1,
        ),
        lease_s=1.5,
        step_s=0.03,
    ),
}
