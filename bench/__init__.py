"""`baton bench`: one load generator for every server that speaks OpenAI's HTTP API.

The life of a measurement:

1. `workload` makes `RequestSpec`s out of random lengths, a trace (`trace`) or texts (`prompts`), once: they are the
   same for every server and every repeat.
2. For each run `workload.plan_run` gives them tokens and times to be sent at: a `Plan`. Each repeat has tokens of its
   own, so that no run finds the prompts of the one before it in a prefix cache.
3. `client` carries a plan out and keeps what came as `(time, bytes)`: nothing is parsed while requests run.
4. `sse` and `measure` turn that into times of tokens, and `figures` those into latencies and throughputs.
5. `runs` alternates the servers (`interleave`) and `goodput` searches a rate; `tables`, `report` and `plots` show it.

`baton bench gateway` measures the gateway alone: `gateway_process` starts a real one, `fake_workers` are its workers,
and `gateway_figures` compares what the client saw with when they sent it.

`planning` needs no server: it simulates deployments. `inside` looks at the engine without one.

What does I/O: `client`, `runs`, `machine_load`, `progress`, `interrupt`, `gateway_process`, `fake_workers`,
`gateway_bench` and `__main__`. The rest is pure, but for files that it is told to read or write.
"""
