"""Prefill and decode in one worker, one KV cache and the same steps: the baseline that separate pools compare with.

1. `PrefillRequest` comes from its gateway: WAITING, as on a prefill worker. It starts when its blocks can be reserved,
   and one more is left for each sequence that runs.
2. Each step computes one token for each running sequence, and chunks of prompts beside them.
3. With its last chunk one token is sampled: `PrefillDone` carries it, without KV. Blocks and sequence go over to the
   decode half in that moment, with nothing copied, and it is RUNNING from the next step on.
4. From there on all is as on a decode worker: `Tokens`, preemption, the end.
"""
