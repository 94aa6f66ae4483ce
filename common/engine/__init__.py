"""The engine: model, weights, paged KV cache, block manager, sampler, runner."""
