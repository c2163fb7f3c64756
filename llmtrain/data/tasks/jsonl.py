"""The task `jsonl`: the user's own examples, from files of any form that `llmtrain.data.records` reads."""

from collections.abc import Sequence
from pathlib import Path

from llmtrain.data.records import hold_out, read_examples, without_tested
from llmtrain.data.tasks.task import Task


def jsonl(
    *,
    paths: str | Path | Sequence[str | Path],
    test_paths: str | Path | Sequence[str | Path] | None = None,
    test_examples: int | None = None,
    metric: str = "exact_match",
    skip_malformed: bool = False,
    encoding: str = "utf-8",
    seed: int = 0,
) -> Task:
    """Examples from files.

    Args:
        paths: Files, folders or patterns with `*` to train on.
        test_paths: The same, to test on, and what has the same prompt is not trained on; without them `test_examples`
            of `paths` are held out.
        test_examples: How many to hold out (see `hold_out`); None takes a tenth, at most 500. Not together
            with `test_paths`.
        metric: How answers are scored; not looked at here.
        skip_malformed: Leave malformed records out instead of refusing the file.
        encoding: Of the files.
        seed: Decides which examples are held out.

    Raises:
        ValueError: Anything wrong with the files, by file and line; too few different examples; both `test_paths`
            and `test_examples`.
    """
    if test_paths and test_examples is not None:
        raise ValueError(
            "test_examples holds out a part of data.paths, but data.test_paths gives the test files: leave one out"
        )
    conversations, report = read_examples(paths, skip_malformed=skip_malformed, encoding=encoding)
    if test_paths:
        test, report = read_examples(test_paths, skip_malformed=skip_malformed, encoding=encoding, report=report)
        train = without_tested(conversations, test)
    else:
        count = min(500, max(1, len(conversations) // 10)) if test_examples is None else test_examples
        train, test = hold_out(conversations, count, seed=seed)
    return Task("jsonl", train, test, metric, report=report)
