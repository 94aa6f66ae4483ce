"""Plans that failed once, as small as they could be made, by what they show."""

from common.wire import Role
from tests.sim.plan import Arrival, Crash, Partition, Plan, WorkerPlan

BOTH = WorkerPlan(name="b0", role=Role.BOTH)

REGRESSIONS: dict[str, Plan] = {
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
}
