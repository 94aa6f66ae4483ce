"""The HTTP front: owner of a request's life. Imports no torch.

1. `openai` parses and validates a body, `tokenizer` renders the chat template and tokenizes.
2. `engine` submits each sequence; `requests` routes it to a prefill worker (`PrefillRequest`).
3. On `PrefillDone` token 0 goes to the client at once; only then a decode worker is picked (`DecodeRequest`).
4. `Tokens` become text (`detokenizer`: characters never split, stop strings never shown) and SSE frames.
5. A worker's death, a lost link, preemption or draining is one thing: the next attempt, from the tokens so far.
6. The request ends in exactly one terminal frame; a client that leaves cancels it at both workers.
"""
