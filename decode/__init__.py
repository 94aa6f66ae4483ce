"""The decode pool: pulls a prompt's KV and computes one token for every running sequence at every step.

1. `DecodeRequest` comes from its gateway: WAITING, oldest first, resumed ones before new ones.
2. It is admitted when its blocks can be reserved above the watermark: PULLING, from the prefill worker.
3. Every block arrived and was verified: `KVRelease` to the prefill worker, RUNNING from the next step on.
4. Each step computes one token for each running sequence; one `Tokens` message per gateway carries them.
5. Out of blocks: the youngest is preempted, `Ended(PREEMPTED)`; its gateway resumes it through prefill.
6. The end token, max_tokens, `Cancel` or a gateway that is gone free its blocks. What is being pulled
   stays reserved until the transfer has stopped writing.
"""
