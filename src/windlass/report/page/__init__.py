"""report.html: one file that shows a run, works offline, and is safe whatever text a model wrote.

page.html.j2, page.css, page.js: the page itself

write    `write_report`, the call
history  events -> what is drawn: valid curves, restarts, the time ledger over all sessions; bounded in size

Inside:

figures  the charts, as plotly's plain JSON
"""
