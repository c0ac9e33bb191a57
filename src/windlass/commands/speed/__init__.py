"""How fast a run is, and why: `windlass advise` and `windlass bench`.

advise  where the time of a run goes, and what to change next
bench   throughput, MFU and memory over a grid of settings

Inside:

plot    the bars of a bench as SVG
"""
