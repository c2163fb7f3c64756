"""Text becomes token shards, and shards and task examples become batches. Torch-free except `batches`, `modules`."""
