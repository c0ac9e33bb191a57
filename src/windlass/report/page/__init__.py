"""report.html: one file that shows a run, works offline, and is safe whatever text a model wrote.

page.html.j2, parts.html.j2, page.css, page.js: the page itself; page.js draws the charts; data.html.j2: that of data

write  `write_report`, `page_text`: the page from a run directory, or of several runs
serve  the page from a port of this machine, which follows runs that go on
child  the page by a process of its own, at the end of a run
data_page  the page of prepared data, `windlass data report`

Inside:

history     events.jsonl -> valid curves, restarts, the time ledger over all sessions; reads on where it ended, bounded in size
tables      state, tiles, the ledger's rows, facts, what several runs differ in
step_lines  many step lines at once as arrays
buckets     neighbouring lines in a bounded number of buckets; extremes keep their steps
charts      the charts by name: which quantities, unit, axis
drawn_data  the JSON that page.js draws
"""
