"""`baton bench plan`: deployments that do not exist, on a virtual clock.

What decides is real: the gateway's `Requests` with its router, `PrefillService`, `DecodeService`, their schedulers and
block managers. What takes time is not there: a step, a handoff and a message take as long as costs say that were
measured on a machine (`costs`), and tokens, checksums and bytes of KV are made up.

The life of a plan:

1. `costs` reads the results of `baton bench steps` and `handoff`, and fits a sum over few features to them.
2. `planner` has requests sent at rates (`goodput.RateSearch`), each time to a new `Cluster` of the pools in question.
3. `cluster` puts a gateway and workers (`worker`) on the clock. Steps run on a `Host`, which several workers may share.
4. `clients` send what a plan says and note what a real client would measure, in the same `RequestFigures`.
5. `measured` does the same with the runs in the results of `baton bench run`, for how far a simulation is from them.

Times of one seed are always the same. Nothing imports torch, and only `costs`, `measured` and `__main__` read files.
"""
