"""What a run tells: one log of events, and the views of it.

config      the recipe's `report:` block
events      events.jsonl, written and read; the only truth
metrics     `Recorder`, the loop's one metrics call
console     the progress line and the final table
page/       report.html, one file that works offline
"""
