"""llmtrain: text → tokens → a pretrained model → a fine-tuned model → text, each step of it in the open."""

__version__ = "0.1.0"
