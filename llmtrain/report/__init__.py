"""The report of training runs: one self-contained HTML page from the files that a run leaves in its folder.

Reads files and nothing else: no torch, no model, no settings but those written down. A file that is missing, cut short
or damaged is said in the page. The charts are matplotlib's, imported when a page is written.
"""

from llmtrain.report.page import write_report
from llmtrain.report.runs import FACTS_FILE, REPORT_FILE, Run, read_run

__all__ = ["FACTS_FILE", "REPORT_FILE", "Run", "read_run", "write_report"]
