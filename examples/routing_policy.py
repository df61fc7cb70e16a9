"""A routing policy of your own: keep prompts where their KV is, but never behind a long queue.

kvolt twin --workers 4 --speed 20 --router examples/routing_policy.py:cost     # simulate it before it serves anyone
kvolt serve sim-tiny --workers 4 --router examples/routing_policy.py:cost      # serve with it
kvolt serve sim-tiny --workers 4 --set router.shadow=examples/routing_policy.py:cost   # or only compare, in metrics

A saved change of this file is in use within a second. docs/tutorials/router-policy.md goes through it.
"""

import numpy as np

LONG_QUEUE_S = 0.5
"""A queue from which other workers are better, even if they have to compute the prompt again."""
BATCH_S = 0.002
"""What each request that is decoding already costs the new one, and the new one costs it."""


def cost(request, workers):
    """Seconds for each worker, as an array; the lowest wins. All fields are arrays with one element per worker."""
    share_cached = workers.overlap_blocks / max(request.num_blocks, 1)
    wait_s = workers.queue_s + workers.prefill_s  # the prompts before this one, and what of it is not cached
    beside_s = BATCH_S * workers.decoding * request.output_tokens / 100
    penalty_s = np.where(workers.queue_s > LONG_QUEUE_S, 10.0, 0.0)
    # Between workers that cost the same, the one with more of the prompt: it keeps prefixes together.
    return wait_s + beside_s + penalty_s - 1e-3 * share_cached
