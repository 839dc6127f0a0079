"""Retained fractions of the form that other tools measure, drawn from a seeded generator: `make_arrays.py arrays.npz`.

Shaped like Qwen3-4B (36 layers x 8 KV heads), 28 samples of 18 contexts, ratio 0.3. A few KV heads need most of their
history and half of them nearly none; each sample is scaled by its length and varies a little. Not a measurement: budgets
for a real model come from `tangram-plan calibrate`.
"""

import sys

import numpy as np

NUM_LAYERS, NUM_KV_HEADS, NUM_SAMPLES, NUM_CONTEXTS = 36, 8, 28, 18
WINDOW_TOKENS, SINK_TOKENS, RATIO = 4096, 32, 0.3

random = np.random.default_rng(2507)
need = random.lognormal(-2.6, 1.3, (NUM_LAYERS, NUM_KV_HEADS))
context_of = np.concatenate([np.arange(NUM_CONTEXTS), random.integers(0, NUM_CONTEXTS, NUM_SAMPLES - NUM_CONTEXTS)])
context_tokens = random.choice(
    np.arange(14_600, 26_500), NUM_CONTEXTS, replace=False
)  # the length tells contexts apart
content = random.lognormal(0.0, 0.25, (NUM_CONTEXTS, NUM_LAYERS, NUM_KV_HEADS))

retained = need * content[context_of] * random.lognormal(0.0, 0.03, (NUM_SAMPLES, NUM_LAYERS, NUM_KV_HEADS))
tokens = context_tokens[context_of]
demand = (RATIO * tokens - WINDOW_TOKENS) / tokens  # what is left for tokens outside the window
for _ in range(50):  # no KV head keeps more than everything
    retained = np.minimum(1.0, retained * (demand / retained.mean(axis=(1, 2)))[:, None, None])

meta = np.stack(
    [
        tokens,
        np.full_like(tokens, SINK_TOKENS),
        tokens + SINK_TOKENS + WINDOW_TOKENS,
        np.full_like(tokens, WINDOW_TOKENS),
    ],
    axis=1,
)
np.savez_compressed(
    sys.argv[1],
    raw_ratio=retained[None],
    static_layer_ids=np.arange(NUM_LAYERS),
    base_ratios=np.array([RATIO], np.float32),
    sample_meta=meta.astype(np.int32),
)
