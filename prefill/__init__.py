"""The prefill pool: computes prompts, samples one token each, holds the KV until a decode worker has it.

1. `PrefillRequest` comes from its gateway: WAITING, oldest first, resumed ones before new ones.
2. It starts once all its blocks are reserved (cached prefix blocks are shared): RUNNING.
   Chunks of several prompts share each step, under a token budget and a step-time cap.
3. With its last chunk one token is sampled: `PrefillDone` carries it with the descriptor of the
   blocks: HANDOFF. If that token ended the request, its blocks are given back at once instead.
4. A decode worker pulls the blocks and sends `KVRelease`: they stay cached as a prefix, owned by nobody.
   While its gateway says that the request lives, they are evicted after all others, for its next attempt.
5. `Cancel`, the lease's end, or a gateway that is gone do the same at any stage.
"""
