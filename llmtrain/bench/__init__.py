"""Side-by-side measurements: what our paths cost beside plain PyTorch, `transformers` and `tokenizers`.

Every figure is a ratio of two rates that were taken in turns in one process, so that a busy or throttled machine slows
both sides. This package may import everything of ours, and `transformers` (lazily, in `peers`). It knows nothing of
settings files or the command line.
"""
