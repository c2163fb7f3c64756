"""Training: one LightningModule, its optimisers, schedules, callbacks and checkpoints, and `fit`, which joins them.

`training.deepspeed` holds everything that knows DeepSpeed. Nothing here knows Hydra or where a setting came from.
"""
