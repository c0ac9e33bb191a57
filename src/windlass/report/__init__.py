"""What a run reports: one log of events, and views of it.

page/    report.html: one file that works offline
sinks/   TensorBoard, Weights & Biases and Trackio, by a process beside the run

config        the recipe's `report` section
events        events.jsonl, written and read; the only record
metrics       `Recorder`, the loop's one metrics call
recorded_run  what the Recorder is given of a run: its length, what makes its MFU, what is read on logging steps
console       the progress line and the final table
"""
