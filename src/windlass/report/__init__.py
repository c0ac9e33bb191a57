"""What a run tells: one log of events, and the views of it.

config.py   the recipe's `report:` block
events.py   events.jsonl, written and read; the only truth
metrics.py  `Recorder`, the loop's one metrics call
console.py  the progress line and the final table
page/       report.html, one file that works offline
"""
